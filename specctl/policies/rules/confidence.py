"""DSpark: stop where the drafted tokens are, as the draft head itself predicts, unlikely all to be accepted."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep


@dataclass(slots=True)
class ConfidentPrefix(Rule):
    """Stop when prod_i c_i < threshold, c_i the draft head's acceptance probability of token i, given those before it.

    c_i reads the tokens before token i and not token i (Cheng and others 2026, arXiv 2607.05147, Eq. 7), so the product
    includes the token that would be drafted next: the rule stops before it is drawn. A round's first token is drafted
    in any case, and the product begins with c_2; it is the probability that the second to the next token are accepted
    if the first one is.

    The paper's survival probability of a prefix is this product (Alg. 1). Its released code compares each c_i alone
    with a threshold, which is 0 unless it is set, so that whole blocks are verified. Here the default is 0.5, where one
    more token is as likely to be verified in vain as not. The paper sweeps thresholds from 0 to 0.8 (Fig. 5).
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"next_accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    max_draft: Annotated[int, Ge(1)] = 40
    _all_accepted: float = field(init=False, repr=False, default=1.0)

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._all_accepted = 1.0
        self._all_accepted *= read(step.next_accept_prob)
        return self._all_accepted < self.threshold
