"""Grammars for a text: a JSON schema, a regular expression or a Lark grammar restricts the next tokens.

llguidance evaluates them. It allows exactly the ids after which the text can still be completed. So at each position
the target's distribution is that of its logits over these ids.
"""

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence, Set
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread, get_native_id
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from specctl.errors import RecordError, pip_install
from specctl.models.files.tokenizer import Tokenizer, backend_of
from specctl.models.passes.forward import Numbers

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specctl.models.running.grammars.schema_fit import SchemaFit
    from specctl.profile.schema import SamplingTable

INVALID = "invalid_grammar"
FAILED = "grammar_failed"  # Error type for a failure in the middle of a text, after its grammar was compiled
UNFIT = "unfit_text"  # Error type for a finished text that does not fit its schema
KEPT = 64  # Number of cached grammars
KEPT_BYTES = 1 << 30  # Their largest total memory
SLOW_SECONDS = 0.1  # From this processor time on, a grammar runs at low priority, and waits for other slow ones
Source = tuple[str, str]  # The result of `source_of`
Allowed = npt.NDArray[np.bool_]


class GrammarRule:
    """A `TokenRule` for one text: a grammar restricts the tokens generated after the prompt.

    Args:
        matcher: at the start of the grammar.
        prompt: ids before the text that the grammar is about.
        vocabulary: V, the width of the logits.
        eos: ids that end the text.
    """

    def __init__(self, matcher: "LLMatcher", prompt: Sequence[int], vocabulary: int, eos: Set[int]) -> None:
        self.prompt = tuple(prompt)
        self._start, self._vocabulary, self._eos = matcher, vocabulary, eos
        self._matcher = matcher.deep_copy()
        self._written: list[int] = []  # tokens that the matcher has read
        self._known: list[Allowed] = []  # by the number of these tokens, as far as computed

    def fresh(self) -> "GrammarRule":
        """A copy for another runner, which reads other drafts at other times."""
        return GrammarRule(self._start, self.prompt, self._vocabulary, self._eos)

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        """The logits ``(R, V)`` that follow the last R tokens of a text, -inf for ids that may not follow.

        Rows after a forbidden token are unchanged: no caller samples from them.
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
        """The only token that may follow a text; None if there are several, or if this has not been computed yet."""
        allowed = self._allowed(text[len(self.prompt) :]) if len(text) >= len(self.prompt) else None
        if allowed is None or np.count_nonzero(allowed) != 1:
            return None
        return int(allowed.argmax())

    def _allowed(self, written: Sequence[int]) -> Allowed | None:
        """The ids that may follow, ``(V,)``; None after a forbidden token."""
        if not self._read(list(written)):
            return None
        count = len(written)
        if count == len(self._known):
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            found = np.zeros(self._vocabulary, bool)
            shared = min(len(bits), self._vocabulary)
            found[:shared] = bits[:shared]
            if self._matcher.is_error() or not found.any():
                self._fail("the grammar cannot go on")
            self._known.append(found)
        return self._known[count]

    def _read(self, written: list[int]) -> bool:
        """Bring the matcher to exactly these tokens; False if one of them is forbidden."""
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
                self._fail("the grammar cannot be followed")
            self._written.append(token)
        return True

    def _fail(self, what: str) -> NoReturn:
        why = " ".join(self._matcher.get_error().removesuffix(_NO_MORE).split()) or "no token may come next"
        raise RecordError(FAILED, f"{what} after {len(self._written)} tokens: {why}")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Compiled:
    """A compiled grammar, shared by texts."""

    matcher: "LLMatcher"  # at the start of the grammar
    fit: "SchemaFit | None"  # judges finished texts; None where the grammar enforces everything
    bytes: int  # approximate memory


class Grammars:
    """Grammars over the ids of one tokenizer.

    A grammar is first compiled in a process that can be killed, and then again here, since llguidance's compiled
    grammars cannot be sent between processes. A grammar that takes too much time or memory is rejected, and rejected at
    once when it is requested again.

    Args:
        tokenizer: of the texts.
        eos: ids that end a text, at least one.

    Raises:
        RecordError: a library is not installed, or llguidance does not support the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Set[int]) -> None:
        if not eos:
            raise RecordError(INVALID, "a grammar ends with the text, and this tokenizer has no token that ends one")
        try:
            import jsonschema  # noqa: F401
            import llguidance  # noqa: F401

            from specctl.models.running.grammars.grammar_text import library_tokens
            from specctl.models.running.grammars.trials import TrialProcess
        except ImportError as error:
            install = pip_install("llguidance", "jsonschema")
            what = f"JSON schemas and other grammars need llguidance and jsonschema: {install}"
            raise RecordError("no_grammars", what) from error
        self._eos = frozenset(eos)
        try:
            backend = backend_of(tokenizer)
            self._tokens = library_tokens(backend.form, eos, backend.encode)
        except Exception as error:  # the library raises nothing narrower
            raise RecordError("no_grammars", f"llguidance cannot read the target's tokenizer: {error}") from error
        self._trials = TrialProcess(backend.form, eos) if hasattr(os, "fork") else None
        self._lock, self._slow = Lock(), Lock()
        self._known: WeakValueDictionary[Source, Compiled] = WeakValueDictionary()  # by source, while texts use them
        self._kept: OrderedDict[Source, Compiled | RecordError] = (
            OrderedDict()
        )  # the latest ones, including rejected ones

    def rule(self, compiled: Compiled, prompt: Sequence[int], vocabulary: int) -> GrammarRule:
        """The rule of a grammar for the text after a prompt.

        Args:
            compiled: the grammar.
            prompt: ids, at least one.
            vocabulary: V, the pair's shared vocabulary.
        """
        return GrammarRule(compiled.matcher, prompt, vocabulary, self._eos)

    def compiled(self, source: Source) -> Compiled:
        """A grammar, after waiting for its compilation.

        Args:
            source: from `source_of`.

        Raises:
            RecordError: it cannot be compiled, or takes too long or too much memory.
        """
        future = self.compiling(source)
        try:
            found = future.result()
        except BaseException:
            future.cancel()  # an interrupt, or it has raised already
            raise
        assert found is not None
        return found

    def compiling(self, source: Source, *, here: bool = True) -> "Future[Compiled | None]":
        """Starts compiling a grammar, in a thread or in another process; cancelling the future stops it.

        Args:
            source: as `source_of` gives it.
            here: whether to compile it in this process too; otherwise only the trial is run.
        """
        found: Future[Compiled | None] = Future()
        known = self._kept_one(source)
        if isinstance(known, RecordError):
            found.set_exception(known)
        elif known is not None:
            found.set_result(known)
        else:
            inbox: SimpleQueue[Any] = SimpleQueue()
            found.add_done_callback(lambda one: inbox.put(_GONE) if one.cancelled() else None)
            Thread(target=self._compile, args=(source, found, inbox, here), name="grammar", daemon=True).start()
        return found

    def _kept_one(self, source: Source) -> Compiled | RecordError | None:
        with self._lock:
            found = self._known.get(source) or self._kept.get(source)
            if source in self._kept:
                self._kept.move_to_end(source)
        # An error raised in several places would collect all their tracebacks.
        return RecordError(found.kind, found.message) if isinstance(found, RecordError) else found

    def _keep(self, source: Source, found: Compiled | RecordError) -> None:
        with self._lock:
            self._kept[source] = found
            if isinstance(found, Compiled):
                self._known[source] = found
            while len(self._kept) > 1 and (len(self._kept) > KEPT or self._bytes() > KEPT_BYTES):
                self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(one.bytes for one in self._kept.values() if isinstance(one, Compiled))

    def _compile(
        self, source: Source, future: "Future[Compiled | None]", inbox: "SimpleQueue[Any]", here: bool
    ) -> None:
        with suppress(InvalidStateError):  # it may just have been cancelled
            try:
                answer = self._tried(source, inbox)
                future.set_result(self._made(source, answer) if here and answer is not None else None)
            except InvalidStateError:
                raise
            except Exception as error:
                future.set_exception(error)

    def _tried(self, source: Source, inbox: "SimpleQueue[Any]") -> dict[str, Any] | None:
        """The other process's answer about a grammar; None once no caller waits for it."""
        if self._trials is None:
            return _untried(source)
        for _ in range(TRIES):
            number = self._trials.ask(*source, inbox)
            answer = inbox.get()
            if answer is _GONE:
                self._trials.give_up(number)
                return None
            if answer is not None:
                break
        else:
            raise RecordError("worker_died", "the process that compiles grammars died over this one")
        if "error" in answer:
            refused = RecordError(INVALID, answer["error"])
            self._keep(source, refused)
            raise refused
        found: dict[str, Any] = answer
        return found

    def _made(self, source: Source, answer: dict[str, Any]) -> Compiled:
        from specctl.models.running.grammars.grammar_text import compiled
        from specctl.models.running.grammars.schema_fit import SchemaFit

        slow = answer["seconds"] > SLOW_SECONDS
        if slow and sys.platform == "linux":  # only on Linux do threads have their own priority; this thread ends below
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
        with self._slow if slow else nullcontext():
            found = self._kept_one(source)  # another thread may have compiled it
            if found is None:
                fit = None if answer["schema"] is None else SchemaFit(json.loads(answer["schema"]))
                try:
                    matcher = compiled(self._tokens, answer["grammar"])
                except ValueError as error:
                    raise RecordError(INVALID, f"{source[0]}: {error}") from error
                found = Compiled(matcher, fit, answer["bytes"])
                self._keep(source, found)
        assert isinstance(found, Compiled)
        return found


