"""The course of a calibration once its traces are there: search, then run what was chosen live."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.calibration.batch_sizes import BatchSize, require_priced, search_sizes, with_batches
from specctl.calibration.compared_settings import ComparedSettings
from specctl.calibration.live_check import Measured, check_batch, check_live, doubts
from specctl.calibration.search import Calibration, search
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.policies import Setting
from specctl.profile.schema import Profile
from specctl.replay.costs import CostTable
from specctl.replay.play import replayable
from specctl.replay.trace_files import TraceSet


@dataclass(frozen=True, slots=True)
class Decision:
    """What a calibration found.

    Attributes:
        traces: that it searched in.
        found: the outcome of the search.
        costs: that it priced rounds with.
        measured: the live runs; empty where nothing was run.
        sizes: what was found for several texts at once, by ascending numbers.
    """

    traces: TraceSet
    found: Calibration
    costs: CostTable
    measured: list[Measured]
    sizes: list[BatchSize] = field(default_factory=list)

    @property
    def setting(self) -> Setting:
        """The chosen setting, with those for several texts."""
        return with_batches(
            self.found.winner.score.setting, {size.rows: size.winner.score.setting for size in self.sizes}
        )


def decide(
    traces: TraceSet,
    asked: ComparedSettings,
    profile: Profile,
    pair: Pair | None,
    progress: Progress,
    noted: Sequence[str] = (),
    sizes: Sequence[int] = (),
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
    measured = check_live(pair, profile, traces, found, asked.old, progress) if pair is not None else []
    if pair is not None:
        for size in chosen:
            measured += check_batch(pair, profile, traces, size, found.reported_on, progress)
    found.warnings += doubts(measured)
    return Decision(traces, found, traces.costs, measured, chosen)
