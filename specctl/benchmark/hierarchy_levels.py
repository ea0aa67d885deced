"""Forward passes and rates at each level of a hierarchy of drafts, and the target times at which it pays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from specctl.benchmark.cost_model import CostModel, forwards
from specctl.benchmark.summaries import metrics_of
from specctl.metrics import Level
from specctl.observing.candidate import Candidate
from specctl.observing.results import RunSet
from specctl.observing.speedup import evened


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """One draft of a candidate.

    Attributes:
        draft: index among the loaded drafts.
        redundancy: HSDDW's sigma, the share of its tokens that its verifier rejected; None if it drafted nothing.
        utilisation: HSDDW's eta, its forward passes per token passed to its verifier; None if it drafted nothing.
    """

    draft: int
    redundancy: float | None
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class CandidateLevels:
    """A candidate's forward passes, by model.

    Attributes:
        passes: per generated token, of each loaded draft and, last, of the target (HSDDW's eta of the target).
        levels: its drafts, from the target's own draft down.
        pays_ms: the range of target pass times in milliseconds in which a hierarchy is predicted to be faster than
            every candidate with one draft or none, given the fitted times of the drafts. The upper end is None if
            there is no limit. None if there is no such range.
    """

    candidate: str
    passes: tuple[float, ...]
    levels: tuple[DraftLevel, ...]
    pays_ms: tuple[float, float | None] | None = None

    @property
    def nested(self) -> bool:
        return len(self.levels) > 1

    def ms_per_token(self, costs: Sequence[float]) -> float:
        """Predicted time per token, from the times of one pass in the order of ``passes``."""
        return sum(ms * passes for ms, passes in zip(costs, self.passes, strict=True))


def candidate_levels(results: RunSet, model: CostModel | None) -> list[CandidateLevels]:
    """The levels of each candidate whose runs have known passes; empty if a single draft is loaded."""
    if not results.header.drafts:
        return []
    found = [_levels(results, candidate) for candidate in results.header.candidates if results.of(candidate.label)]
    known = [one for one in found if one is not None]
    plain = [one.passes for one in known if not one.nested and not results.header.candidate(one.candidate).parallel]
    costs = model.drafts_ms if model is not None else ()
    return [
        CandidateLevels(one.candidate, one.passes, one.levels, break_even(one.passes, plain, costs))
        if one.nested and costs
        else one
        for one in known
    ]


def break_even(
    passes: Sequence[float], others: Iterable[Sequence[float]], drafts_ms: Sequence[float]
) -> tuple[float, float | None] | None:
    """The range of target pass times in which ``passes`` cost less than all others; None if there is none.

    Another candidate with fewer target passes sets the upper end: it wins where the target is slow.

    Args:
        passes: per token, of each loaded draft and, last, of the target.
        others: passes of the candidates to compare with, in the same order.
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


def _levels(results: RunSet, candidate: Candidate) -> CandidateLevels | None:
    runs = evened(results.of(candidate.label))
    tokens = sum(run.tokens for run in runs)
    if not tokens or any(turn.target_forwards == 0 for run in runs for turn in run.turns if turn.tokens):
        return None
    drafts = len(results.header.drafts)
    counts = [0] * (drafts + 1)
    for run in runs:
        counts = [total + count for total, count in zip(counts, forwards(run, candidate, drafts), strict=True)]
    sums = [*metrics_of(runs).levels, *(Level() for _ in candidate.drafts)]
    levels = tuple(
        DraftLevel(draft, level.redundancy, level.utilisation) if level.drafted else DraftLevel(draft, None, None)
        for draft, level in zip(candidate.drafts, sums, strict=False)
    )
    return CandidateLevels(candidate.label, tuple(count / tokens for count in counts), levels)
