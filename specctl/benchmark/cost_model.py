"""Where the time goes: SpecDec++'s cost model fitted to the runs, bare forward times, and the oracle's bound."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.benchmark.results import Costs, Run, RunSet
from specctl.benchmark.statistics import Summary, evened


@dataclass(frozen=True, slots=True)
class CostModel:
    """T = draft_ms N_draft + target_ms N_target (SpecDec++ eq. 3.1), T being the time after the prompt.

    Attributes:
        r_squared: share of the runs' variance in T that the model explains; None where they all took the same time.
        runs: how many it was fitted to; 0 for one taken from bare forward times.
    """

    draft_ms: float
    target_ms: float
    r_squared: float | None
    runs: int

    def milliseconds(self, drafted: float, passes: float) -> float:
        return self.draft_ms * drafted + self.target_ms * passes

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
        latency_ms: predicted per token from its rates alone (eq. 5.1).
        overhead: wall time over the bare time of the same forward passes; 1 is a loop that costs nothing.
        passes_share: the oracle's target passes over this entrant's; 1 is the fewest possible.
        time_share: the oracle's predicted time over this entrant's measured time.
    """

    entrant: str
    measured: float
    predicted: float | None
    latency_ms: float | None
    overhead: float | None
    passes_share: float | None
    time_share: float | None


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
    """Least squares over all runs of policies; None where they cannot tell the two costs apart."""
    ours = {entrant.label for entrant in results.header.entrants if entrant.kind == "policy"}
    runs = [run for run in results.runs if run.entrant in ours]
    if len(runs) < 2:
        return None
    counts = np.array([_forwards(run) for run in runs], dtype=np.float64)
    times = np.array([decode_ms(run) for run in runs])
    solution, _, rank, _ = np.linalg.lstsq(counts, times)
    if rank < 2:
        return None
    left = float(np.sum((times - counts @ solution) ** 2))
    spread = float(np.sum((times - times.mean()) ** 2))
    return CostModel(float(solution[0]), float(solution[1]), 1 - left / spread if spread else None, len(runs))


def bare_model(costs: Costs) -> CostModel:
    """The same model from directly timed forward passes, a target pass being one of the narrowest width."""
    return CostModel(costs.draft, costs.target[min(costs.target)], None, 0)


def bare_ms(run: Run, costs: Costs) -> float | None:
    """What the run's forward passes cost by themselves; None for a peer, whose rounds cannot be seen.

    A pass that verifies K drafts is K + 1 wide. Between measured widths the time is interpolated, beyond the widest it
    is held, which can only overstate the loop's overhead.
    """
    widths = [round_.drafted + 1 for round_ in run.rounds]
    if not widths:
        return None
    known = sorted(costs.target)
    target = np.interp(widths, known, [costs.target[width] for width in known])
    return costs.draft * _forwards(run)[0] + float(target.sum())


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


def decode_ms(run: Run) -> float:
    """Wall time after the prompt."""
    return sum(turn.total_ms - turn.prefill_ms for turn in run.turns)


def _entrant_cost(results: RunSet, summary: Summary, model: CostModel | None) -> EntrantCost:
    runs = evened(results.of(summary.entrant))
    tokens, wall = sum(run.tokens for run in runs), sum(map(decode_ms, runs))
    drafted, passes = np.sum([_forwards(run) for run in runs], axis=0)
    bare = [bare_ms(run, results.costs) for run in runs] if results.costs else []
    known = [time for time in bare if time is not None]
    # Of a peer some forward passes may have been counted and others not.
    counted = passes and (drafted or summary.mean_acceptance_length is not None)
    passes_share, time_share = _oracle_shares(results, summary.entrant, model)
    return EntrantCost(
        entrant=summary.entrant,
        measured=1e3 * tokens / wall if wall else 0.0,
        predicted=1e3 * tokens / model.milliseconds(drafted, passes) if model and counted else None,
        latency_ms=_latency(model, summary),
        overhead=wall / sum(known) if known and len(known) == len(runs) else None,
        passes_share=passes_share,
        time_share=time_share,
    )


def _latency(model: CostModel | None, summary: Summary) -> float | None:
    if model is None or summary.discard_rate is None or summary.verification_rate is None:
        return None
    return model.latency(summary.discard_rate, summary.verification_rate)


def _oracle_shares(results: RunSet, entrant: str, model: CostModel | None) -> tuple[float | None, float | None]:
    runs = _oracle_runs(results, entrant)
    best = sum(results.oracle[run.prompt] for run in runs)
    passes = sum(_forwards(run)[1] for run in runs)
    if not runs or not passes:
        return None, None
    tokens, wall = sum(run.tokens for run in runs), sum(map(decode_ms, runs))
    return best / passes, model.milliseconds(tokens - best, best) / wall if model and wall else None


def _oracle_runs(results: RunSet, entrant: str) -> Sequence[Run]:
    """Its runs that the oracle covers: those at the first limit, from which the bound is worked out."""
    first = next(iter(results.header.lengths), None)
    runs = [run for run in results.of(entrant) if run.prompt in results.oracle and first in (None, run.length)]
    return evened(runs) if runs else []


def _forwards(run: Run) -> tuple[int, int]:
    """Forward passes of the draft and of the target."""
    return sum(turn.draft_forwards for turn in run.turns), sum(turn.target_forwards for turn in run.turns)
