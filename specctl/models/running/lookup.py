"""A draft without weights: the tokens after an earlier occurrence of the text's last tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specctl.models.passes.forward import Forward
from specctl.models.passes.inference import HOST
from specctl.models.running.context import ENDLESS
from specctl.models.running.passes import Passes, Request


class Match(NamedTuple):
    """An earlier occurrence of the text's last tokens."""

    length: int  # the number of matching tokens, at least 1
    end: int  # the index after the occurrence, of the token that followed it


class SuffixIndex:
    """A hash of a text's n-grams with the latest position of each; appended tokens can be removed again.

    The match is the longest n-gram at the text's end that occurred before, in its latest occurrence. `append` and
    `truncate` take time proportional to ``longest`` for each token, independent of the text's length. A suffix
    automaton has no bound on the match, but it neither knows the latest occurrence nor can go back cheaply.

    Args:
        longest: the most tokens of a match, at least 1.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # the index after each n-gram's latest occurrence
        self._earlier: list[list[int]] = []  # for each token, the earlier occurrences of the n-grams that end with it

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The text."""
        return self._tokens

    @property
    def match(self) -> Match | None:
        """The longest match of the text's last tokens, in its latest occurrence; None if the last token is new."""
        earlier = self._earlier[-1] if self._earlier else ()
        return Match(len(earlier), earlier[-1]) if earlier else None

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, latest, places = self._tokens, self._latest, self._earlier
        for token in tokens:
            text.append(token)
            earlier: list[int] = []
            place = len(text)
            for start in range(place - 1, max(-1, place - 1 - self._longest), -1):
                key = tuple(text[start:])
                if (before := latest.get(key)) is not None:
                    earlier.append(before)
                latest[key] = place
            places.append(earlier)

    def found(self, tokens: Sequence[int]) -> Match | None:
        """The longest suffix of other tokens that occurs in the text, in its latest occurrence; None if the last token
        is new.
        """
        found: Match | None = None
        for size in range(1, min(self._longest, len(tokens)) + 1):
            place = self._latest.get(tuple(tokens[-size:]))
            if place is None:
                break
            found = Match(size, place)
        return found

    def truncate(self, length: int) -> None:
        """Remove all but the first ``length`` tokens, as if they had never been added."""
        if not length:
            self._tokens.clear()
            self._latest.clear()
            self._earlier.clear()
        while len(self._tokens) > length:
            earlier = self._earlier.pop()
            for size, key in enumerate(self._ends(len(self._tokens))):
                # An n-gram that occurred before has suffixes that did, too.
                if size < len(earlier):
                    self._latest[key] = earlier[size]
                else:
                    del self._latest[key]
            self._tokens.pop()

    def _ends(self, place: int) -> list[tuple[int, ...]]:
        """The n-grams that end at a position, from a single token to the longest."""
        last = self._tokens[max(0, place - self._longest) : place]
        return [tuple(last[start:]) for start in range(len(last) - 1, -1, -1)]


LONGEST_MATCH = 6
"""The most tokens of the text's end that are looked up; longer matches were no better (docs/lookup.md)."""


class LookupPasses(Passes):
    """A draft that predicts the token after the latest occurrence of the text's last tokens.

    Its logits are one-hot, or all 0 where the last token is new. Drafting does not read the logits, since `index` gives
    the match directly.

    Args:
        vocabulary: V, the length of a row of logits.
    """

    engine = "lookup"
    runs_model = False
    verifies = False
    multiplies = True
    index: SuffixIndex

    def __init__(self, vocabulary: int) -> None:
        self.index = SuffixIndex(LONGEST_MATCH)
        self.context = ENDLESS
        self.device = HOST
        self._vocabulary = vocabulary
        self._nothing = Forward(np.zeros((0, vocabulary), dtype=np.float32))

    def fresh(self) -> "LookupPasses":
        return LookupPasses(self._vocabulary)

    def answer(self, request: Request) -> Any:
        if request.keep:
            return super().answer(request)
        self.index.append(request.tokens)  # as in every round
        return self._nothing

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        tokens, keep = request.tokens, request.keep
        behind = len(tokens) - keep
        self.index.append(tokens[:behind])
        logits = np.zeros((keep, self._vocabulary), dtype=np.float32)
        for row, token in zip(logits, tokens[behind:], strict=True):
            self.index.append([token])
            if (match := self.index.match) is not None:
                row.fill(-np.inf)
                row[self.index.tokens[match.end]] = 0.0
        return [Forward(logits)]

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        self.index.truncate(length)
        return length
