"""The tree of a draft that continues the most promising tokens of each level (EAGLE-2, arXiv 2406.16858)."""

from collections.abc import Sequence, Set
from math import exp

ROOT = -1
"""The number of the newest token, from which a tree grows."""
IMPOSSIBLE = -1e9
"""The log-probability of what has probability 0 or none at all: such a token is never verified."""


class BeamTree:
    """Tokens numbered in the order in which they were found, level after level; plain numbers.

    A token's score is the sum of the log-probabilities on its path, an estimate of how likely the target is to get
    there (EAGLE-2's value, the product of the draft's confidences). All of a level's candidates are kept until the tree
    is pruned, for one that was not continued may be better than those of a deeper level.

    Attributes:
        tokens: ids.
        parents: the number of each token's parent, an earlier one, or `ROOT`.
        scores: log-probability of each token's path, falling along every path.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self._ends: list[int] = [0]  # how many tokens there are up to each level

    @property
    def depth(self) -> int:
        """How many levels have been found."""
        return len(self._ends) - 1

    def prob(self, token: int) -> float:
        """A token's probability in the law at its parent."""
        return exp(self.scores[token] - self._score(self.parents[token]))

    def child(self, parent: int, token: int) -> int | None:
        """The number of the token with this id below a parent; None without one."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((number for number, pair in enumerate(pairs) if pair == (parent, token)), None)

    def grow(self, parents: Sequence[int], ids: Sequence[Sequence[int]], logs: Sequence[Sequence[float]]) -> None:
        """Add a level.

        Args:
            parents: B tokens of the last level.
            ids: of each, its likeliest continuations.
            logs: their log-probabilities in the laws at the parents.
        """
        for parent, some, values in zip(parents, ids, logs, strict=True):
            above = self._score(parent)
            for token, value in zip(some, values, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(above + min(value, 0.0))
        self._ends.append(len(self.tokens))

    def beams(self, count: int, ends: Set[int]) -> list[int]:
        """The ``count`` best tokens of the last level, the best first, without those that end the sequence.

        Of tokens without a probability one is taken, and only where there is no other.
        """
        last = range(self._ends[-2], self._ends[-1])
        best = sorted((token for token in last if self.tokens[token] not in ends), key=self._falling)[:count]
        return [token for token in best if self._possible(token)] or best[:1]

    def pruned(self, count: int, depth: int) -> list[int]:
        """The ``count`` best tokens of the first levels, in order; with each of them its ancestors.

        A token's score is at most its parent's, and where they are equal the parent was found earlier.
        """
        known = filter(self._possible, range(self._ends[depth]))
        return sorted(sorted(known, key=self._falling)[:count])

    def _possible(self, token: int) -> bool:
        return self.scores[token] > IMPOSSIBLE / 2

    def _score(self, token: int) -> float:
        return 0.0 if token == ROOT else self.scores[token]

    def _falling(self, token: int) -> tuple[float, int]:
        return -self.scores[token], token
