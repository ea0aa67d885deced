"""HSDDW's self-verification: a threshold on entropy, learned from the rejected tokens."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round


@dataclass(slots=True)
class SelfVerify(Rule):
    """Stop when H > tau, tau the mean entropy of the tokens rejected so far in this sequence (Syu and Lee 2025).

    Before the first rejection tau is 0, so a round drafts one token. Only the first token of a round that is not kept
    counts: those after it are discarded with it. In block verification it may be one that would have been kept alone.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    max_draft: Annotated[int, Ge(1)] = 10
    carry_over: bool = False
    _entropy_sum: float = field(init=False, repr=False, default=0.0)
    _rejections: int = field(init=False, repr=False, default=0)

    @property
    def current_threshold(self) -> float:
        return self._entropy_sum / self._rejections if self._rejections else 0.0

    def reset(self) -> None:
        if not self.carry_over:
            self._entropy_sum, self._rejections = 0.0, 0

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.entropy) > self.current_threshold

    def observe(self, round_: Round) -> None:
        rejected = round_.rejected
        if rejected is not None:
            self._entropy_sum += read(rejected.entropy)
            self._rejections += 1
