"""SpecDec++: stop when a trained head predicts that some draft token will be rejected."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep


@dataclass(slots=True)
class SpecDecPlusPlus(Rule):
    """Stop when 1 - prod_i P_i > h, P_i the head's predicted acceptance probabilities of the tokens drafted before the
    newest one (Huang, Guo, Wang 2024, arXiv 2405.19715, Alg. 1).

    The product restarts each round. The head predicts a token's acceptance from the hidden state after the draft has
    read this token, so the newest token is not in the product, and a round's first step has P = 1. No round stops
    before ``min_draft`` tokens. The released code uses min_draft = 2 and max_draft = 20; the paper uses h = 0.7.

    Theorem 4.3 of the paper explains the threshold: drafting is a Markov decision process in which a discarded token
    costs c1 and a verification c2, and it is optimal to stop when

        P(some draft token is rejected) >= (c2 + D) / (c1 + c2 + D)

    A generated token costs t_draft + t_draft * discard rate + (t_target - t_draft) * verification rate, so c1 = t_draft
    and c2 = t_target - t_draft, with t_draft and t_target the times of one forward pass. D >= 0, in the same unit,
    depends on the process and is not known in advance; `implied_threshold` takes D = 0.
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
    """The threshold of SpecDec++'s Theorem 4.3 with D = 0 (see `SpecDecPlusPlus`).

    For example 0.9 if the target is ten times as slow as the draft, and 0 (stop at once) if it is not slower.

    Args:
        draft: time of one forward pass of the draft.
        target: time of one forward pass of the target, in the same unit.
    """
    return max(0.0, target - draft) / target
