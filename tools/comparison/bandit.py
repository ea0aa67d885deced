"""A bandit that chooses among stopping policies, round by round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt

from specctl.policies import POLICIES, Signal, StoppingPolicy
from specctl.policies.base import Rule
from specctl.records import DraftStep, Round


@dataclass(slots=True)
class Bandit(Rule):
    """Chooses among policies round by round, after TapOut's idea (arXiv 2511.02017): UCB1 on a blend of rewards.

    The reward of a round is the mean of accepted / drafted and accepted / (longest draft of any arm). The bandit has no
    threshold and knows no costs.
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
        total = sum(self._plays)

        def upper_bound(arm: int) -> float:
            plays = self._plays[arm]
            return self._rewards[arm] / plays + sqrt(2 * log(total) / plays) if plays else float("inf")

        self._arm = max(range(len(self.arms)), key=upper_bound)


def paper_arms() -> list[StoppingPolicy]:
    """The papers' policies with their default settings."""
    return [POLICIES[name]() for name in ("svip", "max-confidence", "adaedl", "self-verify", "heuristic")]
