"""Token ids become text as they arrive."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeGuard
from weakref import WeakKeyDictionary

from specctl.models.files.tokenizer import LightTokenizer, Tokenizer, byte_ids

UNFINISHED = "\ufffd"
CONTEXT = 8  # Tokens of the prompt that are decoded together with the text after it
LONGEST_WINDOW = 32
"""A stream keeps its window, with its text known, up to this many tokens; only then is a shorter one decoded."""
NO_ENDS: frozenset[int] = frozenset()


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], ends: Set[int] = NO_ENDS) -> str:
    """The text that ``tokens`` add after ``prompt``.

    SentencePiece drops a space at the start of a text, so a few tokens of the prompt are decoded too. Where they end
    inside a character, that character counts as part of the new text.

    Args:
        tokenizer: of the ids.
        prompt: ids.
        tokens: ids.
        ends: ids that end a text and add no characters, even where the tokenizer spells them as text.
    """
    context = _context(tokenizer, prompt)
    before, now = _decode(tokenizer, context), _decode(tokenizer, [*context, *_written(tokens, ends)])
    return now[_shared(before, now) :]


class TextStream:
    """Decodes a growing sequence piece by piece, without decoding all of it each time.

    Bytes of an incomplete character are held back. Where a token's text can depend on its neighbours, a short window of
    earlier tokens is decoded with the new ones.

    Args:
        tokenizer, prompt, ends: see `decode_after`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), ends: Set[int] = NO_ENDS) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._spell = tokenizer.spell if _joins(tokenizer) else None
        self._tokens = _context(tokenizer, prompt)  # the window of earlier tokens
        self._shown = len(self._tokens)
        self._text = _decode(tokenizer, self._tokens)  # the window's text that was shown or belongs to the prompt

    def push(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` add."""
        tokens = _written(tokens, self._ends)
        if self._spell is not None and not self._tokens:
            text = "".join(map(self._spell, tokens))
            if UNFINISHED not in text:
                return text
        self._tokens.extend(_visible(self._tokenizer, tokens))
        now = _decode(self._tokenizer, self._tokens)
        start, end = _shared(self._text, now), len(now.rstrip(UNFINISHED))
        if end <= start:
            return ""
        self._text = now[:end]
        if end == len(now):
            if self._spell is not None:
                self._tokens, self._text = [], ""
            elif len(self._tokens) > LONGEST_WINDOW:
                del self._tokens[: self._shown]
                self._text = _decode(self._tokenizer, self._tokens)
            self._shown = len(self._tokens)
        return now[start:end]

    def flush(self) -> str:
        """The text still held back, even if its last character is incomplete."""
        before, now = self._text, _decode(self._tokenizer, self._tokens)
        self._tokens, self._shown, self._text = [], 0, ""
        return now[_shared(before, now) :]


def shown_length(text: str, shown: int, stops: Sequence[str]) -> int:
    """How much of a growing text may be shown: nothing from a stop string, or from what may become the start of one.

    Args:
        text: the text so far.
        shown: the number of characters already shown.
        stops: the stop strings.
    """
    if not stops:
        return max(shown, len(text))
    if any(stop in text for stop in stops):
        return shown
    return max(shown, len(text) - max(len(stop) - 1 for stop in stops))


def find_stop(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Sequence[int],
    stops: Sequence[str],
    ends: Set[int] = NO_ENDS,
) -> tuple[int, str] | None:
    """The smallest number of tokens with a stop string in their text, and the text before it; None without one.

    Taking the smallest number makes the result independent of how many tokens a round added. The other arguments are
    those of `decode_after`.
    """

    def text_of(count: int) -> str:
        return decode_after(tokenizer, prompt, tokens[:count], ends)

    def contains_stop(count: int) -> bool:
        text = text_of(count)
        return any(stop in text for stop in stops)

    if not contains_stop(len(tokens)):
        return None
    count = bisect_left(range(len(tokens)), True, lo=1, key=contains_stop)
    text = text_of(count)
    return count, text[: min(start for stop in stops if (start := text.find(stop)) >= 0)]


def silent_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of special tokens that decoded text omits."""
    return _known(tokenizer).silent


def special_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> set[int]:
    """Ids of the special tokens among stop strings, which decoded text omits."""
    if not stops:
        return set()
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {special[stop] for stop in stops if stop in special}


@dataclass(slots=True)
class _Known:
    """Cached facts about a tokenizer with tokens that are not concatenated bytes."""

    silent: frozenset[int]  # special ids, which have no text
    # the byte of each id that stands for one; None until first needed
    bytes: Mapping[int, int] | None = field(default=None)


_KNOWN: "WeakKeyDictionary[Tokenizer, _Known]" = WeakKeyDictionary()


def _known(tokenizer: Tokenizer) -> _Known:
    if tokenizer not in _KNOWN:
        added = [token for token, told in tokenizer.added_tokens_decoder.items() if told.special]
        marks = {*tokenizer.all_special_ids, *added}
        _KNOWN[tokenizer] = _Known(frozenset(token for token in marks if not _plain(tokenizer, [token])))
    return _KNOWN[tokenizer]


def _joins(tokenizer: Tokenizer) -> TypeGuard[LightTokenizer]:
    return isinstance(tokenizer, LightTokenizer) and tokenizer.joins


def _written(tokens: Sequence[int], ends: Set[int]) -> list[int]:
    return [token for token in tokens if token not in ends]


def _visible(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[int]:
    """The tokens that have text. After special tokens alone, a word would lose its space as at the start of a text."""
    if _joins(tokenizer):
        return list(tokens)
    silent = silent_ids(tokenizer)
    return [token for token in tokens if token not in silent]


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt that have text."""
    for count in (CONTEXT, len(prompt)):
        if len(found := _visible(tokenizer, prompt[-count:] if count else ())) >= CONTEXT or count >= len(prompt):
            return found[-CONTEXT:]
    return []


def _shared(one: str, other: str) -> int:
    """The length of two texts' common prefix."""
    if other.startswith(one):
        return len(one)
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    text = _plain(tokenizer, tokens)
    if UNFINISHED in text and not _joins(tokenizer) and (repaired := _repaired(tokenizer, tokens)) != tokens:
        return _plain(tokenizer, repaired)
    return text


def _plain(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _repaired(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Tokens with those of U+FFFD instead of each byte that belongs to no complete character.

    The library decodes a run of bytes as a whole, and a single stray byte loses all its characters.
    """
    known = _known(tokenizer)
    if known.bytes is None:
        known.bytes = byte_ids(tokenizer)
    if not known.bytes:
        return tokens
    spelled = {byte: token for token, byte in known.bytes.items()}
    found: list[int] = []
    run = bytearray()
    for token in [*_visible(tokenizer, tokens), None]:
        if token is not None and token in known.bytes:
            run.append(known.bytes[token])
            continue
        while run:
            try:
                run.decode()
                whole, broken = len(run), 0
            except UnicodeDecodeError as error:
                whole, broken = error.start, error.end - error.start
            found += [spelled[byte] for byte in run[:whole]]
            found += [spelled[byte] for byte in UNFINISHED.encode()] * broken
            del run[: whole + broken]
        if token is not None:
            found.append(token)
    return found
