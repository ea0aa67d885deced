"""Bounds on traces: the fewest target passes, and the best stopping rule on two signals. No torch here."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from specctl.policies import Signal
from specctl.policies.base import Rule, read
from specctl.policies.estimators import log_odds
from specctl.records import DraftStep
from specctl.replay.costs import CostTable, Level, Replay, signal_key
from specctl.replay.play import replay
from specctl.replay.traces import Judged, Recorded, Trace
from specctl.statistics import Floats, fit_weights, sigmoid

LEVELS = 12  # Number of classes, of equal size, into which tokens are sorted by their predicted acceptance
SURVIVALS = np.linspace(-6.0, 0.0, 61)
"""The grid of log S; S is the probability that all draft tokens of the round so far are accepted."""
LONGEST = 40  # The longest draft of the rule
USUAL = 12  # The longest draft over which the slope of a target pass is fitted
READS: frozenset[Signal] = frozenset({"entropy", "top_prob"})
SMOOTHING = 3.0
RIDGE = 1e-2  # A weak prior on the weights of the fitted acceptance
HALVINGS = 30


@dataclass(slots=True)
class Solved(Rule):
    """Stops unless the value of continuing, tabulated over log S and the last token's class, is above 0."""

    # ``(4,)`` of 1, log-odds of the top probability, sqrt(entropy) and log of the token's index; their sum is the logit
    # of the token's acceptance
    weights: Floats
    cuts: Floats  # ``(LEVELS - 1,)`` predicted acceptance at the borders between classes
    continuing: Floats  # ``(61, LEVELS)`` value of drafting one more token, in tokens
    limit: int  # the longest draft; 0 where not even the first token pays
    signals: frozenset[Signal] = READS
    _survival: float = field(default=0.0, init=False)

    def draft_limit(self) -> int:
        return self.limit

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._survival = 0.0
        row = np.array([_row(read(step.top_prob), read(step.entropy), step.index)])
        accepted = float(sigmoid(row @ self.weights)[0])
        self._survival += log(max(1e-9, accepted))
        level = int(np.searchsorted(self.cuts, accepted))
        return float(np.interp(self._survival, SURVIVALS, self.continuing[:, level])) <= 0


def play_best(traces: Iterable[Trace], costs: CostTable, eos: Set[int], *, longest: int = LONGEST) -> list[Replay]:
    """Replay the `best_stopping` rule of each category on its prompts, categories in the order of the traces.

    Up to the errors of classes and fits, no rule that reads only these signals of the current round is faster. A rule
    that also remembers earlier rounds may be.
    """
    by_category: dict[str, list[Trace]] = {}
    for trace in traces:
        by_category.setdefault(trace.category, []).append(trace)
    return [
        played
        for group in by_category.values()
        for played in replay(best_stopping(group, costs, longest=longest), group, eos)
    ]


