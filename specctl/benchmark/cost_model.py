"""Where the time goes: SpecDec++'s cost model fitted to the runs, bare forward times, and the oracle's bound."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from specctl.benchmark.summaries import Summary, metrics_of
from specctl.metrics import Level
from specctl.observing.results import Candidate, PassTimes, Run, RunSet, evened
from specctl.records import RoundSummary
from specctl.replay.costs import CostTable, columns
from specctl.replay.pearl import Simulated, TwoDevices
from specctl.statistics import Floats

LEAST_R_SQUARED = 0.5  # Least share of the variance that a fit must explain for its predictions to be drawn


@dataclass(frozen=True, slots=True)
class CostModel:
    """T = draft_ms N_draft + target_ms N_target (SpecDec++ eq. 3.1), T being the time after the prompt."""

    # draft_ms, target_ms: of one forward pass of the first draft, and of the target
    draft_ms: float
    target_ms: float
    # share of the runs' variance in T that the model explains; None if all runs took the same time
    r_squared: float | None
    runs: int  # number of runs it was fitted to; 0 for a model made from bare forward times
    further_ms: tuple[float, ...] = ()  # where several drafts are loaded, a term for each after the first

    @property
    def explains(self) -> bool:
        """Whether it explains enough of the runs' variance (`LEAST_R_SQUARED`) for its predictions to be drawn."""
        return self.r_squared is None or self.r_squared >= LEAST_R_SQUARED

    @property
    def drafts_ms(self) -> tuple[float, ...]:
        """Milliseconds of one forward pass of each loaded draft."""
        return (self.draft_ms, *self.further_ms)

    def milliseconds(self, drafted: float, passes: float) -> float:
        return self.draft_ms * drafted + self.target_ms * passes

    def total_ms(self, forwards: Sequence[float]) -> float:
        """Milliseconds of all forward passes, from the counts of each loaded draft and then of the target."""
        return sum(ms * count for ms, count in zip((*self.drafts_ms, self.target_ms), forwards, strict=True))

    def table(self, longest: int) -> CostTable:
        """These costs as a `CostTable` of the first draft alone, for drafts up to a length."""
        return CostTable.flat(self.draft_ms, self.target_ms, longest)

    def latency(self, discard_rate: float, verification_rate: float) -> float:
        """Milliseconds per token (eq. 5.1)."""
        return self.draft_ms + self.draft_ms * discard_rate + (self.target_ms - self.draft_ms) * verification_rate

    def verification_rate_at(self, speedup: float, discard_rate: float) -> float:
        """The verification rate at which a policy is ``speedup`` times as fast as target-only decoding.

        Linear in the discard rate. A target pass must cost more than a draft step.
        """
        left_ms = self.target_ms / speedup - self.draft_ms * (1 + discard_rate)
        return left_ms / (self.target_ms - self.draft_ms)


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """A candidate's measured cost compared with the cost of its forward passes.

    Times exclude the prompt's, except for peers, whose time cannot be split.
    """

    candidate: str
    # measured, predicted: tokens/s, by the clock and by the fitted model
    measured: float
    predicted: float | None
    # per token, predicted from the rates alone (eq. 5.1); None unless only the first draft is used.
    latency_ms: float | None
    # wall time over the bare time of the same forward passes; 1 means that the loop costs nothing
    overhead: float | None
    passes_share: float | None  # the oracle's target passes over this candidate's; 1 is the fewest possible
    time_share: float | None  # the oracle's predicted time over this candidate's measured time
    signal_share: float | None  # the signal bound's predicted time over this candidate's measured time


@dataclass(frozen=True, slots=True)
class OracleBound:
    """Theorem 4.1's oracle on some prompts: no policy discards less or needs fewer target passes."""

    prompts: int  # number of prompts that the oracle covers
    # passes, tokens: target passes and generated tokens on these prompts
    passes: int
    tokens: float
    tokens_per_second: float | None  # predicted, without the prompt's time; None without a fitted model


