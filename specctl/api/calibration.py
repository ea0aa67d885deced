"""`specctl calibrate` as a function."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from specctl.api.decoder import Decoder, load
from specctl.calibration.calibrated import calibrated_profile, facts_of, profile_text
from specctl.calibration.compared_settings import compared_settings, computed_by, recordable
from specctl.calibration.decision import Decision, decide
from specctl.calibration.live_check import Measured
from specctl.calibration.search import Calibration
from specctl.errors import UsageError
from specctl.observing.progress import SILENT, Progress
from specctl.outputs import write_whole
from specctl.profile import ResolvedProfile
from specctl.prompts.suites import EMBEDDED, Suite, load_records, load_suite, sample, suite_names
from specctl.replay.recording.collecting import collect_traces


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The outcome of a calibration, reported on prompts that did not choose it.

    Attributes:
        policy: the policy to use with its settings, as ``--policy`` writes it; ``none`` where no draft pays.
        tokens_per_second: measured live, or without ``verify`` predicted.
        speedup: over the target alone, with the ends of its 95% interval; None where there are too few prompts for an
            interval.
        verdict: the recommendation in a sentence, with the settings it was compared with.
        ranking: each policy's best setting and its tokens per second, the fastest first.
        warnings: reasons to doubt the numbers.
        measured: the live runs of the chosen setting and of others; empty without ``verify``.
        found: all that the search found.
    """

    policy: str
    tokens_per_second: float
    speedup: tuple[float, float | None, float | None]
    verdict: str
    ranking: tuple[tuple[str, float], ...]
    warnings: tuple[str, ...]
    measured: tuple[Measured, ...]
    found: Calibration
    _decision: Decision
    _resolved: ResolvedProfile
    _facts: dict[str, Any]

    def write(self, path: str | PathLike[str]) -> Path:
        """Write a profile that extends the calibrated one with the chosen setting; `load` and every command accept it.

        Raises:
            OutputError: the file cannot be written.
        """
        output = Path(path)
        profile = calibrated_profile(self._resolved, self._decision, self._facts, output)
        write_whole(output, profile_text(profile, self.verdict))
        return output


def calibrate(
    decoder: Decoder | str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | Sequence[str] | Suite = EMBEDDED,
    *,
    policy: str | None = None,
    samples: int = 10,
    grid: Literal["paper", "dense"] = "dense",
    verify: bool = True,
    progress: Progress = SILENT,
) -> Calibrated:
    """Find the stopping policy and its values that are fastest on a pair, this machine and these prompts.

    The models run once; every setting is then replayed exactly on their output (docs/calibrate.md).

    Args:
        decoder: a loaded pair, or name or path of a profile.
        prompts: texts; a file of records; or the name of a suite, see ``calibrate --suite``.
        policy: the policy to tune, ``all``, or one for each draft, separated by commas; by default the profile's.
        samples: number of prompts that choose the setting; the same number is held out to report on.
        grid: values to try, of the papers or in fine steps.
        verify: run the chosen setting live and compare it with the prediction.
        progress: receives counts.

    Raises:
        UsageError: there is no draft, no such policy or suite, or a draft that cannot be replayed.
        SpecctlError: models or prompts cannot be read.
    """
    own = decoder if isinstance(decoder, Decoder) else load(decoder)
    profile = own.profile
    if profile.draft is None:
        raise UsageError("the profile has no draft to calibrate", "load it with a draft")
    asked = compared_settings(
        profile.draft, policy, grid, [], recordable(profile), computed_by(profile.draft, (), None)
    )
    seed = profile.sampling.seed
    suite = _suite(prompts)
    traces = collect_traces(own.pair, profile, sample(suite, 2 * samples, seed), asked.depth, progress=progress)
    left_out = [f"prompt {identity} is left out: {why}" for identity, why in traces.failures.items()]
    pair, given = own.pair if verify else None, len(suite.prompts)
    decision = decide(traces, asked, profile, pair, progress, left_out, given=given)
    if decision.interrupted:
        raise KeyboardInterrupt
    found, advice = decision.found, decision.advice
    used = advice.rival_used
    return Calibrated(
        policy=used.setting.label,
        tokens_per_second=used.tokens_per_second,
        speedup=(used.speedup.value, used.speedup.low, used.speedup.high),
        verdict=advice.verdict,
        ranking=tuple((one.score.setting.label, one.score.tokens_per_second) for one in found.ranking),
        warnings=tuple(found.warnings),
        measured=tuple(decision.measured),
        found=found,
        _decision=decision,
        _resolved=own.resolved,
        _facts=facts_of(traces, "specctl.calibrate()"),
    )


def _suite(prompts: str | PathLike[str] | Sequence[str] | Suite) -> Suite:
    if isinstance(prompts, Suite):
        return prompts
    if isinstance(prompts, str) and prompts in suite_names():
        return load_suite(prompts)
    if isinstance(prompts, str | PathLike):
        return load_records(Path(prompts))
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts)
    return load_records(io.BytesIO(lines.encode()))