def best_stopping(
    traces: Sequence[Trace], costs: CostTable, *, longest: int = LONGEST, one_step: bool = False
) -> Solved:
    """The rule with the most tokens per second, fitted to the same traces on which it is replayed.

    The acceptance probability a of each token is fitted: logistic in log-odds of the top probability and in
    sqrt(entropy), and for a draft head, whose tokens depend on where the round began, in log of the token's index.
    Tokens are sorted by it into classes z. T(z'|z) is the share of class z' among the tokens after an accepted token of
    class z. S is the probability that all draft tokens so far are accepted, c the cost of one more draft token, and rho
    the speed in tokens per millisecond. Continuing is worth sum_z' T(z'|z) (S a(z') + V(S a(z'), z')) - rho c, and V is
    the larger of this value and 0. Bisection finds the rho at which the value of a round, 1 + V at its start, equals
    rho times the time of a target pass. Times are assumed to be linear in the draft length; what the first draft token
    costs beyond c is paid once.

    Args:
        traces: at least one.
        costs: of the machine.
        longest: the longest draft.
        one_step: count only the gain of the next token, as `cost-optimal` does.

    Returns:
        A rule that drafts nothing where the traces have no draft token.
    """
    judged = [run for trace in traces for run in trace.draft.judged() if run.accepted]
    if not judged:  # the draft's context held none of the prompts
        return Solved(np.zeros(4), np.zeros(LEVELS - 1), np.zeros((len(SURVIVALS), LEVELS)), 0)
    rows = [_rows(run) for run in judged]
    outcomes = [np.array(run.outcomes, dtype=np.float64) for run in judged]
    weights = fit_weights(np.concatenate(rows), np.concatenate(outcomes), ridge=RIDGE)
    chances = [sigmoid(row @ weights) for row in rows]
    cuts = np.quantile(np.concatenate(chances), np.linspace(0, 1, LEVELS + 1)[1:-1])
    classes = [np.searchsorted(cuts, chance) for chance in chances]
    sizes = np.bincount(np.concatenate(classes), minlength=LEVELS) + 1e-9
    accepted = np.bincount(np.concatenate(classes), np.concatenate(outcomes), LEVELS) / sizes
    follows, first = np.zeros((LEVELS, LEVELS)), np.full(LEVELS, 1e-9)
    for run, own in zip(judged, classes, strict=True):
        fine = np.array(run.accepted[:-1], dtype=bool)
        np.add.at(follows, (own[:-1][fine], own[1:][fine]), 1.0)
        np.add.at(first, own[np.array(run.indices) == 1], 1.0)
    overall = (follows.sum(0) + 1e-9) / (follows.sum() + 1e-9 * LEVELS)
    follows = (follows + SMOOTHING * overall) / (follows.sum(1, keepdims=True) + SMOOTHING)
    longest = min([longest, *(draft.longest for draft in (t.draft for t in traces) if draft.longest is not None)])
    acceptance = _Acceptance(accepted, follows, first / first.sum(), longest, one_step)
    step, beginning, target = _linear(traces, costs)
    low, high = 0.0, (LONGEST + 1) / target
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        _, start = _solve(acceptance, rho * step)
        low, high = (rho, high) if 1 + max(0.0, start - rho * beginning) > rho * target else (low, rho)
    continuing, start = _solve(acceptance, low * step)
    return Solved(weights, cuts, continuing, longest if start > low * beginning else 0)


def _row(top_prob: float, entropy: float, index: int) -> tuple[float, float, float, float]:
    return 1.0, log_odds(top_prob), sqrt(max(0.0, entropy)), log(index)


def _rows(run: Judged) -> Floats:
    columns = run.steps.top_prob, run.steps.entropy, run.indices
    return np.array([_row(*each) for each in zip(*columns, strict=True)])


def _linear(traces: Sequence[Trace], costs: CostTable) -> tuple[float, float, float]:
    """At the mean context, the milliseconds of one more draft token, of beginning to draft and of an empty round."""
    context = float(np.mean([trace.prompt_tokens + len(trace.tokens) / 2 for trace in traces]))
    draft, target = costs.at(context)
    drafting, verify = (
        np.array([np.interp(context, costs.contexts, column) for column in table.T])
        for table in (costs.draft_ms, costs.verify_ms)
    )
    near = costs.lengths <= USUAL
    slope = float(np.polyfit(costs.lengths[near], verify[near], 1)[0]) if near.sum() > 1 else 0.0
    beginning = float((drafting - draft * costs.lengths)[1:].mean())
    reading = costs.signal_ms.get(signal_key(READS), 0.0)
    return draft + reading + max(0.0, slope), max(0.0, beginning), target + costs.overhead_ms


class _Acceptance(NamedTuple):
    """The distribution of acceptance in a round; `best_stopping` explains a, T and the classes."""

    accepted: Floats  # a, ``(LEVELS,)``
    follows: Floats  # T, ``(LEVELS, LEVELS)``
    first: Floats  # ``(LEVELS,)`` share of each class among the first tokens of rounds
    longest: int  # the longest draft
    one_step: bool  # count only the gain of the next token


