"""The course of a calibration once its traces are there: search, then run what was chosen live."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.calibration.advice import Advice, fastest
from specctl.calibration.batch_sizes import BatchSize, require_priced, search_sizes, with_batches
from specctl.calibration.compared_settings import ComparedSettings
from specctl.calibration.live_check import Measured, check_batch, check_live, doubts, stopped_live
from specctl.calibration.search import Calibration, search
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.policies import Setting
from specctl.profile.schema import Profile
from specctl.replay.costs import CostTable
from specctl.replay.play import replayable
from specctl.replay.trace_files import TraceSet
from specctl.reporting.placing import listed


@dataclass(frozen=True, slots=True)
class Decision:
    """What a calibration found.

    Attributes:
        traces: that it searched in.
        found: the outcome of the search.
        costs: that it priced rounds with.
        measured: the live runs; empty where nothing was run.
        old: the profile's own setting.
        sizes: what was found for several texts at once, by ascending numbers.
        given: how many prompts there were to draw from; None if that is not known.
        interrupted: whether Ctrl-C ended the live runs.
    """

    traces: TraceSet
    found: Calibration
    costs: CostTable
    measured: list[Measured]
    old: Setting | None = None
    sizes: list[BatchSize] = field(default_factory=list)
    given: int | None = None
    interrupted: bool = False

    @property
    def advice(self) -> Advice:
        """What to use for one text at a time, by the live runs if there are any."""
        return Advice.of(self.found, self.old, self.measured)

    @property
    def setting(self) -> Setting:
        """What to use, with the settings for several texts."""
        return with_batches(self.advice.setting, {size.rows: self.setting_of(size) for size in self.sizes})

    def setting_of(self, size: BatchSize) -> Setting:
        """What to use for several texts at once: the chosen setting, unless another one measured faster."""
        return fastest(size.winner.score.setting, [one for one in self.measured if one.rows == size.rows])

    @property
    def prompts(self) -> dict[str, int]:
        """How many prompts were given, chose, reported, failed, and were left out for another reason."""
        chose, reported = set(self.found.chosen_on), set(self.found.reported_on)
        used, failed = len(chose | reported), len(self.traces.failures)
        given = used + failed if self.given is None else self.given
        counts = {"given": given, "chose": len(chose), "reported": len(reported), "failed": failed}
        return {**counts, "left_out": given - used - failed}

    @property
    def prompts_told(self) -> str:
        """`prompts` as a sentence, without its full stop."""
        counts = self.prompts
        parts = [f"{counts['chose']} chose the setting", f"{counts['reported']} report on it"]
        parts += [f"{counts['failed']} could not be run"] if counts["failed"] else []
        parts += [f"{counts['left_out']} were left out (--samples)"] if counts["left_out"] else []
        return f"{counts['given']} prompts: {listed(parts)}"


def decide(
    traces: TraceSet,
    asked: ComparedSettings,
    profile: Profile,
    pair: Pair | None,
    progress: Progress,
    noted: Sequence[str] = (),
    sizes: Sequence[int] = (),
    given: int | None = None,
) -> Decision:
    """`search` among the settings compared, and where there is a pair `check_live`, with the warnings of both.

    The outcome warns too where live runs verify in another way than the replay.

    Args:
        traces: recorded with the profile.
        asked: the settings compared.
        profile: the pair's, with the sampling settings of live runs.
        pair: with the drafts and heads that the settings use; None to run nothing live.
        progress: receives counts of settings and of live runs.
        noted: warnings to give besides, before those of the live runs.
        sizes: numbers of texts at once, ascending from 2, for which settings are chosen too.
        given: how many prompts there were to draw from.

    Raises:
        UsageError: there is no trace, or no cost of so many texts.
    """
    if not traces.traces or traces.costs is None:
        raise UsageError("no prompt could be run, so there is nothing to calibrate on")
    require_priced(sizes, traces.costs, "the trace")
    old = asked.old if replayable(asked.old, sampled=profile.sampling.temperature > 0) else None
    with progress.counting("settings", asked.most(old)) as advance:
        found = search(traces, asked.candidates, old, traces.costs, asked.also_ranked, advance, space=asked.space)
    chosen: list[BatchSize] = []
    if sizes:
        with progress.counting("numbers of texts", len(sizes)) as advance:
            chosen = search_sizes(traces, found, asked.candidates, sizes, traces.costs, advance)
    verification = profile.sampling.verification
    if traces.verification not in (None, verification):
        played, runs = (
            {"token": "one by one", "block": "as a block"}[each] for each in (traces.verification, verification)
        )
        found.warnings.append(
            f"predictions are of draft tokens verified {played}, and live runs verify them {runs} "
            "(sampling.verification): more are kept as a block"
        )
    found.warnings += noted
    measured: list[Measured] = []
    stopped: tuple[int, int] | None = None
    if pair is not None:
        live = check_live(pair, profile, traces, found, asked, progress)
        measured, stopped = live.measured, live.stopped
        for size in chosen:
            if stopped is None:
                live = check_batch(pair, profile, traces, size, found.reported_on, progress)
                measured, stopped = [*measured, *live.measured], live.stopped
    found.warnings += doubts(measured)
    if stopped is not None:
        found.warnings.append(stopped_live(*stopped))
    return Decision(traces, found, traces.costs, measured, asked.old, chosen, given, stopped is not None)
