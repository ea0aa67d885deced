"""SVIP: stop when the draft's entropy makes a rejection likely."""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep


@dataclass(slots=True)
class Svip(Rule):
    """Stop when sqrt(c H) > h, H the entropy of the draft (Zhang et al. 2024, arXiv 2411.18462, eq. 6 and Alg. 1).

    1 - sqrt(c H) estimates a lower bound of the acceptance probability. The published code uses c = 0.15; with c = 1
    the paper's thresholds stop almost at once.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    threshold: Annotated[float, Ge(0)] = 0.3
    c: Annotated[float, Gt(0)] = 0.15
    max_draft: Annotated[int, Ge(1)] = 40
    keep_trigger: bool = True

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return sqrt(self.c * read(step.entropy)) > self.threshold