_NO_MORE = "<non-verbose/>"  # llguidance's placeholder for its state in errors


def _untried(source: Source) -> dict[str, Any]:
    """The answer of a trial, where trials are not available."""
    from specctl.models.running.grammars.grammar_text import grammar_text

    try:
        found = grammar_text(*source, checked=True)
    except (ValueError, RecursionError) as error:
        raise RecordError(INVALID, f"{source[0]}: {error}") from error
    return {"grammar": found.grammar, "schema": found.schema, "seconds": 0.0, "bytes": 0}


_GONE = object()  # No caller waits for the answer any more
TRIES = 2  # How often to try a grammar if its process dies
_MADE: "WeakKeyDictionary[Any, Grammars]" = WeakKeyDictionary()
_MAKING = Lock()


def source_of(settings: "SamplingTable") -> Source | None:
    """The kind and the text of a sampling table's grammar; None without one."""
    if settings.json_schema is not None:
        return "json_schema", json.dumps(settings.json_schema)
    if settings.regex is not None:
        return "regex", settings.regex
    return None if settings.grammar is None else ("grammar", settings.grammar)


def grammars_of(tokenizer: Tokenizer, eos: Set[int]) -> Grammars:
    """The `Grammars` of a tokenizer, created once; raises the same RecordErrors."""
    with _MAKING:
        found = _MADE.get(tokenizer)
        if found is None:
            found = _MADE[tokenizer] = Grammars(tokenizer, eos)
        return found
