"""Token ids become text as they arrive."""

from bisect import bisect_left
from collections.abc import Sequence

from specctl.models.files.tokenizer import BareTokenizer, Tokenizer

UNFINISHED = "\ufffd"
CONTEXT = 8
"""Tokens of the prompt that are decoded along with what follows it."""
LONGEST_WINDOW = 32
"""Tokens up to which a stream keeps its window, whose text it knows, instead of decoding that of a shorter one."""


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that ``tokens`` add after ``prompt``.

    SentencePiece drops a space at the start of a text, so a few tokens of the prompt are decoded along.
    """
    context = list(prompt[-CONTEXT:])
    return _decode(tokenizer, [*context, *tokens])[len(_decode(tokenizer, context)) :]


class TextStream:
    """Decodes a growing sequence piece by piece, without decoding all of it each time.

    Bytes of a character that is not complete yet are held back. A short window of earlier tokens is decoded along
    with the new ones where what a token spells can depend on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._spell = tokenizer.spell if isinstance(tokenizer, BareTokenizer) and tokenizer.joins else None
        self._tokens: list[int] = list(prompt[-CONTEXT:])  # the window
        self._shown = len(self._tokens)
        self._text = _decode(tokenizer, self._tokens)  # of those shown

    def push(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` add."""
        if self._spell is not None and not self._tokens:
            text = "".join(map(self._spell, tokens))
            if UNFINISHED not in text:
                return text
        self._tokens.extend(tokens)
        before, now = self._text, _decode(self._tokenizer, self._tokens)
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._text = now
        if self._spell is not None:
            self._tokens, self._text = [], ""
        elif len(self._tokens) > LONGEST_WINDOW:
            del self._tokens[: self._shown]
            self._text = _decode(self._tokenizer, self._tokens)
        self._shown = len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """The text held back, even if its last character is incomplete."""
        before, now = self._text, _decode(self._tokenizer, self._tokens)
        self._tokens, self._shown, self._text = [], 0, ""
        return now[len(before) :]


def shown_length(text: str, shown: int, stops: Sequence[str]) -> int:
    """How much of a growing text may be shown: no stop string, and nothing that may turn out to begin one.

    Args:
        text: so far.
        shown: characters that were shown already.
        stops: the stop strings.
    """
    if not stops:
        return max(shown, len(text))
    if any(stop in text for stop in stops):
        return shown
    return max(shown, len(text) - max(len(stop) - 1 for stop in stops))


def find_stop(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int], stops: Sequence[str]
) -> tuple[int, str] | None:
    """The fewest tokens whose text contains a stop string, and their text before it; None if there is none.

    Counting the fewest makes the result independent of how many tokens a round added.
    """

    def text_of(count: int) -> str:
        return decode_after(tokenizer, prompt, tokens[:count])

    def contains_stop(count: int) -> bool:
        text = text_of(count)
        return any(stop in text for stop in stops)

    if not contains_stop(len(tokens)):
        return None
    count = bisect_left(range(len(tokens)), True, lo=1, key=contains_stop)
    text = text_of(count)
    return count, text[: min(start for stop in stops if (start := text.find(stop)) >= 0)]


def special_ids(tokenizer: Tokenizer, stops: Sequence[str]) -> set[int]:
    """Ids of the special tokens among stop strings, which decoded text leaves out."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {special[stop] for stop in stops if stop in special}


def _decode(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
