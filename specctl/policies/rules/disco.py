"""DISCO: stop where a trained classifier of the draft's distribution expects a rejection."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep


@dataclass(slots=True)
class Disco(Rule):
    """Stop when C_i < threshold, C_i the predicted probability that the i-th drafted token is accepted (Mamou and
    others 2024, arXiv 2405.04304).

    C_i is the output of a network of two layers that reads the ten largest probabilities of the distribution that the
    token was drawn from, its entropy, and i. It reads neither the token nor what it predicted for those before, so that
    each token is judged alone; `SpecDecPlusPlus` multiplies. The paper tunes the threshold on the data of a task; the
    default is where a rejection becomes as likely as not.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"own_accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    max_draft: Annotated[int, Ge(1)] = 20

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.own_accept_prob) < self.threshold
