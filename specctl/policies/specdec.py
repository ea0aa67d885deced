"""SpecDec++: stop where a trained head says that something drafted has probably been refused."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep


@dataclass(slots=True)
class SpecDecPlusPlus(Rule):
    """Stop when 1 - prod_i P_i > h, P_i a head's acceptance probability of the tokens drafted before the newest one
    (Huang, Guo, Wang 2024, arXiv 2405.19715, Alg. 1).

    The product restarts each round. Its newest factor is known only once the draft has been fed the token it belongs
    to, so the newest token itself is not in it, and a round's first step has P = 1. No round stops before
    ``min_draft`` tokens; the released code uses 2 and 20, and h = 0.7 is the paper's choice.

    Why a threshold on that very number (Theorem 4.3 there): drafting is a Markov decision process in which a discarded
    token costs c1 and a verification c2, and it is best to stop wherever

        P(some drafted token is refused) >= (c2 + D) / (c1 + c2 + D)

    By the cost per token, t_draft + t_draft * discard rate + (t_target - t_draft) * verification rate, c1 = t_draft
    and c2 = t_target - t_draft, the times of one forward pass. D >= 0, in the same unit, is what the process itself
    has to tell; `implied_threshold` is for D = 0.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    min_draft: Annotated[int, Ge(1)] = 2
    max_draft: Annotated[int, Ge(1)] = 20
    _all_accepted: float = field(init=False, repr=False, default=1.0)

    def __post_init__(self) -> None:
        if self.min_draft > self.max_draft:
            raise ValueError(f"min_draft = {self.min_draft} is more than max_draft = {self.max_draft}")

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._all_accepted = 1.0
        self._all_accepted *= read(step.accept_prob)
        return step.index >= self.min_draft and 1 - self._all_accepted > self.threshold


def implied_threshold(draft: float, target: float) -> float:
    """The threshold of Theorem 4.3 with D = 0, from the times of one forward pass of either model in the same unit.

    0.9 where the target is ten times as slow as the draft; 0, to stop at once, where it is no slower.
    """
    return max(0.0, target - draft) / target
