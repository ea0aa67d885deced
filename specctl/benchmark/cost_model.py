"""Where the time goes: SpecDec++'s cost model fitted to the runs, bare forward times, and the oracle's bound."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.benchmark.summaries import Summary
from specctl.observing.entrant import Entrant
from specctl.observing.results import PassTimes, Run, RunSet
from specctl.observing.speedup import evened
from specctl.records import RoundSummary
from specctl.replay.costs import CostTable
from specctl.replay.play import columns


@dataclass(frozen=True, slots=True)
class CostModel:
    """T = draft_ms N_draft + target_ms N_target (SpecDec++ eq. 3.1), T being the time after the prompt.

    Attributes:
        draft_ms: of one forward pass of the first draft.
        r_squared: share of the runs' variance in T that the model explains; None where they all took the same time.
        runs: how many it was fitted to; 0 for one taken from bare forward times.
        further_ms: where several drafts are loaded, a term for each after the first.
    """

    draft_ms: float
    target_ms: float
    r_squared: float | None
    runs: int
    further_ms: tuple[float, ...] = ()

    @property
    def drafts_ms(self) -> tuple[float, ...]:
        """Of one forward pass, by loaded draft."""
        return (self.draft_ms, *self.further_ms)

    def milliseconds(self, drafted: float, passes: float) -> float:
        return self.draft_ms * drafted + self.target_ms * passes

    def total_ms(self, forwards: Sequence[float]) -> float:
        """Of forward passes counted by loaded draft, the target's last."""
        return sum(ms * count for ms, count in zip((*self.drafts_ms, self.target_ms), forwards, strict=True))

    def table(self, longest: int) -> CostTable:
        """The same costs of the first draft alone, for drafts up to a length."""
        return CostTable.flat(self.draft_ms, self.target_ms, longest)

    def latency(self, discard_rate: float, verification_rate: float) -> float:
        """Milliseconds a token (eq. 5.1)."""
        return self.draft_ms + self.draft_ms * discard_rate + (self.target_ms - self.draft_ms) * verification_rate

    def verification_rate_at(self, speedup: float, discard_rate: float) -> float:
        """The verification rate at which a policy is ``speedup`` times as fast as target-only decoding.

        A line in the discard rate; the target's pass must cost more than a draft step.
        """
        rest = self.target_ms / speedup - self.draft_ms * (1 + discard_rate)
        return rest / (self.target_ms - self.draft_ms)


@dataclass(frozen=True, slots=True)
class EntrantCost:
    """An entrant against what its forward passes should cost.

    The prompt's time is left out everywhere, but for peers, of whose time it cannot be told.

    Attributes:
        measured, predicted: tokens/s, by the clock and by the fit.
        latency_ms: predicted per token from its rates alone (eq. 5.1, of the first draft without a hierarchy).
        overhead: wall time over the bare time of the same forward passes; 1 is a loop that costs nothing.
        passes_share: the oracle's target passes over this entrant's; 1 is the fewest possible.
        time_share: the oracle's predicted time over this entrant's measured time.
        signal_share: the same of the best stopping rule on the draft's signals.
    """

    entrant: str
    measured: float
    predicted: float | None
    latency_ms: float | None
    overhead: float | None
    passes_share: float | None
    time_share: float | None
    signal_share: float | None


@dataclass(frozen=True, slots=True)
class OracleBound:
    """Theorem 4.1 on the prompts it was worked out for: no policy needs fewer target passes with nothing discarded.

    Attributes:
        tokens_per_second: predicted for such a policy, the prompt's time left out; None without a fit.
    """

    prompts: int
    passes: int
    tokens: float
    tokens_per_second: float | None


def fit(results: RunSet) -> CostModel | None:
    """Least squares over all runs of policies; None where they cannot tell the costs apart."""
    ours = {entrant.label: entrant for entrant in results.header.entrants if entrant.setting is not None}
    runs = [run for run in results.runs if run.entrant in ours]
    if len(runs) < 2:
        return None
    drafts = max(1, len(results.header.drafts))
    counts = np.array([forwards(run, ours[run.entrant], drafts) for run in runs], dtype=np.float64)
    times = np.array([run.decode_ms for run in runs])
    solution, _, rank, _ = np.linalg.lstsq(counts, times)
    if rank < drafts + 1:
        return None
    left = float(np.sum((times - counts @ solution) ** 2))
    spread = float(np.sum((times - times.mean()) ** 2))
    first, *further, target = map(float, solution)
    return CostModel(first, target, 1 - left / spread if spread else None, len(runs), tuple(further))


def forwards(run: Run, entrant: Entrant, drafts: int) -> list[int]:
    """Forward passes of each loaded draft and, last, of the target."""
    counts = [0] * drafts
    if len(entrant.drafts) == 1:
        counts[entrant.drafts[0]] = sum(turn.draft_forwards for turn in run.turns)
    else:
        for place, rounds in zip(entrant.drafts, levels_of(run), strict=False):
            counts[place] += sum(round_.draft_forwards for round_ in rounds)
    return [*counts, sum(turn.target_forwards for turn in run.turns)]


