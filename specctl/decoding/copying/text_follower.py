"""What a lookup would copy at the end of a text, and after tokens that are drafted behind it."""

from collections.abc import Callable, Sequence

from specctl.models.running.lookup import Match, SuffixIndex

LONGEST_GRAM = 3
"""The most tokens of the text's end that are looked up anew; a match that goes on right grows beyond."""
BETWEEN = -1
"""Stands between texts, and is never copied."""


class Follower:
    """Follows a growing text in an earlier part of it, as long as they go on alike, else looks its end up anew.

    So what it would copy at a place depends on the text before it alone; and on the earlier answers that it keeps.

    Args:
        earlier: of how many tokens the answers to earlier prompts are kept, the last ones; for a while there may be
            twice as many.
    """

    def __init__(self, earlier: int = 0) -> None:
        self._index = SuffixIndex(LONGEST_GRAM)
        self._earlier = earlier
        self._begin = 0  # of the text in the index, behind the earlier answers
        self._prompt = 0  # tokens of the text that are not the target's
        self.match: Match | None = None

    def __len__(self) -> int:
        return len(self._index) - self._begin

    def answer_begins(self) -> None:
        """Behind the next token, the prompt's last, all are the target's."""
        self._prompt = len(self) + 1

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
            longer = Match(match.length + 1, match.end + 1) if match is not None and hit else index.match
            self.match = self._told(longer)

    def after(self, drafted: Sequence[int]) -> Match | None:
        """The match after tokens that are drafted behind the text, and are not part of it."""
        match, text = self.match, self._index.tokens
        for token in drafted:
            if match is None or _token(text, drafted, match.end) != token:
                # What is in the text is looked up once, behind all of them: they are few.
                return self._told(self._index.found([*text[-LONGEST_GRAM:], *drafted][-LONGEST_GRAM:]))
            match = Match(match.length + 1, match.end + 1)
        return self._told(match)

    def _told(self, match: Match | None) -> Match | None:
        """A match that tells a token: behind the end of an earlier answer there is none."""
        text = self._index.tokens
        return None if match is not None and match.end < len(text) and text[match.end] == BETWEEN else match

    def copied(self, match: Match, drafted: Sequence[int], count: int) -> list[int]:
        """The tokens that followed a match; where the text ends, those that are drafted and copied behind it."""
        text, all_ = self._index.tokens, [*drafted]
        for place in range(match.end, match.end + count):
            if (token := _token(text, all_, place)) == BETWEEN:
                break
            all_.append(token)
        return all_[len(drafted) :]

    def rollback(self, length: int) -> None:
        """Take back all but the first ``length`` tokens; of a text that goes as a whole the answer may be kept."""
        if length >= len(self):
            return
        index, begin = self._index, self._begin
        answer = [*index.tokens[begin + self._prompt :]] if self._earlier and not length else []
        index.truncate(begin + length)
        if answer:
            index.append([*answer, BETWEEN])
            if len(index) > 2 * self._earlier:
                kept = [*index.tokens[-self._earlier :]]
                index.truncate(0)
                index.append(kept)
            self._begin = len(index)
        self.match = self._told(index.match) if length else None


def _token(text: Sequence[int], behind: Sequence[int], place: int) -> int:
    return text[place] if place < len(text) else behind[place - len(text)]
