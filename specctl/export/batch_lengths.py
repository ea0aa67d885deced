"""The fastest draft lengths of an engine that verifies several texts at once, by replaying these together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specctl.calibration.choice import choose
from specctl.calibration.scores import score_together
from specctl.calibration.search import Ranked
from specctl.export.foreign_engine import Engine
from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet


@dataclass(frozen=True, slots=True)
class BatchLength:
    """The fastest length for a number of texts at once, on the prompts reported on; none where no draft pays."""

    rows: int
    found: Ranked


def batch_lengths(
    engine: Engine,
    traces: TraceSet,
    prompts: tuple[Sequence[str], Sequence[str]],
    sizes: Sequence[int],
    costs: CostTable,
    advance: Callable[[], None] = lambda: None,
) -> list[BatchLength]:
    """Replay every length with that many texts at once; the fastest counts, and none within one standard error of it.

    Args:
        engine: which drafts for all texts equally far.
        traces: as the engine keeps and judges draft tokens.
        prompts: ids to choose on and to report on.
        sizes: numbers of texts, each at least 2.
        costs: of the engine or of this machine, with ``batches`` of these numbers.
        advance: called after each length.
    """
    chosen_on, reported_on = prompts
    costs = with_further_passes(engine, costs)
    lengths = engine.lengths(traces.header.depth)
    settings = [NONE, *(Setting.of({"name": "constant", "draft_length": length}) for length in lengths)]
    found = []
    for rows in sizes:
        scores = []
        for setting in settings:
            scores.append(score_together(setting, traces, chosen_on, rows, costs))
            advance()
        chosen = choose(scores).chosen.setting
        baseline = score_together(NONE, traces, reported_on, rows, costs)
        best = score_together(chosen, traces, reported_on, rows, costs)
        found.append(BatchLength(rows, Ranked(best, best.speedup(baseline))))
    return found


def with_further_passes(engine: Engine, costs: CostTable) -> CostTable:
    """Costs in which each verification of a draft contains the draft's passes that draft nothing."""
    if not engine.further_passes:
        return costs
    dearer = costs.verify_ms.copy()
    dearer[:, 1:] += engine.further_passes * costs.at(float(costs.contexts[0]))[0]
    batches: Mapping[int, CostTable] = costs.batches
    more = {rows: with_further_passes(engine, table) for rows, table in batches.items()}
    return replace(costs, verify_ms=dearer, batches=more)
