"""What a trace knows of the probabilities with which the tokens of its rounds are kept. No torch here.

Both kinds say what they know of a round by where it begins, how many of its tokens the text's rounds share, and the
branch that follows these: see `specctl.replay.recorded.Recorded`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specctl.decoding.rows.draft_verdict import kept_in_turn


@dataclass(frozen=True, slots=True)
class TokenChances:
    """Of tokens verified one by one: the probability of each, once those before it are accepted.

    Attributes:
        along: of the shared token at each position; empty if rounds share none.
        branches: of each branch, of the tokens that verification judges; empty if it judges shared ones alone.
    """

    in_blocks: ClassVar[Literal[False]] = False
    along: list[float]
    branches: list[list[float]]

    def of_round(self, start: int, shared: int, branch: int | None, count: int) -> tuple[float, ...]:
        """Of the tokens of a draft of ``count``, so far as they are judged."""
        return tuple(self.as_last(start, shared, branch, count))

    def as_last(self, start: int, shared: int, branch: int | None, count: int) -> list[float]:
        """Of each of the first ``count`` tokens; here, how long the draft is makes no difference."""
        found = self.along[start : start + min(shared, count)]
        return (
            found + self.branches[branch][: max(0, count - shared)] if self.branches and branch is not None else found
        )


@dataclass(frozen=True, slots=True)
class BlockChances:
    """Of n draft tokens in a row from the first of their round on; `rows.host_verdict.passing` has w and h.

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


@dataclass(frozen=True, slots=True)
class RoundChances:
    """Of tokens verified as blocks, whose chances depend on where their round began, though the tokens may be shared.

    Attributes:
        starts: of the shared tokens of the round that begins at each position; empty if rounds share none.
        branches: of the tokens of each branch.
    """

    in_blocks: ClassVar[Literal[True]] = True
    starts: list[BlockChances]
    branches: list[BlockChances]

    def of_round(self, start: int, shared: int, branch: int | None, count: int) -> tuple[float, ...]:  # noqa: ARG002
        """Of the tokens of a draft of ``count``."""
        return self._of(start, branch).of_round(count)

    def as_last(self, start: int, shared: int, branch: int | None, count: int) -> list[float]:  # noqa: ARG002
        """Of each of the first ``count`` tokens, as the last of its draft."""
        return self._of(start, branch).as_last(count)

    def _of(self, start: int, branch: int | None) -> BlockChances:
        if branch is None:
            return self.starts[start]
        return self.starts[start] + self.branches[branch] if self.starts else self.branches[branch]
