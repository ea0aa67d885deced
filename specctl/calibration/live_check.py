"""Runs the most important settings of a calibration live, to compare predicted and measured speed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from specctl.calibration.compared_settings import ComparedSettings
from specctl.calibration.search import Best, Calibration
from specctl.decoding.prompt_format import PromptFormat
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.observing.candidates import Candidates, candidates_of
from specctl.observing.progress import SILENT, Progress
from specctl.observing.results import BASELINE, Header, RunSet, evened, speedup
from specctl.policies import NONE, Setting
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.replay.trace_files import TraceSet
from specctl.statistics import Interval
from specctl.text_engine.pair_rows import passes_of

FAR_OFF = 0.25
"""Relative error of predicted speed above which the user is warned; differences between prompts alone are smaller."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The predicted and the measured speed of a setting.

    Attributes:
        behind: measured speed of the fastest that ran with it over its own, by the same prompts.
    """

    setting: Setting  # the setting
    predicted: float | None  # tokens/s after the prompt, by replay; None for a setting that cannot be replayed
    measured: float  # tokens/s after the prompt, live
    speedup: Interval | None  # measured speedup over target-only decoding, the time of the prompt included
    behind: Interval = Interval(1.0)  # noqa: RUF009 - it cannot be changed
    rows: int = 1  # batch size


Stopped = tuple[int, int] | None
"""The number of finished prompts and of all prompts if Ctrl-C ended the live runs, else None."""


def doubts(measured: Sequence[Measured]) -> list[str]:
    """A warning if live speed is far from the prediction, else nothing."""
    off = {_named(one): one.measured / one.predicted for one in measured if one.predicted and one.measured > 0}
    label, worst = max(off.items(), key=lambda item: max(item[1], 1 / item[1]), default=("", 1.0))
    if max(worst, 1 / worst) <= 1 + FAR_OFF:
        return []
    return [
        f"measured speed is far from predicted ({label}: {worst - 1:+.0%}), so this machine was faster or slower when "
        "its costs were measured; calibrate again while nothing else runs"
    ]


def stopped_live(ran: int, prompts: int) -> str:
    """A warning about numbers affected by Ctrl-C in the live runs."""
    if not ran:
        return "live runs were interrupted before any prompt had run with every setting: all speeds are predictions"
    return f"live runs were interrupted after {ran} of {prompts} prompts: measured speeds cover only these"


def _named(one: Measured) -> str:
    return one.setting.label + (f", {one.rows} texts at once" if one.rows > 1 else "")


def rivals_of(found: Calibration, asked: ComparedSettings) -> dict[Setting, float | None]:
    """The settings to run one text at a time, with their predicted tokens/s; None if not replayed.

    These are the chosen setting, the profile's own, the best constant, the policy that needs no calibration, and none.
    """
    constant = found.ranked("constant")
    others = [asked.old, *([asked.untuned] if asked.untuned is not None else [])]
    settings = {found.winner.score.setting, *others, NONE} | ({constant.score.setting} if constant else set())
    scores = (entry.score for entry in found.ranking)
    predicted: dict[Setting, float | None] = {
        one.setting: one.tokens_per_second for one in scores if one.setting in settings
    }
    for setting in others:
        predicted.setdefault(setting, None)
    return predicted


def rivals_together(size: Best) -> dict[Setting, float | None]:
    """The settings to run with several texts at once: the chosen one, the best constant and none."""
    entries = [one for one in size.ranking if one is size.winner or one.score.setting.policy in ("none", "constant")]
    return {one.score.setting: one.score.tokens_per_second for one in entries}


def check_live(
    pair: Pair,
    profile: Profile,
    traces: TraceSet,
    predicted: Mapping[Setting, float | None],
    reported_on: Sequence[str],
    progress: Progress = SILENT,
    rows: int = 1,
) -> tuple[list[Measured], Stopped]:
    """Run settings in turn on the prompts reported on.

    Stop strings are ignored, as they were when the traces were recorded. With several texts at once, prompts are
    repeated until every batch slot has at least one; intervals are over prompts.

    Args:
        pair: with the drafts and heads that the settings use.
        profile: the pair's profile.
        traces: with the records of the prompts.
        predicted: the settings, with their predicted tokens/s.
        reported_on: prompt ids.
        progress: receives a count of runs.
        rows: the batch size.

    Returns:
        The settings with their measured speeds, empty where not even one prompt was run with all of them.
    """
    assert profile.draft is not None
    drafting = [setting for setting in predicted if setting != NONE]
    candidates = candidates_of([profile.draft.stopped_by(setting) for setting in drafting])
    labels = {setting: one.label for setting, one in zip([NONE, *drafting], candidates.all, strict=True)}
    prompts = [
        SuitePrompt(f"{identity} {time}", **traces.records[identity])
        for time in range(-(-rows // len(reported_on)))
        for identity in reported_on
    ]
    drafts = [level.model for level in profile.draft.levels]
    passes = passes_of(pair, rows) if rows > 1 else None
    pair = _with_predictors(pair, candidates)
    results, stopped = run_candidates(pair, profile, candidates, prompts, drafts, progress, passes)
    results = replace(results, runs=[replace(run, prompt=run.prompt.rpartition(" ")[0]) for run in results.runs])
    found = ran(results, [labels[setting] for setting in predicted])
    measured = [
        Measured(setting, before, *found[labels[setting]], rows)
        for setting, before in predicted.items()
        if labels[setting] in found
    ]
    return measured, stopped


def run_candidates(
    pair: Pair,
    profile: Profile,
    candidates: Candidates,
    prompts: Sequence[SuitePrompt],
    drafts: Sequence[str],
    progress: Progress,
    passes: Sequence[Passes] | None = None,
) -> tuple[RunSet, Stopped]:
    """Run candidates on prompts, in turn and without stop strings.

    Ctrl-C ends the runs. The results then cover only prompts that all candidates have run, and the numbers of these and
    of all prompts are returned too.

    Args:
        pair: with the drafts and heads that the candidates use.
        profile: its sampling and prompt settings.
        candidates: the baseline and others.
        prompts: to run.
        drafts: names of the pair's drafts.
        progress: receives a count of runs.
        passes: of several texts at once; None for one text at a time.
    """
    from specctl.observing.results import gather
    from specctl.observing.round_robin import RoundRobin

    header = Header(
        **asdict(gather(pair, profile, Suite("", tuple(prompts), ""))),
        candidates=candidates.all,
        repeats=1,
        lengths=[profile.sampling.max_new_tokens],
        drafts=list(drafts) if len(pair.drafts) > 1 else [],
    )
    results = RunSet(header)
    settings = profile.sampling.model_copy(update={"stop": []})
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    with progress.counting("live runs", len(prompts) * len(candidates.all)) as advance:
        robin = RoundRobin(pair, results, prompts, settings, prompt_format, lambda _: None, passes=passes)
        try:
            for run in robin.run():
                advance(run.tokens)
        except KeyboardInterrupt:
            return _whole_prompts(results, len(prompts))
    return results, None


def _whole_prompts(results: RunSet, prompts: int) -> tuple[RunSet, tuple[int, int]]:
    """The runs of prompts that all candidates finished, the number of these prompts, and that of all."""
    ran: dict[str, set[str]] = {}
    for run in results.runs:
        ran.setdefault(run.prompt, set()).add(run.candidate)
    whole = {prompt for prompt, labels in ran.items() if len(labels) == len(results.header.candidates)}
    return replace(results, runs=[run for run in results.runs if run.prompt in whole]), (len(whole), prompts)


def _with_predictors(pair: Pair, candidates: Candidates) -> Pair:
    """The pair with its heads reordered: a candidate that names no head uses the first head of its draft."""
    own: list[Mapping[str, TrainedPredictor]] = [
        {names[0]: named[names[0]], **named} if names else {}
        for named, names in zip(pair.named_predictors, candidates.heads, strict=False)
    ]
    return replace(pair, named_predictors=(*own, *pair.named_predictors[len(own) :]))


class Ran(NamedTuple):
    """The live runs of a candidate."""

    tokens_per_second: float  # after the prompt
    speedup: Interval | None  # over target-only decoding, the time of the prompt included
    behind: Interval  # the speed of the fastest candidate over its own, by the same prompts


def ran(results: RunSet, labels: Iterable[str]) -> dict[str, Ran]:
    """The live runs of the candidates with these labels, by label."""
    runs_of = {label: runs for label in labels if (runs := evened(results.of(label)))}
    speeds = {label: speedup(runs, results.of(BASELINE)) for label, runs in runs_of.items()}
    known = {label: speed.of_totals.value for label, speed in speeds.items() if speed is not None}
    first = max(known, key=lambda label: known[label], default=None)
    found = {}
    for label, runs in runs_of.items():
        ratio = None if first is None else speedup(runs_of[first], runs)
        speed = speeds[label]
        found[label] = Ran(
            1e3 * sum(run.tokens for run in runs) / sum(run.decode_ms for run in runs),
            None if speed is None else speed.of_totals,
            Interval(1.0) if ratio is None else ratio.of_totals,
        )
    return found
