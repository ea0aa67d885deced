"""Every policy compared with `cost-optimal` and the bounds, by replay under made-up costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from specctl.calibration.compared_settings import Grid, grid
from specctl.policies import Setting, StoppingPolicy
from specctl.replay.bounds import best_stopping, oracle, play_best
from specctl.replay.costs import CostTable, Replay
from specctl.replay.play import replay, rounds
from specctl.replay.trace_files import TraceSet
from specctl.replay.traces import Trace
from tools.comparison.regimes import made_up, regimes, useless

MIXED = "mixed"
NEW = Setting("cost-optimal")
BANDIT = Setting("bandit")
EARLY = 50
"""Rounds after which learning should be over."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Tokens/s of every competitor on one part of the prompts under one regime.

    Attributes:
        best: label of the fastest setting of the other policies on this part.
        fixed: tokens/s of that setting.
        paper: tokens/s of the fastest among the papers' default settings.
        bandit: tokens/s of the policy `bandit`, which chooses among the papers' policies.
        none: tokens/s of the target alone.
        own: tokens/s of `cost-optimal`, starting from nothing.
        one_step, bound: tokens/s of the best rule on the signals with a one-step look-ahead, and with the whole value
            function; both are fitted to this part.
        oracle: tokens/s of Theorem 4.1's policy.
    """

    regime: str
    part: str
    best: str
    fixed: float
    paper: float
    bandit: float
    none: float
    own: float
    one_step: float
    bound: float
    oracle: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All results of a comparison.

    Attributes:
        lines: one standing for each regime and part of the prompts.
        changing: for costs that change halfway, their name, the label of the fastest fixed setting, and the speed of
            `cost-optimal` over that setting's.
        early: by regime, the result of `early_share`.
        useless: by regime, the speed of `cost-optimal` over the target alone's on a draft that is never right.
    """

    lines: list[Standing]
    changing: list[tuple[str, str, float]]
    early: dict[str, float]
    useless: dict[str, float]


def compare(traces: TraceSet, kind: Grid = "dense") -> Comparison:
    """Replay every policy on the traces under every regime."""
    eos = frozenset(traces.header.eos)
    some = traces.traces
    # These policies carry nothing over between sequences and do not depend on costs: one replay serves all parts.
    settings = grid("all", kind, frozenset(traces.header.signals))
    others = [setting for setting in settings if setting.policy not in (NEW.policy, BANDIT.policy)]
    papers = [row for row, setting in enumerate(others) if not setting.values and setting.policy != "none"]
    replays = [replay(setting.build(), some, eos) for setting in others]
    names = [*dict.fromkeys(trace.category for trace in some)]
    parts = {name: [i for i, trace in enumerate(some) if trace.category == name] for name in names}
    if len(parts) > 1:
        parts[MIXED] = list(range(len(some)))
    lines = []
    for regime, costs in regimes().items():
        times = np.array([[_ms([single], costs) for single in played] for played in replays])  # (policies, traces)
        for part, rows in parts.items():
            here = [some[row] for row in rows]
            sums = times[:, rows].sum(axis=1)
            tokens = 1e3 * sum(len(trace.tokens) for trace in here)

            def speed(policy: StoppingPolicy, *, costs: CostTable = costs, here: list[Trace] = here) -> float:
                played = replay(policy, here, eos, costs.clock(policy.signals))
                return 1e3 * sum(single.tokens for single in played) / _ms(played, costs)

            lines.append(
                Standing(
                    regime,
                    part,
                    best=others[int(sums.argmin())].label,
                    fixed=tokens / float(sums.min()),
                    paper=tokens / float(sums[papers].min()),
                    bandit=speed(BANDIT.build()),
                    none=tokens / float(sums[others.index(Setting("none"))]),
                    own=speed(NEW.build()),
                    one_step=speed(best_stopping(here, costs, one_step=True)),
                    bound=tokens / _ms(play_best(here, costs, eos), costs),
                    oracle=tokens / _ms([oracle(trace) for trace in here], costs),
                )
            )
    return Comparison(
        lines,
        list(_changing(some, replays, others, eos)),
        {name: early_share(some, costs, eos) for name, costs in regimes().items()},
        {name: _over_none([useless(trace) for trace in some], costs, eos) for name, costs in regimes().items()},
    )


def _ms(replays: Iterable[Replay], costs: CostTable) -> float:
    return costs.milliseconds(replays, ())


def _changing(
    some: list[Trace], replays: list[list[Replay]], others: list[Setting], eos: frozenset[int]
) -> Iterator[tuple[str, str, float]]:
    """The values of `Comparison.changing`, for each pair of ratios."""
    half = len(some) // 2
    for before, after in ((3, 30), (30, 3), (8, 30), (30, 8)):
        costs = made_up(before), made_up(after)
        fixed = [_ms(played[:half], costs[0]) + _ms(played[half:], costs[1]) for played in replays]
        policy = NEW.build()
        own = 0.0
        for part, table in ((some[:half], costs[0]), (some[half:], costs[1])):
            own += _ms(replay(policy, part, eos, table.clock(())), table)
        yield f"1:{before} then 1:{after}", others[int(np.argmin(fixed))].label, min(fixed) / own


def early_share(some: Sequence[Trace], costs: CostTable, eos: frozenset[int]) -> float:
    """Speed of the first `EARLY` rounds of `cost-optimal` from nothing, over its speed in them after learning.

    Every sequence is the first in turn; the policy learns from all other sequences.
    """

    def speed(policy_for: Callable[[int], StoppingPolicy]) -> float:
        tokens = seconds = 0.0
        for index, trace in enumerate(some):
            played = rounds(policy_for(index), trace, eos, costs.clock(()))
            for _, round_ in zip(range(EARLY), played, strict=False):
                tokens += len(round_.emitted)
                seconds += round_.total_seconds
        return tokens / seconds

    def learned(index: int) -> StoppingPolicy:
        policy = NEW.build()
        replay(policy, [*some[index + 1 :], *some[:index]], eos, costs.clock(()))
        return deepcopy(policy)

    return speed(lambda _: NEW.build()) / speed(learned)


def _over_none(some: list[Trace], costs: CostTable, eos: frozenset[int]) -> float:
    """Speed of `cost-optimal` over the speed of the target alone."""
    policy = NEW.build()
    none = replay(Setting("none").build(), some, eos)
    return _ms(none, costs) / _ms(replay(policy, some, eos, costs.clock(policy.signals)), costs)
