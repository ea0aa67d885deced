"""Exports of one calibration: what was asked for, and what was found for every engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specctl.calibration.compared_settings import ComparedSettings
from specctl.calibration.decision import Decision
from specctl.calibration.search import Ranked, search
from specctl.decoding.sampling import Sampling
from specctl.export.foreign_engine import Engine, Names, Sampled
from specctl.export.rereading import Reading, reading_of, traces_as
from specctl.export.rule_search import Exported, search_rule
from specctl.export.rule_space import rule_space
from specctl.models.running.pair import Pair
from specctl.observing.progress import SILENT, Progress
from specctl.profile.schema import Profile
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet

LONGEST_PRICED = 1000
"""The longest draft that given costs price."""


@dataclass(frozen=True, slots=True)
class GivenCosts:
    """Milliseconds that passes take in an engine.

    Attributes:
        draft: of a draft step.
        target: of a target pass over one token.
        per_token: of each further token in such a pass.
        alone: of a target pass where nothing was drafted.
    """

    draft: float
    target: float
    per_token: float
    alone: float

    def __str__(self) -> str:
        wider = f" + {self.per_token:g} n" if self.per_token else ""
        alone = "" if self.alone == self.target else f", {self.alone:g} ms without a draft"
        passes = f"{self.target:g}{wider} ms for a target pass of 1 + n tokens{alone}"
        return f"{self.draft:g} ms for a draft step and {passes}"

    def table(self, rows: int = 1) -> CostTable:
        """Of rounds in which that many texts take part."""
        return CostTable.flat(self.draft, self.target, LONGEST_PRICED, self.per_token * rows, self.alone)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be exported: the engines, their costs if these are known, of several texts by their number, and the
    kind of draft head, None for a draft model."""

    engines: tuple[Engine, ...]
    costs: GivenCosts | None = None
    batches: Mapping[int, GivenCosts] = field(default_factory=dict)
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Exports:
    """What was found for every engine, with what it is compared with.

    Attributes:
        found: an entry for each engine.
        here: the setting that specctl itself would use, with the same costs.
        costs: of the engine; None for those of this machine.
        reported_on: how many prompts report.
        held_out: whether these chose nothing.
    """

    found: Sequence[Exported]
    here: Ranked
    costs: GivenCosts | None
    reported_on: int
    held_out: bool


def export_to(
    order: Order,
    profile: Profile,
    asked: ComparedSettings,
    decision: Decision,
    pair: Callable[[], Pair],
    progress: Progress = SILENT,
) -> Exports:
    """Search every engine's rule, and with given costs specctl's own policies once more.

    Args:
        order: the engines.
        profile: of a target and one draft.
        asked: the settings of specctl's own that compete.
        decision: the calibration.
        pair: gives the loaded models, asked for only if an engine's draft tokens are not those of the traces.
        progress: receives a count of settings.

    Raises:
        UsageError: an engine's rule for sampling cannot be replayed.
    """
    assert profile.draft is not None
    traces, calibration = decision.traces, decision.found
    sampling = replace(Sampling.of(profile.sampling), verification=traces.header.verification)
    readings = [reading_of(engine, sampling) for engine in order.engines]
    costs, here = decision.costs, calibration.winner
    if order.costs is not None:
        costs = replace(order.costs.table(), batches={rows: one.table(rows) for rows, one in order.batches.items()})
        here = search(traces, asked.candidates, None, costs, asked.also_ranked).winner
    names = Names(profile.target.checkpoint, profile.draft.checkpoint, order.head)
    prompts = calibration.chosen_on, calibration.reported_on
    read: dict[Reading, TraceSet] = {}
    found = []
    together = list(zip(order.engines, readings, strict=True))
    sizes = [size.rows for size in decision.sizes]
    count = sum(len(rule_space(engine, how.confidence, traces.header.depth, order.head)) for engine, how in together)
    count += sum(len(sizes) * (len(engine.lengths(traces.header.depth)) + 1) for engine in order.engines)
    with progress.counting("settings of other engines", count) as advance:
        for engine, how in together:
            if how not in read:
                read[how] = traces_as(how, traces, profile, pair)
            sampled = Sampled(profile.sampling.temperature, how.blocks)
            found.append(search_rule(engine, how, read[how], prompts, costs, names, sampled, advance, sizes))
    return Exports(found, here, order.costs, len(calibration.reported_on), calibration.held_out)
