"""How often a copied token is accepted, by the length of the match before it."""

LONGEST_RATED = 24
"""Matches of this length and longer ones have one acceptance rate."""
RATE_PRIOR = 4.0
"""Observations after which a length's own rate weighs as much as what is expected without them."""


class MatchRates:
    """How often a copied token is accepted, by the length L of the match before it, drafted tokens included.

    Args:
        around: the rates of all texts, towards which those of one text are shrunk, and which learn with them; without
            them the guess is L / (L + 2).
    """

    __slots__ = ("_accepted", "_around", "_rates", "_verified")

    def __init__(self, around: "MatchRates | None" = None) -> None:
        self._around = around
        self._accepted = [0.0] * (LONGEST_RATED + 1)
        self._verified = [0] * (LONGEST_RATED + 1)
        # Asked for more often than they change.
        self._rates: list[float] = [n / (n + 2) for n in range(LONGEST_RATED + 1)]
        if around is not None:
            self._rates = [*around._rates]

    def rate(self, length: int) -> float:
        """The expected acceptance probability of the token after a match of ``length`` tokens."""
        return self._rates[length if length < LONGEST_RATED else LONGEST_RATED]

    def learn(self, length: int, outcome: float) -> None:
        """Add an outcome: 0 or 1, or the probability of 1."""
        length = min(length, LONGEST_RATED)
        around = self._around
        if around is not None:
            around.learn(length, outcome)
        guess = length / (length + 2) if around is None else around._rates[length]
        self._accepted[length] += outcome
        self._verified[length] += 1
        self._rates[length] = (self._accepted[length] + RATE_PRIOR * guess) / (self._verified[length] + RATE_PRIOR)
