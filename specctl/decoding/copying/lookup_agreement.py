"""The signal `DraftStep.agreement`: whether a lookup would copy the token that a draft drew."""

from collections.abc import Callable, Sequence

from specctl.models.running.lookup import SuffixIndex
from specctl.records import DraftStep

LONGEST, SHORTEST = 4, 2
"""The most tokens of the text's end that are looked up, and the fewest whose match counts."""


class Agreement:
    """Compares drafted tokens with those that followed the latest earlier occurrence of the text before them.

    It holds the text and the tokens of the round's draft, which the next round takes back.
    """

    def __init__(self) -> None:
        self._index = SuffixIndex(LONGEST)
        self._text = 0  # tokens of the index that are not a draft's

    def begin(self, text: Sequence[int]) -> None:
        """A draft begins behind a text, which is the last one's and what was added to it since."""
        self._index.truncate(self._text)
        self._index.append(text[self._text :])
        self._text = len(text)

    def of(self, token: int) -> float:
        """`DraftStep.agreement` of the next token of the draft."""
        index = self._index
        match = index.match
        index.append([token])
        if match is None or match.length < SHORTEST:
            return 0.0
        agrees = index.tokens[match.end] == token
        return match.length / LONGEST if agrees else -match.length / LONGEST

    def telling(self, text: Sequence[int], draw: Callable[[int], DraftStep]) -> Callable[[int], DraftStep]:
        """A function that draws a draft behind a text as another one does, and tells the signal of its steps too."""
        self.begin(text)

        def told(index: int) -> DraftStep:
            step = draw(index)
            step.agreement = self.of(step.token)
            return step

        return told

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the text."""
        self._text = min(self._text, length)
