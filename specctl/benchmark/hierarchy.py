"""Forward passes and rates at each level of a hierarchy of drafts, and the costs from which on it pays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from specctl.benchmark.cost_model import CostModel, forwards
from specctl.benchmark.summaries import metrics_of
from specctl.metrics import Level
from specctl.observing.entrant import Entrant
from specctl.observing.results import RunSet
from specctl.observing.speedup import evened


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """One draft of an entrant.

    Attributes:
        draft: which of the loaded drafts.
        redundancy: HSDDW's sigma, the share of its tokens that its verifier rejected; None where it drafted nothing.
        utilisation: HSDDW's eta, its forward passes per token passed to its verifier; None where it drafted nothing.
    """

    draft: int
    redundancy: float | None
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class EntrantLevels:
    """An entrant's forward passes, by model.

    Attributes:
        passes: per generated token, of each loaded draft and last of the target (HSDDW's eta of the target).
        levels: its drafts, the one that the target verifies first.
        pays_ms: the range of target pass times in milliseconds in which a hierarchy is predicted to be faster than
            every entrant with one draft or none, given the fitted times of the drafts. The upper end is None where
            there is no limit; None without such a range.
    """

    entrant: str
    passes: tuple[float, ...]
    levels: tuple[DraftLevel, ...]
    pays_ms: tuple[float, float | None] | None = None

    @property
    def nested(self) -> bool:
        return len(self.levels) > 1

    def ms_per_token(self, costs: Sequence[float]) -> float:
        """Predicted from the times of one pass, in the order of ``passes``."""
        return sum(ms * passes for ms, passes in zip(costs, self.passes, strict=True))


def entrant_levels(results: RunSet, model: CostModel | None) -> list[EntrantLevels]:
    """One per entrant with runs whose passes are known; empty where a single draft is loaded."""
    if not results.header.drafts:
        return []
    found = [_levels(results, entrant) for entrant in results.header.entrants if results.of(entrant.label)]
    known = [one for one in found if one is not None]
    plain = [one.passes for one in known if not one.nested]
    costs = model.drafts_ms if model is not None else ()
    return [
        EntrantLevels(one.entrant, one.passes, one.levels, break_even(one.passes, plain, costs))
        if one.nested and costs
        else one
        for one in known
    ]


def break_even(
    passes: Sequence[float], others: Iterable[Sequence[float]], drafts_ms: Sequence[float]
) -> tuple[float, float | None] | None:
    """The range of target pass times in which ``passes`` cost less than all others; None where there is none.

    The slower the target, the more longer drafts pay, so an entrant with fewer target passes sets the upper end.

    Args:
        passes: per token, of each loaded draft and last of the target.
        others: the passes of the entrants to compare with, in the same order.
        drafts_ms: time of a pass of each draft.
    """
    low, high = 0.0, inf
    for other in others:
        more = sum(ms * (mine - theirs) for ms, mine, theirs in zip(drafts_ms, passes[:-1], other[:-1], strict=True))
        saved = other[-1] - passes[-1]
        if saved > 0:
            low = max(low, more / saved)
        elif saved < 0:
            high = min(high, more / saved)
        elif more > 0:
            return None
    if low >= high:
        return None
    return low, None if high == inf else high


def _levels(results: RunSet, entrant: Entrant) -> EntrantLevels | None:
    runs = evened(results.of(entrant.label))
    tokens = sum(run.tokens for run in runs)
    if not tokens or any(turn.target_forwards == 0 for run in runs for turn in run.turns if turn.tokens):
        return None
    drafts = len(results.header.drafts)
    counts = [0] * (drafts + 1)
    for run in runs:
        counts = [total + count for total, count in zip(counts, forwards(run, entrant, drafts), strict=True)]
    sums = [*metrics_of(runs).levels, *(Level() for _ in entrant.drafts)]
    levels = tuple(
        DraftLevel(draft, level.redundancy, level.utilisation) if level.drafted else DraftLevel(draft, None, None)
        for draft, level in zip(entrant.drafts, sums, strict=False)
    )
    return EntrantLevels(entrant.label, tuple(count / tokens for count in counts), levels)