def levels_of(run: Run) -> Iterator[list[RoundSummary]]:
    """The rounds verified by the target, then those verified by its draft, and so on down."""
    rounds = list(run.rounds)
    while rounds:
        yield rounds
        rounds = [inner for round_ in rounds for inner in round_.inner]


def bare_model(times: PassTimes) -> CostModel:
    """The same model from directly timed forward passes, a target pass being one of the narrowest width."""
    further = tuple(times.step_ms(draft) for draft in range(1, len(times.drafts)))
    return CostModel(times.draft, times.target[min(times.target)], None, 0, further)


def bare_ms(run: Run, times: PassTimes, entrant: Entrant | None = None) -> float | None:
    """What the run's forward passes cost by themselves; None for a peer, whose rounds cannot be seen.

    A pass of the target or a middle model that verifies K tokens is K + 1 wide. Beyond the widest measured pass the
    time is held, which can only overstate the loop's overhead. Without an entrant, or with one that has no levels of
    its own, the first draft is priced.
    """
    levels = columns(run.rounds)
    if not levels[0].starts:
        return None
    drafts = entrant.drafts if entrant is not None else (0,)
    longest = max(max(level.drafted) for level in levels)
    return CostTable.of_passes(times, drafts[: len(levels)], longest).rounds_ms(levels)


def entrant_costs(results: RunSet, summaries: Iterable[Summary], model: CostModel | None) -> list[EntrantCost]:
    return [_entrant_cost(results, summary, model) for summary in summaries]


def oracle_bound(results: RunSet, entrant: str, model: CostModel | None) -> OracleBound | None:
    """The bound for an entrant's outputs; None where no oracle was asked for or none of its prompts is covered."""
    runs = _oracle_runs(results, entrant)
    if not runs:
        return None
    tokens = sum(run.tokens for run in runs)
    passes = sum(results.oracle[run.prompt] for run in runs)
    repeats = len(runs) / len({run.prompt for run in runs})
    speed = 1e3 * tokens / model.milliseconds(tokens - passes, passes) if model else None
    return OracleBound(len({run.prompt for run in runs}), round(passes / repeats), tokens / repeats, speed)


def signal_speed(results: RunSet, model: CostModel | None) -> float | None:
    """Tokens/s of the best stopping rule on the draft's signals, predicted as `OracleBound` does; None without one."""
    bound = results.signal_bound
    return 1e3 * bound.tokens / model.milliseconds(bound.drafted, bound.passes) if bound and model else None


def _entrant_cost(results: RunSet, summary: Summary, model: CostModel | None) -> EntrantCost:
    runs = evened(results.of(summary.entrant))
    entrant = results.header.entrant(summary.entrant)
    tokens, wall = sum(run.tokens for run in runs), sum(run.decode_ms for run in runs)
    drafts = max(1, len(results.header.drafts))
    *drafted, passes = np.sum([forwards(run, entrant, drafts) for run in runs], axis=0).tolist()
    bare = [bare_ms(run, results.costs, entrant) for run in runs] if results.costs else []
    known = [time for time in bare if time is not None]
    # Of a peer some forward passes may have been counted and others not.
    counted = passes and (any(drafted) or summary.mean_acceptance_length is not None)
    passes_share, time_share, signal_share = _bound_shares(results, summary.entrant, model)
    return EntrantCost(
        entrant=summary.entrant,
        measured=1e3 * tokens / wall if wall else 0.0,
        predicted=1e3 * tokens / model.total_ms((*drafted, passes)) if model and counted else None,
        latency_ms=_latency(model, summary) if entrant.drafts == (0,) else None,
        overhead=wall / sum(known) if known and len(known) == len(runs) else None,
        passes_share=passes_share,
        time_share=time_share,
        signal_share=signal_share,
    )


def _latency(model: CostModel | None, summary: Summary) -> float | None:
    if model is None or summary.discard_rate is None or summary.verification_rate is None:
        return None
    return model.latency(summary.discard_rate, summary.verification_rate)


def _bound_shares(
    results: RunSet, entrant: str, model: CostModel | None
) -> tuple[float | None, float | None, float | None]:
    runs = _oracle_runs(results, entrant)
    best = sum(results.oracle[run.prompt] for run in runs)
    passes = sum(turn.target_forwards for run in runs for turn in run.turns)
    # The bounds are of one draft's guesses, and no other's.
    if not runs or not passes or results.header.entrant(entrant).drafts[0] != 0:
        return None, None, None
    tokens, wall = sum(run.tokens for run in runs), sum(run.decode_ms for run in runs)
    if model is None or not wall:
        return best / passes, None, None
    speed = signal_speed(results, model)
    signal_share = 1e3 * tokens / speed / wall if speed else None
    return best / passes, model.milliseconds(tokens - best, best) / wall, signal_share


def _oracle_runs(results: RunSet, entrant: str) -> Sequence[Run]:
    """Its runs that the oracle covers: those at the first limit, from which the bound is worked out."""
    first = next(iter(results.header.lengths), None)
    runs = [run for run in results.of(entrant) if run.prompt in results.oracle and first in (None, run.length)]
    return evened(runs) if runs else []
