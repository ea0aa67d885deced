"""A target's tokens as its draft reads them."""

from collections.abc import Sequence

from specctl.models.translation.token_map import TokenMap

LONGEST = 32
"""Tokens after which a piece of the text is taken as a word, whatever it is."""


class DraftText:
    """The draft's ids of a growing text of the target's.

    They depend on the text alone and not on how it came to be, so that a draft replayed reads what it read live. A
    word that another one follows is cut as the draft's own tokenizer cuts it. Of the word that is being written each
    token is the draft's of the same bytes; where there is none for one of them, its bytes are cut anew with each token.
    Special tokens are words: those that the draft has not are read as the text that spells them, but for the beginning
    of the text, which is as the draft's own tokenizer begins it.

    Args:
        tokens: of the target and the draft.

    Attributes:
        tokens: the target's ids.
        ids: the draft's, never empty.
    """

    def __init__(self, tokens: TokenMap) -> None:
        self._map = tokens
        self._spelt = {index: token.encode() for token, index in tokens.target.specials.items()}
        # A draft that begins texts with nothing still has to read a token before it can write one.
        self._empty = [next((one for one in (tokens.draft.eos,) if one is not None), 0)]
        self.tokens: list[int] = []
        self.ids: list[int] = []
        self._words: list[tuple[int, int]] = []  # where each word begins: in the target's ids and in the draft's
        self.truncate(0)

    def append(self, token: int) -> int:
        """Add a token of the target's; how many of the draft's ids from the start stay as they were."""
        if self._opens(token):
            kept = self._put(closed=True)
            # A draft that begins texts with nothing reads the first word in place of what stands for an empty text.
            place = len(self._map.draft.start if self._silent(len(self.tokens)) else self.ids)
            self._words.append((len(self.tokens), place))
        else:
            kept = len(self.ids)
        self.tokens.append(token)
        return min(kept, self._put(closed=False))

    def truncate(self, length: int) -> int:
        """Keep the first tokens of the target's only; how many of the draft's ids from the start stay as they were."""
        if length >= len(self.tokens) and self.tokens:
            return len(self.ids)
        while len(self._words) > 1 and self._words[-1][0] >= length:
            self._words.pop()
        del self.tokens[length:]
        if not self.tokens:
            self._words, self.ids = [(0, len(self._map.draft.start))], [*(self._map.draft.start or self._empty)]
            return 0
        return self._put(closed=False)

    @property
    def word(self) -> Sequence[int]:
        """The target's ids of the word that is being written; none behind a special token and where the text begins."""
        if not self.tokens or self.tokens[-1] not in self._map.target.of:
            return ()
        return self.tokens[self._words[-1][0] :]

    @property
    def begins(self) -> bool:
        """Whether that word is the first of the text."""
        return self._silent(len(self.tokens) - len(self.word))

    def _opens(self, token: int) -> bool:
        """Whether a token begins a word."""
        start = self._words[-1][0]
        if len(self.tokens) == start:
            return False
        last, text = self.tokens[-1], self._map.target.of.get(token)
        before = self._map.target.of.get(last)
        if text is None or before is None or len(self.tokens) - start >= LONGEST:
            return True
        return text.startswith(b" ") and not before[-1:].isspace()

    def _put(self, *, closed: bool) -> int:
        """Write the ids of the last word; how many ids from the start stay as they were."""
        start, place = self._words[-1]
        new = [] if self._silent(len(self.tokens)) else self._read(self.tokens[start:], closed)
        if not place and not new:
            new = self._empty
        old = self.ids[place:]
        same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.ids[place:] = new
        return place + same

    def _read(self, word: Sequence[int], closed: bool) -> Sequence[int]:
        own = self._map.draft_id
        if len(word) == 1 and word[0] in self._spelt:
            return [own[word[0]]] if word[0] in own else self._map.draft.encode(self._spelt[word[0]])
        begins = self._silent(self._words[-1][0])
        spaced = begins and self._map.target.puts_space
        if not closed and not spaced and all(token in own for token in word):
            return [own[token] for token in word]
        text = self._map.target.text(word)
        return self._map.draft.encode(text.removeprefix(b" ") if spaced else text, first=begins)

    def _silent(self, count: int) -> bool:
        """Whether so many tokens from the start of the text are what the target's tokenizer puts before every one."""
        start = self._map.target.start
        return count <= len(start) and start[:count] == (*self.tokens[:count],)
