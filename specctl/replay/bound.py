"""What the draft's signals allow: the best stopping rule on them, solved by backward induction on traces."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from specctl.policies import Signal
from specctl.policies.base import Rule, read
from specctl.policies.online import log_odds
from specctl.records import DraftStep
from specctl.replay.costs import CostTable, signal_key
from specctl.replay.play import Replay, replay
from specctl.replay.traces import Trace
from specctl.statistics.intervals import Floats
from specctl.statistics.logistic import fit_weights

LEVELS = 12
"""Classes of equal size that a signal is sorted into."""
SURVIVALS = np.linspace(-6.0, 0.0, 61)
"""The grid of log S."""
LONGEST = 40
USUAL = 12
"""Draft lengths over which the slope of a target pass is taken."""
READS: frozenset[Signal] = frozenset({"entropy", "top_prob"})
SMOOTHING = 3.0
RIDGE = 1e-2
"""A weak prior on the weights of the fitted acceptance."""
HALVINGS = 30


@dataclass(slots=True)
class Solved(Rule):
    """Stops where the value of going on, tabulated over log S and the signal, is not above 0.

    Attributes:
        weights: of 1, log-odds of the top probability and sqrt(entropy) in a token's acceptance.
        cuts: ``(LEVELS - 1,)`` between the classes of that acceptance.
        going_on: ``(61, LEVELS)`` value of drafting one more token, in tokens.
        limit: the longest draft; 0 where not even the first token pays.
    """

    weights: Floats
    cuts: Floats
    going_on: Floats
    limit: int
    signals: frozenset[Signal] = READS
    _survival: float = field(default=0.0, init=False)

    def draft_limit(self) -> int:
        return self.limit

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._survival = 0.0
        row = np.array([_row(read(step.top_prob), read(step.entropy))])
        accepted = float(expit(row @ self.weights)[0])
        self._survival += log(max(1e-9, accepted))
        level = int(np.searchsorted(self.cuts, accepted))
        return float(np.interp(self._survival, SURVIVALS, self.going_on[:, level])) <= 0


def play_best(traces: Iterable[Trace], costs: CostTable, eos: Set[int], *, longest: int = LONGEST) -> list[Replay]:
    """Replays under the `best_stopping` of each category of prompts, in the order of the traces' categories.

    No rule that looks at these signals of its round alone does better, but for what classes and fits lose. One that
    also remembers (which prompt it is in, what became of a token before) may.
    """
    by_category: dict[str, list[Trace]] = {}
    for trace in traces:
        by_category.setdefault(trace.category, []).append(trace)
    return [
        played
        for some in by_category.values()
        for played in replay(best_stopping(some, costs, longest=longest), some, eos)
    ]


def best_stopping(
    traces: Sequence[Trace], costs: CostTable, *, longest: int = LONGEST, one_step: bool = False
) -> Solved:
    """The rule with the most tokens per second, were the signals' meaning on these traces known beforehand.

    A token's acceptance a is fitted to the traces (logistic in log-odds of the top probability and sqrt(entropy)) and
    sorted into classes z; T is how often class z' follows an accepted token of class z. With survival S and one more
    token's cost c, going on is worth sum_z' T(z'|z) (S a(z') + V(S a(z'), z')) - rho c, and V is that or 0. rho is
    where a round's value, 1 + V at its start, equals rho times a target pass. Times are taken linear in the draft's
    length.

    Args:
        traces: at least one.
        costs: of the machine.
        longest: draft it may make.
        one_step: count only the next token's own gain, as `cost-optimal` does.
    """
    paths = [trace.draft.along for trace in traces]
    rows = [np.array([_row(*pair) for pair in zip(path.top_prob, path.entropy, strict=True)]) for path in paths]
    fates = [np.array(t.draft.accepted if t.chances is None else t.chances, dtype=np.float64) for t in traces]
    weights = fit_weights(np.concatenate(rows), np.concatenate(fates), ridge=RIDGE)
    chances = [expit(row @ weights) for row in rows]
    cuts = np.quantile(np.concatenate(chances), np.linspace(0, 1, LEVELS + 1)[1:-1])
    classes = [np.searchsorted(cuts, chance) for chance in chances]
    sizes = np.bincount(np.concatenate(classes), minlength=LEVELS) + 1e-9
    accepted = np.bincount(np.concatenate(classes), np.concatenate(fates), LEVELS) / sizes
    follows = np.zeros((LEVELS, LEVELS))
    for trace, found in zip(traces, classes, strict=True):
        fine = np.array(trace.draft.accepted[:-1], dtype=bool)
        np.add.at(follows, (found[:-1][fine], found[1:][fine]), 1.0)
    anyhow = (follows.sum(0) + 1e-9) / (follows.sum() + 1e-9 * LEVELS)
    follows = (follows + SMOOTHING * anyhow) / (follows.sum(1, keepdims=True) + SMOOTHING)
    step, target = _linear(traces, costs)
    low, high = 0.0, (LONGEST + 1) / target
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        _, start = _solve(accepted, follows, sizes / sizes.sum(), rho * step, one_step)
        low, high = (rho, high) if 1 + max(0.0, start) > rho * target else (low, rho)
    going_on, start = _solve(accepted, follows, sizes / sizes.sum(), low * step, one_step)
    return Solved(weights, cuts, going_on, longest if start > 0 else 0)


def _row(top_prob: float, entropy: float) -> tuple[float, float, float]:
    return 1.0, log_odds(top_prob), sqrt(max(0.0, entropy))


def _linear(traces: Sequence[Trace], costs: CostTable) -> tuple[float, float]:
    """Milliseconds of one more drafted token, and of a round without any, in the middle of the traces."""
    context = float(np.mean([trace.prompt_tokens + len(trace.tokens) / 2 for trace in traces]))
    draft, target = costs.at(context)
    verify = [float(np.interp(context, costs.contexts, column)) for column in costs.verify_ms.T]
    near = costs.lengths <= USUAL
    slope = float(np.polyfit(costs.lengths[near], np.array(verify)[near], 1)[0]) if near.sum() > 1 else 0.0
    reading = costs.signal_ms.get(signal_key(READS), 0.0)
    return draft + reading + max(0.0, slope), target + costs.overhead_ms


def _solve(accepted: Floats, follows: Floats, first: Floats, price: float, one_step: bool) -> tuple[Floats, float]:
    """Value of going on ``(61, LEVELS)`` and of drafting a round's first token, in tokens."""
    survival = np.exp(SURVIVALS)
    arrives = SURVIVALS[:, None] + np.log(np.maximum(accepted, 1e-9))  # (61, LEVELS)

    def after(value: Floats) -> Floats:
        columns = [np.interp(arrives[:, z], SURVIVALS, value[:, z]) for z in range(LEVELS)]
        return np.stack(columns, axis=1)

    gain = survival[:, None] * accepted  # (61, LEVELS): of drafting a token of that class next
    going_on: Floats = gain @ follows.T - price
    if not one_step:
        for _ in range(LONGEST):
            better: Floats = (gain + after(np.maximum(0.0, going_on))) @ follows.T - price
            if np.abs(better - going_on).max() < 1e-6:
                break
            going_on = better
        # A round's own value counts what it does afterwards, under either rule.
    value = _played(gain, follows, price, going_on > 0, after)
    start = float((accepted + after(value)[-1]) @ first) - price
    return going_on, start


def _played(
    gain: Floats, follows: Floats, price: float, goes: npt.NDArray[np.bool_], after: Callable[[Floats], Floats]
) -> Floats:
    """What a rule that goes on at ``goes`` really earns from each state on."""
    value = np.zeros_like(gain)
    for _ in range(LONGEST):
        value = np.where(goes, (gain + after(value)) @ follows.T - price, 0.0)
    return value
