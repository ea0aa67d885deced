"""What a hierarchy of drafts does at each level, and from what costs on it pays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from specctl.benchmark.cost_model import CostModel, forwards
from specctl.benchmark.summaries import metrics_of
from specctl.metrics import Level
from specctl.observing.results import Entrant, RunSet
from specctl.observing.speedup import evened


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """One draft of an entrant.

    Attributes:
        draft: which of the loaded drafts.
        redundancy: HSDDW's sigma, the share of its drafts that its verifier refused; None where it drafted nothing.
        utilisation: HSDDW's eta, its forward passes for each token it handed up; None likewise.
    """

    draft: int
    redundancy: float | None
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class EntrantLevels:
    """An entrant's forward passes, by model.

    Attributes:
        passes: for each generated token, by loaded draft and last the target, whose share is HSDDW's eta of it.
        levels: its drafts, the one that the target verifies first.
        pays_ms: of a hierarchy, the times of a target pass between which it is predicted to be faster than every
            entrant with one draft or none, the drafts' times being as fitted; without an upper end where it stays so,
            None where there are no such times.
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
    """Of every entrant with runs whose passes are known; empty where all share a single draft."""
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
    """The target pass times between which ``passes`` cost less than all others; None where there are none.

    Longer drafts pay the more the slower the target is, so a rival with fewer target passes sets the upper end. Passes
    are for each token, by loaded draft and last the target.
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
