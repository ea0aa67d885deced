"""How often a copied token is accepted, by the length of the match before it."""

from dataclasses import dataclass, field

LONGEST_RATED = 24
"""Matches of this length and longer ones have one acceptance rate."""
RATE_PRIOR = 4.0
"""Observations after which a length's own rate weighs as much as what is expected without them."""


@dataclass(slots=True)
class MatchRates:
    """How often a copied token is accepted, by the length L of the match before it, drafted tokens included.

    Attributes:
        around: the rates of all texts, towards which those of one text are shrunk, and which learn with them; without
            them the guess is L / (L + 2).
    """

    around: "MatchRates | None" = None
    _accepted: list[float] = field(default_factory=lambda: [0.0] * (LONGEST_RATED + 1))
    _verified: list[int] = field(default_factory=lambda: [0] * (LONGEST_RATED + 1))

    def rate(self, length: int) -> float:
        """The expected acceptance probability of the token after a match of ``length`` tokens."""
        length = min(length, LONGEST_RATED)
        guess = length / (length + 2) if self.around is None else self.around.rate(length)
        return (self._accepted[length] + RATE_PRIOR * guess) / (self._verified[length] + RATE_PRIOR)

    def learn(self, length: int, outcome: float) -> None:
        """Add an outcome: 0 or 1, or the probability of 1."""
        length = min(length, LONGEST_RATED)
        self._accepted[length] += outcome
        self._verified[length] += 1
        if self.around is not None:
            self.around.learn(length, outcome)
