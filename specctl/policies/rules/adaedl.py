"""AdaEDL's adaptive threshold, and the two policies that use it."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round

Share = Annotated[float, Ge(0), Le(1)]


@dataclass(slots=True, kw_only=True)
class AdaptiveThreshold(Rule):
    """A lower bound lambda on confidence that moves with the acceptance rate (Agrawal et al. 2024, arXiv 2410.18351).

    After a round with n_acc of n_drafted accepted: AR = beta1 AR + (1 - beta1) n_acc / n_drafted; the step
    lambda' = lambda + eps if AR < alpha, else lambda - eps unless n_acc = max_draft; lambda = beta2 lambda +
    (1 - beta2) lambda'. AR starts at the rate of the first round. Rounds without draft tokens change nothing.
    """

    threshold: Share = 0.4
    alpha: Share = 0.9
    eps: Annotated[float, Ge(0)] = 0.01
    beta1: Share = 0.5
    beta2: Share = 0.9
    max_draft: Annotated[int, Ge(1)] = 7
    keep_trigger: bool = True
    carry_over: bool = False
    _lambda: float = field(init=False, repr=False, default=0.0)
    _acceptance: float | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._lambda, self._acceptance = self.threshold, None

    @property
    def current_threshold(self) -> float:
        return self._lambda

    def reset(self) -> None:
        if not self.carry_over:
            self._restart()

    def draft_limit(self) -> int:
        return self.max_draft

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        rate = round_.accepted / round_.drafted
        previous = rate if self._acceptance is None else self._acceptance
        self._acceptance = self.beta1 * previous + (1 - self.beta1) * rate
        moved = self._lambda
        if self._acceptance < self.alpha:
            moved += self.eps
        elif round_.accepted != self.max_draft:
            moved -= self.eps
        self._lambda = self.beta2 * self._lambda + (1 - self.beta2) * moved


@dataclass(slots=True, kw_only=True)
class AdaEdl(AdaptiveThreshold):
    """Stop when 1 - sqrt(gamma H) < lambda, H the draft's entropy (arXiv 2410.18351, eq. 6 and Alg. 1)."""

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    gamma: Annotated[float, Gt(0)] = 0.2

    def should_stop(self, step: DraftStep) -> bool:
        return 1 - sqrt(self.gamma * read(step.entropy)) < self._lambda


@dataclass(slots=True, kw_only=True)
class MaxConfidence(AdaptiveThreshold):
    """Stop when the draft's largest probability is below lambda; ``adapt = false`` keeps lambda at its start value."""

    reads: ClassVar[frozenset[Signal]] = frozenset({"top_prob"})
    adapt: bool = True

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.top_prob) < self._lambda

    def observe(self, round_: Round) -> None:
        if self.adapt:
            AdaptiveThreshold.observe(self, round_)
