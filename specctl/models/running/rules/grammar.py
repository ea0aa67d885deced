"""Grammars about a text: a JSON schema, a regular expression or a Lark grammar says which tokens may come next.

llguidance reads them. Of a tokenizer's ids it allows those after which the text can still be finished, so that the
target's distribution is that of its logits over these ids, for each text before a token.
"""

import json
from collections.abc import Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from specctl.errors import RecordError, pip_install
from specctl.models.files.tokenizer import Tokenizer, backend_of
from specctl.models.passes.forward import Numbers

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specctl.profile.base_tables import SamplingTable

INVALID = "invalid_grammar"
COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as Python's json module does: where blanks are free, a model may write nothing else for ever."""
KEPT = 64
"""Grammars that are kept ready for texts to come."""
Allowed = npt.NDArray[np.bool_]


class GrammarRule:
    """A `TokenRule` for one text: what may follow is what a grammar lets follow what was written after the prompt.

    Args:
        matcher: at the grammar's beginning.
        prompt: ids before the text that the grammar is about.
        vocabulary: V, the width of the logits.
        eos: ids that end the text.
    """

    def __init__(self, matcher: "LLMatcher", prompt: Sequence[int], vocabulary: int, eos: Set[int]) -> None:
        self.prompt = tuple(prompt)
        self._start, self._vocabulary, self._eos = matcher, vocabulary, eos
        self._matcher = matcher.deep_copy()
        self._written: list[int] = []  # what the matcher has read
        self._known: list[Allowed] = []  # by the number of these tokens, as far as it was asked for

    def fresh(self) -> "GrammarRule":
        """The same for another runner, which reads other drafts at other times."""
        return GrammarRule(self._start, self.prompt, self._vocabulary, self._eos)

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        """The logits ``(R, V)`` that follow the last R tokens of a text, -inf for ids that may not follow.

        Those behind a token that may not be written are left as they are: nobody draws from them.
        """
        first = len(text) - len(rows) + 1 - len(self.prompt)
        written = text[len(self.prompt) :]
        allowed = [self._allowed(written[:count]) if count >= 0 else None for count in range(first, first + len(rows))]
        if all(row is None for row in allowed):
            return rows
        free = np.ones(self._vocabulary, bool)
        mask = np.stack([free if row is None else row for row in allowed])  # (R, V)
        if isinstance(rows, np.ndarray):
            return np.where(mask, rows, np.float32(-np.inf))
        import torch

        return rows.masked_fill(~torch.from_numpy(mask).to(rows.device), -torch.inf)

    def forced(self, text: Sequence[int]) -> int | None:
        """The one token that may follow a text; None where several may, or none was asked about yet."""
        allowed = self._allowed(text[len(self.prompt) :]) if len(text) >= len(self.prompt) else None
        if allowed is None or np.count_nonzero(allowed) != 1:
            return None
        return int(allowed.argmax())

    def _allowed(self, written: Sequence[int]) -> Allowed | None:
        """The ids that may follow, ``(V,)``; None behind a token that may not be written."""
        if not self._read(list(written)):
            return None
        count = len(written)
        if count == len(self._known):
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            found = np.zeros(self._vocabulary, bool)
            shared = min(len(bits), self._vocabulary)
            found[:shared] = bits[:shared]
            if self._matcher.is_error() or not found.any():
                raise RecordError(INVALID, f"the grammar cannot go on: {self._matcher.get_error() or 'no token may'}")
            self._known.append(found)
        return self._known[count]

    def _read(self, written: list[int]) -> bool:
        """Let the matcher have read these tokens and no others; False if it may not be written."""
        shared = len(self._written)
        if written[:shared] != self._written:
            pairs = zip(written, self._written, strict=False)
            shared = next((place for place, (new, old) in enumerate(pairs) if new != old), len(written))
            self._matcher.rollback(len(self._written) - shared)
            del self._written[shared:], self._known[shared + 1 :]
        for token in written[shared:]:
            allowed = self._allowed(self._written)
            if token in self._eos or token >= self._vocabulary or allowed is None or not allowed[token]:
                return False
            if not self._matcher.consume_token(token):
                raise RecordError(INVALID, f"the grammar cannot be followed: {self._matcher.get_error()}")
            self._written.append(token)
        return True


def _one_line(message: str) -> str:
    """Without the lines that only point at something above them."""
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^|"))


class Grammars:
    """Grammars over the ids of one tokenizer.

    Args:
        tokenizer: of the texts.
        eos: ids that end a text, at least one.

    Raises:
        RecordError: llguidance is not installed, or knows no such tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Set[int]) -> None:
        if not eos:
            raise RecordError(INVALID, "a grammar ends with the text, and this tokenizer has no token that ends one")
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise RecordError(
                "no_grammars", f"JSON schemas and other grammars need llguidance: {pip_install('llguidance')}"
            ) from error
        self._eos = frozenset(eos)
        try:
            self._tokens = LLTokenizer(backend_of(tokenizer), eos_token=sorted(eos))
        except Exception as error:  # the library raises nothing narrower
            raise RecordError("no_grammars", f"llguidance cannot read the target's tokenizer: {error}") from error
        self._new = LLMatcher
        self._compiled = lru_cache(KEPT)(self._compile)

    def rule(self, source: "tuple[str, str]", prompt: Sequence[int], vocabulary: int) -> GrammarRule:
        """The rule of a grammar about what follows a prompt.

        Args:
            source: as `source_of` gives it.
            prompt: ids, at least one.
            vocabulary: V, the pair's shared vocabulary.

        Raises:
            RecordError: llguidance cannot compile it.
        """
        return GrammarRule(self._compiled(source), prompt, vocabulary, self._eos)

    def _compile(self, source: tuple[str, str]) -> "LLMatcher":
        kind, text = source
        new = self._new
        try:
            if kind == "json_schema":
                grammar = new.grammar_from_json_schema(text, overrides=COMPACT)
            else:
                grammar = new.grammar_from_regex(text) if kind == "regex" else new.grammar_from_lark(text)
        except ValueError as error:
            raise RecordError(INVALID, f"{kind}: {error}") from error
        matcher: LLMatcher = new(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise RecordError(INVALID, f"{kind}: {_one_line(matcher.get_error())}")
        return matcher


_MADE: "WeakKeyDictionary[Any, Grammars]" = WeakKeyDictionary()


def source_of(settings: "SamplingTable") -> tuple[str, str] | None:
    """The kind of a sampling table's grammar and its text; None without one."""
    if settings.json_schema is not None:
        return "json_schema", json.dumps(settings.json_schema)
    if settings.regex is not None:
        return "regex", settings.regex
    return None if settings.grammar is None else ("grammar", settings.grammar)


def grammars_of(tokenizer: Tokenizer, eos: Set[int]) -> Grammars:
    """The `Grammars` of a tokenizer, made once; raises RecordError as they do."""
    found = _MADE.get(tokenizer)
    if found is None:
        found = _MADE[tokenizer] = Grammars(tokenizer, eos)
    return found
