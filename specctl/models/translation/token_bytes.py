"""What the ids of a tokenizer stand for: bytes of text, whichever way its vocabulary spells them."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import takewhile

from specctl.models.files.byte_tokens import SPACE, byte_of, bytes_of_letters
from specctl.models.files.tokenizer import PROBES, Tokenizer
from specctl.models.files.vocabulary import known_ids

PLAIN = (PROBES[0], PROBES[2])
"""Texts that every tokenizer for English has to give back."""
ANCHORS = ("", "\n", ".", "a")
"""What may stand before a piece from the middle of a text, so that no beginning is put before it."""


class TokenBytes:
    """The bytes that each id of a tokenizer stands for.

    Args:
        tokenizer: byte-level BPE (``Ġ``), or SentencePiece's forms (``▁``, ``<0x0A>``).
        rows: how many ids the model has; the tokenizer's others are left out.

    Attributes:
        whole: how many ids the tokenizer and the model have.
        of: by id; special tokens have none.
        ids: the id of a text of these bytes; of several, one that is not spelt as a byte.
        specials: special tokens by their text.
        start: the special ids that it puts before every text.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer = tokenizer
        self.specials = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self.whole = known_ids(tokenizer, rows)
        special = {*self.specials.values()}
        spelt = {token: i for token, i in tokenizer.get_vocab().items() if i not in special and i < self.whole}
        of_bytes = sum("Ġ" in token for token in spelt) > sum(SPACE in token for token in spelt)
        self.of: Mapping[int, bytes] = {
            i: _of_piece(t) if not of_bytes else t.encode() if i in tokenizer.added_tokens_decoder else _of_letters(t)
            for t, i in spelt.items()
        }
        order = sorted(spelt, key=lambda token: (byte_of(token) is None, -spelt[token]))
        self.ids: Mapping[bytes, int] = {self.of[spelt[token]]: spelt[token] for token in order if token}
        self.start = tuple(takewhile(special.__contains__, tokenizer.encode("a", add_special_tokens=True)))
        self._longest = max(map(len, self.ids), default=0)
        self._known: dict[tuple[bytes, bool], list[int]] = {}

    @property
    def eos(self) -> int | None:
        """The id that ends a text; None if there is none."""
        found = self._tokenizer.eos_token_id
        return found if isinstance(found, int) else None

    @property
    def lost(self) -> str | None:
        """The first of the `PLAIN` texts that its tokens do not give back; None if they give back all."""
        return next((text for text in PLAIN if self.reading(text) != text), None)

    def reading(self, text: str) -> str:
        """What is left of a text in its tokens."""
        return self.text(self._tokenizer.encode(text, add_special_tokens=False)).decode(errors="replace").lstrip(" ")

    def text(self, ids: Iterable[int]) -> bytes:
        """What ids spell; special tokens spell nothing."""
        return b"".join(self.of.get(index, b"") for index in ids)

    def encode(self, piece: bytes, *, first: bool = False) -> list[int]:
        """The ids of a part of a text, as its tokenizer cuts it: without special tokens.

        What is no text, such as the beginning of a character, and what the tokenizer does not give back is cut into the
        longest tokens there are; bytes of which there is no token are left out.

        Args:
            piece: its bytes.
            first: whether it begins the text, where a tokenizer may put a space that is not there.
        """
        key = piece, first
        if key not in self._known:
            if len(self._known) > 1 << 14:
                self._known.clear()
            self._known[key] = self._cut(piece, first)
        return self._known[key]

    @cached_property
    def puts_space(self) -> bool:
        """Whether it puts a space before every text."""
        return self.text(self._tokenizer.encode("a", add_special_tokens=False)) == b" a"

    @cached_property
    def _anchors(self) -> Mapping[str, list[int]]:
        return {
            anchor: self._tokenizer.encode(anchor, add_special_tokens=False) if anchor else [] for anchor in ANCHORS
        }

    def _cut(self, piece: bytes, first: bool) -> list[int]:
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            # The end of a character may come with the next token; bytes elsewhere are no text at all.
            whole = piece[: error.start] if error.end == len(piece) else b""
            return [*(self.encode(whole, first=first) if whole else ()), *self._longest_first(piece[len(whole) :])]
        for anchor, before in self._anchors.items():
            found = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            ids = found[len(before) :]
            if found[: len(before)] == before and not self._differs(ids, piece, first and not anchor):
                return ids
        return self._longest_first(piece)

    def _differs(self, ids: Iterable[int], piece: bytes, first: bool) -> bool:
        text = self.text(ids)
        return text != piece and not (first and text == b" " + piece)

    def _longest_first(self, piece: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(piece):
            ends = range(min(len(piece), start + self._longest), start, -1)
            end = next((end for end in ends if piece[start:end] in self.ids), None)
            if end is not None:
                found.append(self.ids[piece[start:end]])
            start = end or start + 1
        return found


def _of_letters(token: str) -> bytes:
    """Of byte-level BPE; what is spelt by other letters is plain text."""
    found = bytes_of_letters(token)
    return token.encode() if found is None else found


def _of_piece(token: str) -> bytes:
    """Of SentencePiece."""
    byte = byte_of(token)
    return token.replace(SPACE, " ").encode(errors="replace") if byte is None else bytes([byte])