def fit(results: RunSet) -> CostModel | None:
    """Fit by least squares over all runs of policies in turns; None if the runs do not determine every cost.

    Excludes runs with trees, because their draft passes read several tokens and take another time.
    """
    ours = {
        candidate.label: candidate
        for candidate in results.header.candidates
        if candidate.setting is not None and candidate.takes_turns_in_chains
    }
    runs = [run for run in results.runs if run.candidate in ours]
    if len(runs) < 2:
        return None
    drafts = max(1, len(results.header.drafts))
    counts = np.array([forwards(run, ours[run.candidate], drafts) for run in runs], dtype=np.float64)
    times = np.array([run.decode_ms for run in runs])
    solution, _, rank, _ = np.linalg.lstsq(counts, times)
    if rank < drafts + 1:
        return None
    left = float(np.sum((times - counts @ solution) ** 2))
    spread = float(np.sum((times - times.mean()) ** 2))
    first, *further, target = map(float, solution)
    return CostModel(first, target, 1 - left / spread if spread else None, len(runs), tuple(further))


def forwards(run: Run, candidate: Candidate, drafts: int) -> list[int]:
    """Forward passes of each loaded draft and, last, of the target."""
    counts = [0] * drafts
    if len(candidate.drafts) == 1:
        counts[candidate.drafts[0]] = sum(turn.draft_forwards for turn in run.turns)
    else:
        for draft, rounds in zip(candidate.drafts, levels_of(run), strict=False):
            counts[draft] += sum(round_.draft_forwards for round_ in rounds)
    return [*counts, sum(turn.target_forwards for turn in run.turns)]


def levels_of(run: Run) -> Iterator[list[RoundSummary]]:
    """The rounds verified by the target, then those verified by its draft, and so on."""
    rounds = list(run.rounds)
    while rounds:
        yield rounds
        rounds = [inner for round_ in rounds for inner in round_.inner]


def bare_model(times: PassTimes) -> CostModel:
    """The cost model from directly timed forward passes; a target pass has the narrowest measured width."""
    further = tuple(times.step_ms(draft) for draft in range(1, len(times.drafts)))
    return CostModel(times.draft, times.target[min(times.target)], None, 0, further)


def bare_ms(run: Run, times: PassTimes, candidate: Candidate | None = None) -> float | None:
    """Bare time of the run's forward passes in milliseconds.

    None for a peer, whose rounds are not visible, for trees, whose draft passes are wider than those measured, and for
    drafts in parallel, whose passes overlap.

    A pass of the target or of a middle draft that verifies K tokens has width K + 1. A pass wider
    than the widest measured one is priced like it, which can only overstate the loop's overhead. Without a candidate,
    all draft passes are priced as the first draft's.
    """
    if candidate is not None and not candidate.takes_turns_in_chains:
        return None
    levels = columns(run.rounds)
    if not levels[0].starts:
        return None
    drafts = candidate.drafts if candidate is not None else (0,)
    longest = max(max(level.drafted) for level in levels)
    return CostTable.of_passes(times, drafts[: len(levels)], longest).rounds_ms(levels)


def candidate_costs(results: RunSet, summaries: Iterable[Summary], model: CostModel | None) -> list[CandidateCost]:
    return [_candidate_cost(results, summary, model) for summary in summaries]


def oracle_bound(results: RunSet, candidate: str, model: CostModel | None) -> OracleBound | None:
    """The oracle's bound for a candidate's outputs; None if the results contain no oracle for any of its prompts."""
    runs = _oracle_runs(results, candidate)
    if not runs:
        return None
    tokens = sum(run.tokens for run in runs)
    passes = sum(results.oracle[run.prompt] for run in runs)
    repeats = len(runs) / len({run.prompt for run in runs})
    speed = 1e3 * tokens / model.milliseconds(tokens - passes, passes) if model else None
    return OracleBound(len({run.prompt for run in runs}), round(passes / repeats), tokens / repeats, speed)


def signal_speed(results: RunSet, model: CostModel | None) -> float | None:
    """Predicted tokens/s of the best stopping rule on the draft's signals; None without a bound or a model."""
    bound = results.signal_bound
    return 1e3 * bound.tokens / model.milliseconds(bound.drafted, bound.passes) if bound and model else None


def simulated_speeds(results: RunSet, sync_ms: float) -> list[Simulated]:
    """Simulated times of the stretches of the baseline's texts, in turns and in parallel, from bare forward times."""
    lengths = [stretch for turns in results.stretches.values() for turn in turns for stretch in turn]
    if results.costs is None or not lengths:
        return []
    widest = max(results.costs.target)
    return TwoDevices(CostTable.of_passes(results.costs, (0,), widest), sync_ms, widest).simulate(lengths)


