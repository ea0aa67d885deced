"""How single tokens are told to clients."""

from collections.abc import Collection, Mapping, Set
from functools import cached_property

from specctl.decoding.text import UNFINISHED, silent_ids
from specctl.models.files.tokenizer import Tokenizer, byte_of, bytes_of_letters


class Spellings:
    """What single tokens spell behind others, kept for the next time.

    Args:
        tokenizer: the target's.
        ends: ids that end a text; like special ones they are no part of it.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Set[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._silent = silent_ids(tokenizer) | ends
        self._known: dict[tuple[int, bool], str] = {}

    def text_of(self, token: int, *, first: bool = False) -> str:
        """A token's text, with U+FFFD for what is no whole character.

        Args:
            token: its id.
            first: whether it begins a text, where SentencePiece drops its space.
        """
        key = token, first
        if key not in self._known:
            alone = self._decode([token])
            if not first and self._anchor is not None:
                before, both = self._decode([self._anchor]), self._decode([self._anchor, token])
                alone = both[len(before) :] if both.startswith(before) else alone
            self._known[key] = alone
        return self._known[key]

    def bytes_of(self, token: int, *, first: bool = False) -> bytes | None:
        """Its bytes in UTF-8, perhaps of a part of a character; None for one that is no part of a text."""
        if token in self._silent:
            return None
        text = self.text_of(token, first=first)
        if UNFINISHED in text:
            name = self._names.get(token, "")
            if (byte := byte_of(name)) is not None:
                return bytes([byte])
            if (found := bytes_of_letters(name)) is not None:
                return found
        return text.encode()

    def name_of(self, token: int, *, first: bool = False, marked: bool = False) -> str:
        """Its text; of one that is no whole characters each byte that is none, as OpenAI writes it.

        Args:
            token, first: as of `text_of`.
            marked: whether the latter begins with ``bytes:``, as in completions.
        """
        found = self.bytes_of(token, first=first)
        if found is None:
            return self.text_of(token, first=first)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" * marked + found.decode(errors="backslashreplace")

    def names_of(self, tokens: Collection[int], *, first: bool = False, marked: bool = False) -> Mapping[int, str]:
        """Names of several tokens, no two the same: where a name is an earlier one's, it is by the id."""
        found: dict[int, str] = {}
        taken: set[str] = set()
        for token in dict.fromkeys(tokens):
            name = self.name_of(token, first=first, marked=marked)
            found[token] = f"token_id:{token}" if name in taken else name
            taken.add(found[token])
        return found

    @cached_property
    def _anchor(self) -> int | None:
        """A token to stand before others, which are then not the first of a text."""
        found = self._tokenizer.encode("a", add_special_tokens=False)
        return found[-1] if found else None

    @cached_property
    def _names(self) -> Mapping[int, str]:
        return {token: name for name, token in self._tokenizer.get_vocab().items()}

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
