"""exllamav3: a threshold on the acceptance that was observed of draft tokens with about the same largest logit."""

from dataclasses import dataclass, field
from math import floor
from typing import ClassVar

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round

MEMORY = 0.995
"""Factor on the weight of earlier verdicts when a round ends."""
FIRST, ENOUGH = 64.0, 8.0
"""The weight of all verdicts, and of those of one bin, from which on they are trusted."""


@dataclass(slots=True, kw_only=True)
class CalibratedConfidence(Rule):
    """exllamav3's ``dynamic_draft_tokens`` (generator/draft_confidence.py and generator.py, 1.6.5), for a draft model.

    The draft's largest logit, rounded down, is the bin of a token. What share of a bin's tokens was accepted is its
    estimate; a token in a bin that is not known well has that of the nearest below, or of the lowest. A draft stops
    after the token at which the product of its estimates falls below ``confidence``. It reads that logit in the place
    of the top probability.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"top_prob"})
    confidence: float = 0.4
    max_draft: int = 4
    _bins: dict[int, list[float]] = field(init=False, default_factory=dict)  # weights of all and of accepted tokens
    _total: float = field(init=False, default=0.0)
    _reached: float = field(init=False, compare=False, default=1.0)

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        before = 1.0 if step.index == 1 else self._reached
        self._reached = before * self.estimate(read(step.top_prob))
        return self._reached < self.confidence

    def estimate(self, logit: float) -> float:
        """The share of tokens with about this largest logit that was accepted; 1 while little is known."""
        known = sorted(one for one, (weight, _) in self._bins.items() if weight >= ENOUGH)
        if self._total < FIRST or not known:
            return 1.0
        weight, accepted = self._bins[max((one for one in known if one <= floor(logit)), default=known[0])]
        return accepted / weight

    def observe(self, round_: Round) -> None:
        if not round_.steps:
            return
        for position, step in enumerate(round_.steps[: round_.accepted + 1]):
            sums = self._bins.setdefault(floor(read(step.top_prob)), [0.0, 0.0])
            sums[0] += 1
            sums[1] += position < round_.accepted
            self._total += 1
        for sums in self._bins.values():
            sums[:] = [MEMORY * one for one in sums]
        self._total *= MEMORY
