"""What a trace knows of the probabilities with which the tokens of a draft are kept as a block. No torch here."""

from dataclasses import dataclass

from specctl.decoding.block_chances import kept_in_turn


@dataclass(frozen=True, slots=True)
class BlockChances:
    """Of n draft tokens in a row from the first of their round on; `specctl.decoding.acceptance.passing` has w and h.

    Attributes:
        weights: w_1 to w_n: given the first i tokens alone, the probability that these or more are kept.
        passing: h_0 to h_(n-1), h_0 = 1: the probability that the first i tokens pass, if the draft goes on.
    """

    weights: list[float]
    passing: list[float]

    def of_round(self, count: int) -> tuple[float, ...]:
        """Of each token of a draft of the first ``count``, the probability that it is kept, given all of them and that
        those before it are kept."""
        if not count:
            return ()
        return tuple(kept_in_turn([*self.passing[1:count], self.weights[count - 1]]))

    def as_last(self, count: int) -> list[float]:
        """The same of each of the first ``count`` tokens, as the last of its draft."""
        pairs = zip(self.weights[:count], self.passing, strict=False)
        return [weight / (weight + (1 - weight) * passing) if weight else 0.0 for weight, passing in pairs]

    def __add__(self, after: "BlockChances") -> "BlockChances":
        return BlockChances(self.weights + after.weights, self.passing + after.passing)
