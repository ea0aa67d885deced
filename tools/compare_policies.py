"""Every policy against `cost-optimal` and the bounds, by replay, under made-up costs.

``python -m tools.compare_policies TRACE...`` prints the tables for traces kept by ``specctl calibrate
--save-trace``. Nothing is timed and no model runs, so the same files give the same tables on any machine.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import log, sqrt
from pathlib import Path

import numpy as np

from specctl.calibration.grids import Grid, grid
from specctl.policies import POLICIES, Setting, Signal, StoppingPolicy
from specctl.policies.base import Rule
from specctl.records import DraftStep, Round
from specctl.replay.bound import best_stopping, play_best
from specctl.replay.costs import CostTable
from specctl.replay.play import Replay, oracle, replay, rounds
from specctl.replay.trace_files import TraceSet, read_traces
from specctl.replay.traces import DraftAlong, DraftSteps, Trace
from specctl.reporting.table import Table, as_markdown

MIXED = "mixed"
NEW = Setting("cost-optimal")
RATIOS = (3, 8, 30)
"""Draft steps that a target pass costs."""
WIDENING = 0.05
"""What each further token adds to a target pass, as a share of it, where that is linear."""
EARLY = 50
"""Rounds after which learning should be over."""


def made_up(ratio: float, widening: float = 0.0) -> CostTable:
    """A draft step of 1 ms, a target pass of ``ratio`` ms, and ``widening`` of that more for each drafted token."""
    lengths = np.array([0.0, 1.0, 64.0])
    return CostTable(np.zeros(1), lengths, lengths[None].copy(), (ratio * (1 + widening * lengths))[None], {}, 0.0)


def regimes() -> dict[str, CostTable]:
    """By name: every ratio with a flat and a linear target pass."""
    shapes = {"flat": 0.0, "linear": WIDENING}
    return {f"1:{ratio} {name}": made_up(ratio, slope) for ratio in RATIOS for name, slope in shapes.items()}


@dataclass(slots=True)
class Bandit(Rule):
    """Chooses among policies round by round, after TapOut's idea (arXiv 2511.02017): UCB1 on a blend of rewards.

    A round's reward is the mean of accepted / drafted and of accepted / the longest draft. There is no threshold to
    choose, and no cost is known.
    """

    arms: Sequence[StoppingPolicy]
    signals: frozenset[Signal] = frozenset({"entropy", "top_prob"})
    _plays: list[int] = field(init=False)
    _rewards: list[float] = field(init=False)
    _arm: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._plays, self._rewards = [0] * len(self.arms), [0.0] * len(self.arms)

    def reset(self) -> None:
        for arm in self.arms:
            arm.reset()

    def draft_limit(self) -> int:
        return self.arms[self._arm].draft_limit()

    def should_stop(self, step: DraftStep) -> bool:
        return self.arms[self._arm].should_stop(step)

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        longest = max(arm.draft_limit() for arm in self.arms)
        self.arms[self._arm].observe(round_)
        self._plays[self._arm] += 1
        self._rewards[self._arm] += round_.accepted * (1 / round_.drafted + 1 / longest) / 2
        whole = sum(self._plays)

        def promise(arm: int) -> float:
            plays = self._plays[arm]
            return self._rewards[arm] / plays + sqrt(2 * log(whole) / plays) if plays else float("inf")

        self._arm = max(range(len(self.arms)), key=promise)


def paper_arms() -> list[StoppingPolicy]:
    return [POLICIES[name]() for name in ("svip", "max-confidence", "adaedl", "self-verify", "heuristic")]


@dataclass(frozen=True, slots=True)
class Standing:
    """One part of the prompts under one regime: tokens/s of everyone.

    Attributes:
        best: of the other policies' settings, the fastest on this very part, by label.
        fixed, paper, bandit, none: tokens/s of that one, of the fastest of the papers' defaults, of the bandit and of
            the target alone.
        own: of `cost-optimal`, starting from nothing.
        one_step, bound: of the best rule on the signals with a one-step look-ahead and with the whole value function,
            both fitted to this part.
        oracle: Theorem 4.1's policy.
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
    """Lines of every part and regime; lines with costs that change halfway; learning speed and worst cases by regime.

    Attributes:
        early: speed of the first `EARLY` rounds from nothing over that of the same rounds with all else learned.
        useless: speed over the target alone on a draft that is never right.
    """

    lines: list[Standing]
    changing: list[tuple[str, str, float]]
    early: dict[str, float]
    useless: dict[str, float]