def _candidate_cost(results: RunSet, summary: Summary, model: CostModel | None) -> CandidateCost:
    runs = evened(results.of(summary.candidate))
    candidate = results.header.candidate(summary.candidate)
    tokens, wall = sum(run.tokens for run in runs), sum(run.decode_ms for run in runs)
    drafts = max(1, len(results.header.drafts))
    *drafted, passes = np.sum([forwards(run, candidate, drafts) for run in runs], axis=0).tolist()
    bare = [bare_ms(run, results.costs, candidate) for run in runs] if results.costs else []
    known = [time for time in bare if time is not None]
    # For a peer, the passes of one model may have been counted and those of another not; the passes of another engine
    # take other times.
    counted = (
        passes
        and (any(drafted) or summary.mean_acceptance_length is not None)
        and _fitted_engine(results, candidate)
        and candidate.takes_turns_in_chains
    )
    passes_share, time_share, signal_share = _bound_shares(results, summary.candidate, model)
    return CandidateCost(
        candidate=summary.candidate,
        measured=1e3 * tokens / wall if wall else 0.0,
        predicted=1e3 * tokens / model.total_ms((*drafted, passes)) if model and counted else None,
        latency_ms=_latency(model, summary) if candidate.drafts == (0,) and candidate.takes_turns_in_chains else None,
        overhead=wall / sum(known) if known and len(known) == len(runs) else None,
        passes_share=passes_share,
        time_share=time_share,
        signal_share=signal_share,
    )


def _fitted_engine(results: RunSet, candidate: Candidate) -> bool:
    """Whether its passes ran on the profile's engine, for which the times were fitted."""
    if candidate.way is not None or candidate.engine is not None:
        return False
    own = results.header.engines.get("target")
    return candidate.peer is None or own is None or results.header.engine_of(candidate.label) == own


def _latency(model: CostModel | None, summary: Summary) -> float | None:
    if model is None or summary.discard_rate is None or summary.verification_rate is None:
        return None
    return model.latency(summary.discard_rate, summary.verification_rate)


def _bound_shares(
    results: RunSet, candidate: str, model: CostModel | None
) -> tuple[float | None, float | None, float | None]:
    runs = _oracle_runs(results, candidate)
    best = sum(results.oracle[run.prompt] for run in runs)
    passes = sum(turn.target_forwards for run in runs for turn in run.turns)
    # Both bounds hold for the first draft only, and where the models take turns.
    of = results.header.candidate(candidate)
    if not runs or not passes or of.drafts[0] != 0 or of.parallel:
        return None, None, None
    tokens, wall = sum(run.tokens for run in runs), sum(run.decode_ms for run in runs)
    if model is None or not wall or not _fitted_engine(results, of):
        return best / passes, None, None
    speed = signal_speed(results, model)
    signal_share = 1e3 * tokens / speed / wall if speed else None
    return best / passes, model.milliseconds(tokens - best, best) / wall, signal_share


def _oracle_runs(results: RunSet, candidate: str) -> Sequence[Run]:
    """Runs of a candidate that the oracle covers: it is computed at the first length limit only."""
    first = next(iter(results.header.lengths), None)
    runs = [run for run in results.of(candidate) if run.prompt in results.oracle and first in (None, run.length)]
    return evened(runs) if runs else []


@dataclass(frozen=True, slots=True)
class DraftLevel:
    """One draft of a candidate."""

    draft: int  # index among the loaded drafts
    # HSDDW's sigma, the share of its tokens that its verifier rejected; None if it drafted nothing
    redundancy: float | None
    # HSDDW's eta, its forward passes per token passed to its verifier; None if it drafted nothing
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class CandidateLevels:
    """A candidate's forward passes, by model."""

    candidate: str
    # per generated token, of each loaded draft and, last, of the target (HSDDW's eta of the target)
    passes: tuple[float, ...]
    levels: tuple[DraftLevel, ...]  # its drafts, from the target's own draft down
    # the range of target pass times in milliseconds in which a hierarchy is predicted to be faster than every candidate
    # with one draft or none, given the fitted times of the drafts. The upper end is None if there is no limit. None
    # without such a range.
    pays_ms: tuple[float, float | None] | None = None

    @property
    def nested(self) -> bool:
        return len(self.levels) > 1

    def per_token(self, costs: Iterable[Floats | float]) -> Floats:
        """Predicted cost of a token, from the costs of one pass in the order of ``passes``."""
        total: Floats = np.zeros(())
        for cost, passes in zip(costs, self.passes, strict=True):
            total = total + cost * passes
        return total


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
