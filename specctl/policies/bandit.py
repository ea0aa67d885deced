"""A bandit over stopping policies: one policy drafts each round, and the rewards of past rounds decide which."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log, sqrt
from typing import Annotated, Any

from annotated_types import Ge, Gt, MinLen

from specctl.policies.base import Rule, Signal
from specctl.policies.draft_account import DraftAccount
from specctl.policies.registry import RULES, policy_table
from specctl.records import DraftStep, Round, StopReason

TRAINING_FREE = ("svip", "max-confidence", "adaedl", "self-verify", "heuristic")
"""The policies of the papers that need no training and adapt to a text, each with its default settings."""
FIRST = 1.0  # Target passes per arm that a new run's drafts may lose


@dataclass(slots=True, kw_only=True)
class Bandit(Rule):
    """In each round, the policy with the largest upper confidence bound on its reward drafts.

    Follows TapOut (Sridhar et al. 2025, arXiv 2511.02017). Its bandit chooses a stopping policy for each draft as a
    whole, by UCB1 on a reward that blends accepted length and acceptance rate. Here the reward of a round is

        r = (accepted / drafted + accepted / max_draft) / 2, in [0, 1], and 0 if the policy chose to draft nothing,

    Let n_i be the number of rounds of policy i, R_i the sum of their rewards and n = sum_i n_i. The policy with the
    largest R_i / n_i + sqrt(2 ln(n) / n_i) drafts the next round (UCB1, Auer et al. 2002), the first one among equals.
    Each policy drafts once before any drafts twice. Rates and lengths have equal weight, and the reward ignores the
    cost of a pass.

    This reward cannot rank drafting nothing, since the accepted length is then 0 by choice. So the arm `none`, which
    always exists, is ranked by the passes it saves: 0. A draft saves accepted - cost_ratio * drafted passes, where
    ``cost_ratio`` is the time of a draft step divided by that of a target pass. `none` plays while a `DraftAccount`
    does not cover another draft as long as the last one. Once drafts have lost FIRST passes for each arm, they lose at
    most 1% of the time.

    A policy observes only the rounds that it drafted, so an adaptive length or threshold follows its own drafts. Which
    policy drafts depends only on earlier rounds, so the output follows the target's distribution. ``arms`` are policies
    in the form of ``--policy``; each keeps the token at which it stops. ``max_draft`` is the longest draft of any arm.
    With ``carry_over``, rewards carry over from one sequence to the next; when sampling, the text for a seed then
    depends on the sequences before it. The arms' own settings decide what the arms carry over.
    """

    arms: Annotated[tuple[str, ...], MinLen(2)] = TRAINING_FREE
    max_draft: Annotated[int, Ge(1)] = 40
    cost_ratio: Annotated[float, Gt(0)] = 0.125
    carry_over: bool = True
    _policies: list[Rule] = field(init=False, repr=False)
    _plays: list[int] = field(init=False, repr=False)
    _rewards: list[float] = field(init=False, repr=False)
    _arm: int = field(init=False, repr=False, default=0)
    _account: DraftAccount = field(init=False, repr=False)
    _rests: bool = field(init=False, repr=False, default=False)
    _cost: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        self._policies = [_policy(arm) for arm in self.arms]
        self._restart()

    def _restart(self) -> None:
        self._plays, self._rewards, self._arm = [0] * len(self.arms), [0.0] * len(self.arms), 0
        self._account, self._rests, self._cost = DraftAccount(FIRST * len(self.arms)), False, 0.0

    @classmethod
    def signals_of(cls, values: Mapping[str, Any]) -> frozenset[Signal]:
        arms = values.get("arms", TRAINING_FREE)
        return frozenset().union(*(_rule(table).signals_of(table) for table in map(policy_table, arms)))

    @property
    def signals(self) -> frozenset[Signal]:
        return self.signals_of({"arms": self.arms})

    @property
    def current_threshold(self) -> float | None:
        return self._policies[self._arm].current_threshold

    def reset(self) -> None:
        for policy in self._policies:
            policy.reset()
        if not self.carry_over:
            self._restart()

    def draft_limit(self) -> int:
        return 0 if self._rests else min(self.max_draft, self._policies[self._arm].draft_limit())

    def should_stop(self, step: DraftStep) -> bool:
        return self._policies[self._arm].should_stop(step)

    def observe(self, round_: Round) -> None:
        if not round_.drafted and round_.stop is StopReason.BUDGET:
            return  # there was no room, which says nothing about the policy
        if round_.drafted:
            self._cost = self.cost_ratio * round_.drafted
        self._account.book(round_.accepted - self._cost if round_.drafted else 0.0, probe=False)
        rested, self._rests = self._rests, self._account.balance < self._cost
        if rested:
            return
        self._policies[self._arm].observe(round_)
        self._plays[self._arm] += 1
        if round_.drafted:
            self._rewards[self._arm] += round_.accepted * (1 / round_.drafted + 1 / self.max_draft) / 2
        total = sum(self._plays)

        def upper_bound(arm: int) -> float:
            plays = self._plays[arm]
            return self._rewards[arm] / plays + sqrt(2 * log(total) / plays) if plays else inf

        self._arm = max(range(len(self.arms)), key=upper_bound)


def _rule(table: Mapping[str, Any]) -> type[Rule]:
    name = table["name"]
    if name not in RULES:
        raise ValueError(f"{name} cannot be an arm: it is not a policy, or itself chooses among policies")
    return RULES[name]


def _policy(arm: str) -> Rule:
    table = policy_table(arm)
    rule = _rule(table)
    if not rule.drafts:
        raise ValueError(f"{arm} cannot be an arm: it never drafts")
    policy = rule(**{key: value for key, value in table.items() if key != "name"})
    # Drafting asks a policy only once, for all its rounds, whether the triggering token is dropped.
    if not policy.keep_trigger:
        raise ValueError(f"{arm} cannot be an arm: an arm keeps the token at which it stops")
    return policy