def compare(traces: TraceSet, kind: Grid = "dense") -> Comparison:
    """Replay everyone on the traces under every regime; see `Standing` and `Comparison`."""
    eos = frozenset(traces.header.eos)
    some = traces.traces
    # Nothing of these carries over between sequences, and costs change nothing they do: one replay serves all parts.
    others = [one for one in grid("all", kind, frozenset(traces.header.signals)) if one.policy != NEW.policy]
    papers = [place for place, one in enumerate(others) if not one.values and one.policy != "none"]
    replays = [replay(one.build(), some, eos) for one in others]
    names = [*dict.fromkeys(trace.category for trace in some)]
    parts = {name: [i for i, trace in enumerate(some) if trace.category == name] for name in names}
    if len(parts) > 1:
        parts[MIXED] = list(range(len(some)))
    lines = []
    for regime, costs in regimes().items():
        times = np.array([[_ms([one], costs) for one in played] for played in replays])  # (policies, traces)
        for part, places in parts.items():
            here = [some[place] for place in places]
            sums = times[:, places].sum(axis=1)
            tokens = 1e3 * sum(len(trace.tokens) for trace in here)

            def speed(policy: StoppingPolicy, *, costs: CostTable = costs, here: list[Trace] = here) -> float:
                played = replay(policy, here, eos, costs.clock(policy.signals))
                return 1e3 * sum(one.tokens for one in played) / _ms(played, costs)

            lines.append(
                Standing(
                    regime,
                    part,
                    best=others[int(sums.argmin())].label,
                    fixed=tokens / float(sums.min()),
                    paper=tokens / float(sums[papers].min()),
                    bandit=speed(Bandit(paper_arms())),
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
    """Each pair of ratios in turn: the fastest fixed setting over both halves, and `cost-optimal` over it."""
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
    """How fast the first `EARLY` rounds from nothing are, over the same with everything else learned before.

    Every sequence in turn is the first; what is learned comes from the rest of them.
    """

    def speed(policies: Callable[[int], StoppingPolicy]) -> float:
        tokens = seconds = 0.0
        for place, trace in enumerate(some):
            played = rounds(policies(place), trace, eos, costs.clock(()))
            for _, round_ in zip(range(EARLY), played, strict=False):
                tokens += len(round_.emitted)
                seconds += round_.total_seconds
        return tokens / seconds

    def learned(place: int) -> StoppingPolicy:
        policy = NEW.build()
        replay(policy, [*some[place + 1 :], *some[:place]], eos, costs.clock(()))
        return deepcopy(policy)

    return speed(lambda _: NEW.build()) / speed(learned)


def useless(trace: Trace) -> Trace:
    """A trace with the same signals, of a draft that is never right; its branches repeat the signals along the text."""
    count = len(trace.tokens)

    def following(start: int, length: int) -> DraftSteps:
        positions = [position % count for position in range(start, start + length)]
        along = trace.draft.along
        return DraftSteps(
            [along.tokens[position] for position in positions],
            [along.entropy[position] for position in positions],
            [along.top_prob[position] for position in positions],
            [along.token_prob[position] for position in positions],
        )

    return replace(
        trace,
        draft=DraftAlong([False] * count, trace.draft.along, {p: following(p + 1, trace.limit) for p in range(count)}),
        chances=None if trace.chances is None else [0.0] * count,
    )


def _over_none(some: list[Trace], costs: CostTable, eos: frozenset[int]) -> float:
    policy = NEW.build()
    none = replay(Setting("none").build(), some, eos)
    return _ms(none, costs) / _ms(replay(policy, some, eos, costs.clock(policy.signals)), costs)


def comparison_tables(found: Comparison) -> list[Table]:
    """Speeds, then what changes halfway, then the two guards."""
    columns = (
        "costs",
        "prompts",
        "best setting in hindsight",
        "over none",
        "of the best",
        "of the papers' best",
        "of the bandit",
        "of the one-step bound",
        "of the signal bound",
        "of the oracle",
        "best: of the signal bound",
        "best: of the oracle",
    )
    rows = tuple(
        (
            line.regime,
            line.part,
            line.best,
            f"{line.own / line.none:.2f}",
            *(_share(line.own, whole) for whole in (line.fixed, line.paper, line.bandit, line.one_step)),
            *(_share(speed, whole) for speed in (line.own, line.fixed) for whole in (line.bound, line.oracle)),
        )
        for line in found.lines
    )
    return [
        Table(
            "cost-optimal, from nothing, against everyone",
            columns,
            rows,
            labels=3,
            note="Shares of tokens/s by replay. The best setting, the bounds and the oracle know these very prompts.",
        ),
        Table(
            "Costs that change halfway through the prompts",
            ("costs", "best setting in hindsight", "of the best"),
            tuple((name, label, f"{share:.1%}") for name, label, share in found.changing),
            labels=2,
        ),
        Table(
            "Guards",
            ("costs", f"first {EARLY} rounds over the same, all learned", "over none, draft never right"),
            tuple((name, f"{found.early[name]:.1%}", f"{found.useless[name]:.1%}") for name in found.early),
        ),
    ]


def _share(speed: float, whole: float) -> str:
    return f"{speed / whole:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="kept by calibrate --save-trace")
    parser.add_argument("--grid", choices=("paper", "dense"), default="dense", help="settings of the other policies")
    options = parser.parse_args()
    for path in options.traces:
        print(f"# {path}\n")
        for table in comparison_tables(compare(read_traces(path), options.grid)):
            print(as_markdown(table), end="\n\n")


if __name__ == "__main__":
    main()
