"""What a lookup would copy at the end of a text, and after tokens that are drafted behind it."""

from collections.abc import Callable, Sequence

from specctl.models.running.suffix_index import Match, SuffixIndex

LONGEST_GRAM = 4
"""The most tokens of the text's end that are looked up anew; a match that goes on right grows beyond."""


class Follower:
    """Follows a growing text in an earlier part of it, as long as they go on alike, else looks its end up anew.

    So what it would copy at a place depends on the text before it alone.
    """

    def __init__(self) -> None:
        self._index = SuffixIndex(LONGEST_GRAM)
        self.match: Match | None = None

    def __len__(self) -> int:
        return len(self._index)

    def read(self, tokens: Sequence[int], learn: Callable[[int, bool], None] | None = None) -> None:
        """Add tokens to the text's end.

        Args:
            tokens: ids.
            learn: told of each token that was expected how long the match was, and whether the token was that one.
        """
        index = self._index
        text = index.tokens
        for token in tokens:
            match = self.match
            hit = match is not None and text[match.end] == token
            if match is not None and learn is not None:
                learn(match.length, hit)
            index.append([token])
            self.match = Match(match.length + 1, match.end + 1) if match is not None and hit else index.match

    def after(self, drafted: Sequence[int]) -> Match | None:
        """The match after tokens that are drafted behind the text, and are not part of it."""
        match, text = self.match, self._index.tokens
        for count, token in enumerate(drafted, start=1):
            if match is not None and _token(text, drafted, match.end) == token:
                match = Match(match.length + 1, match.end + 1)
            else:
                match = self._index.found([*text[-LONGEST_GRAM:], *drafted[:count]])
        return match

    def copied(self, match: Match, drafted: Sequence[int], count: int) -> list[int]:
        """The tokens that followed a match; where the text ends, those that are drafted and copied behind it."""
        text, all_ = self._index.tokens, [*drafted]
        for place in range(match.end, match.end + count):
            all_.append(_token(text, all_, place))
        return all_[len(drafted) :]

    def rollback(self, length: int) -> None:
        """Take back all but the first ``length`` tokens."""
        if length < len(self):
            self._index.truncate(length)
            self.match = self._index.match


def _token(text: Sequence[int], behind: Sequence[int], place: int) -> int:
    return text[place] if place < len(text) else behind[place - len(text)]