def _solve(acceptance: _Acceptance, price: float) -> tuple[Floats, float]:
    """The value of continuing ``(61, LEVELS)`` and of drafting a round's first token, in tokens."""
    survival = np.exp(SURVIVALS)
    arrives = SURVIVALS[:, None] + np.log(np.maximum(acceptance.accepted, 1e-9))  # (61, LEVELS)

    def after(value: Floats) -> Floats:
        columns = [np.interp(arrives[:, z], SURVIVALS, value[:, z]) for z in range(LEVELS)]
        return np.stack(columns, axis=1)

    gain = (
        survival[:, None] * acceptance.accepted
    )  # (61, LEVELS): expected tokens from a next draft token of each class
    continuing: Floats = gain @ acceptance.follows.T - price
    if not acceptance.one_step:
        for _ in range(acceptance.longest - 2):
            better: Floats = (gain + after(np.maximum(0.0, continuing))) @ acceptance.follows.T - price
            if np.abs(better - continuing).max() < 1e-6:
                break
            continuing = better
    # With one_step too, a round is worth all tokens that the rule gains in it.
    value = np.zeros_like(gain)
    for _ in range(acceptance.longest - 1):
        value = np.where(continuing > 0, (gain + after(value)) @ acceptance.follows.T - price, 0.0)
    return continuing, float((acceptance.accepted + after(value)[-1]) @ acceptance.first) - price


def oracle(trace: Trace, levels: int = 1) -> Replay:
    """The rounds of a policy that knows where the target will disagree (SpecDec++, arXiv 2405.19715, Theorem 4.1).

    No draft token is rejected, and the number of target passes is the smallest possible: a bound for every policy.
    Without a draft head, the policy drafts exactly up to each disagreement. With one, the drafts depend on where the
    round begins, and stopping earlier may save a pass later. Among the rounds with the fewest passes, these are the
    longest at the beginning. In a hierarchy of ``levels`` drafts, every draft knows where its verifier will disagree.
    """
    top, *inner = (Level() for _ in range(levels))
    lengths = _fewest_passes(trace.draft, 0, len(trace.tokens), trace.limit)
    start = 0
    while start < len(trace.tokens):
        length = lengths[start]
        top.starts.append(start)
        top.drafted.append(length)
        _add_inner(trace.draft, start, length, inner)
        start += length + 1
    for level in (top, *inner):
        level.accepted.extend(level.drafted)
    return Replay(trace, (top, *inner))


def _fewest_passes(draft: Recorded, first: int, end: int, limit: int) -> dict[int, int]:
    """The number of tokens to draft at each position of a text to reach its end in the fewest passes.

    Args:
        draft: gives the number of draft tokens accepted in a row from each position.
        first, end: the positions at which rounds begin.
        limit: the text's token limit.
    """
    lengths: dict[int, int] = {}
    passes = {end: 0}  # from each position on
    for start in reversed(range(first, end)):
        # The last position is left to the verifier, unless the draft token there ends the sequence.
        longest = draft.room(start, min(draft.run(start), max(0, limit - start - 1)))
        after = [passes[min(end, start + length + 1)] for length in range(longest + 1)]
        fewest = min(after)
        passes[start] = 1 + fewest
        lengths[start] = max(length for length in range(longest + 1) if after[length] == fewest)
    return lengths


def _add_inner(draft: Recorded, start: int, length: int, inner: Sequence[Level]) -> None:
    """Add the inner rounds that collect a block of a given length without any rejection."""
    if not inner:
        return
    text, position, end = draft.under(start), start, start + length
    lengths = _fewest_passes(text, start, end, end)
    while position < end:
        inner[0].starts.append(position)
        inner[0].drafted.append(lengths[position])
        _add_inner(text, position, lengths[position], inner[1:])
        position += lengths[position] + 1
