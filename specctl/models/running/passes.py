"""The interface of an engine: a model with passes over one or more sequences."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import kept_states

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.draft_vocabulary import DraftVocabulary
    from specctl.models.passes.forward import Foresee, PassReader
    from specctl.models.passes.watching import States
    from specctl.models.running.lookup import SuffixIndex
    from specctl.models.running.slot import Slot

READERS = 1024  # Number of readers with known equality; more than this, and they are compared again


class Facts:
    """The capabilities of a model on its engine. `Passes` and every `Slot` have these attributes."""

    context: int  # the most tokens in a sequence's cache
    device: "torch.device"  # the device of the logits
    # Whether it runs a model, which `Pair.models` may have; False for a draft head and for a draft without files.
    runs_model: bool = True
    verifies: bool = True  # whether it can read a draft's tokens in one pass, and so verify another draft
    captures: bool = False  # whether its passes are captured, which other threads must not disturb
    # why it cannot read trees, as the end of a sentence; None if it can
    no_trees: str | None = "it reads tokens one after the other"
    # whether the prediction after a draft token depends only on its position; then `extend_tree` returns one row
    marginals: bool = False
    # why `over` cannot be called, as the end of a sentence; None if it can
    no_rows: str | None = "it reads one text at a time"
    # whether each text gets its own passes (`fresh`), since they are cheap or cannot be shared
    multiplies: bool = False
    holds_everything: bool = False  # whether every layer stores the whole sequence, so that `masked_pass` can be called
    # for a draft head, the layers of its verifier with the states that it reads; empty otherwise
    layers: tuple[int, ...] = ()
    state_size: int = 0  # for a draft head D, the width of these states
    longest: int | None = None  # the most tokens that it can draft in a round; None for no limit
    index: "SuffixIndex | None" = None  # for a lookup, its index of the text; None for a draft with logits
    # for a draft that writes only some ids, the ids of its logits' columns, which each `Forward` has too; None where
    # columns are ids
    draft_vocabulary: "DraftVocabulary | None" = None
    # for a draft with another tokenizer, a description of the tokens it drafts; None for one with the target's
    translates: str | None = None
    whole_prompts: bool = False  # whether a prompt read in parts has different logits
    piece: int = 512  # the most prompt tokens of a pass that other texts wait for
    even: bool = False  # whether a prompt read in parts has the same logits bit for bit
    fixed_width: int | None = None  # the number of tokens of every pass with used logits; None for any number
    # whether it writes text that is then split into the target's tokens: its predictions are certain, and there is no
    # distribution to draw from
    writes_text: bool = False
    token_bytes: int = 0  # cache memory per token in bytes; 0 if unknown
    # number of threads of its passes on a CPU, if it sets its own; None for torch's
    threads: int | None = None
    # milliseconds of a small round by tried number of threads; empty without a trial
    tried: Mapping[int, float] = MappingProxyType({})


class Request(NamedTuple):
    """One sequence's part in a pass."""

    slot: int  # the sequence's number, from 0
    after: int  # the number of cached tokens before the new ones; later ones are overwritten
    # T ids, at least one; with a reader, possibly a single token on the device, see `Slot.sample`
    tokens: Sequence[int]
    keep: int  # the number of last tokens to compute logits for
    hidden: bool = False  # whether to return their hidden states too
    rotated_as: int = 0  # the text length that decides the tokens' rotation, see `Slot.rotate_as`; 0 for most models
    # computes the answer from the pass's logits, for example a sampled token; None if the pass itself is the answer.
    # With a reader the pass has no hidden states
    reader: "PassReader | None" = None
    about: Any = None  # the reader's input for this text, such as the uniform number of a draw
    # ``(S,)`` numbers of the text's last token, for a reader that needs them, or None.
    previous: "torch.Tensor | None" = None
    parents: Sequence[int] | None = None  # for a tree's tokens, see `Slot.extend_tree`; None for a chain
    before: int = 0  # for a tree, the number of its tokens already cached

    @property
    def size(self) -> float:
        return len(self.tokens)


FACTS = tuple(Facts.__annotations__)  # The names of all `Facts`
SHARED = ("context", "device", "runs_model", "verifies", "threads", "draft_vocabulary", "no_trees", "piece", "even")
"""Facts that passes over several sequences share with those over one."""


class Passes(Facts, ABC):
    """A model over one or more sequences of independent lengths: the only interface that an engine implements.

    Callers use a `Slot` for each sequence. An engine that runs a single sequence differently from several, for example
    with a separate graph, decides so here.
    """

    slots: int = 1  # the number of sequences, at least 1
    inner: "Slot | None" = None  # the slot that a `Transform` changes; None for an engine
    _engine: str = ""
    # whether the caller wants `Forward.signals`, if the pass can compute them faster
    wants_signals: bool = False

    @abstractmethod
    def forward(self, requests: Sequence[Request]) -> Sequence[Forward]:
        """One pass for requests of different sequences, without calling their readers.

        A sequence's result does not depend on the others, and the next pass may overwrite it. A pass can be repeated,
        since it writes the same slots.
        """

    def answer(self, request: Request) -> Any:
        """The answer to a single request; the next pass may overwrite it.

        Engines that sample within their passes do so here, see `widest_sample`.
        """
        (found,) = self.forward((request,))
        if request.reader is None:
            return found
        (answer,) = request.reader.read_rows([found], [request.about])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, requests: Sequence[Request]) -> Sequence[Any]:
        """The answers to requests of different sequences, in new memory.

        Texts with equal readers are read by one call. An exception is the answer of that text alone.
        """
        forwards = self.forward(requests)
        found: list[Any] = [*forwards]
        read: dict[int, tuple[PassReader, list[int]]] = {}
        for place, request in enumerate(requests):
            if request.reader is not None:
                reader = self._known(request.reader)
                read.setdefault(id(reader), (reader, []))[1].append(place)
            else:  # the pieces of a prompt are joined after the last one
                forward = forwards[place]
                if request.keep and isinstance(forward.columns, np.ndarray):
                    forward.columns = forward.columns.copy()
                forward.states = kept_states(forward.states)
        for reader, places in read.values():
            answers = reader.read_rows(
                [forwards[place] for place in places], [requests[place].about for place in places]
            )
            for place, answer in zip(places, answers, strict=True):
                found[place] = answer
        return found

    def over(self, slots: int, width: int | None = None) -> "Passes":
        """The same model over several sequences, with new caches; only where `no_rows` is None.

        Args:
            slots: the number of sequences, at least 2.
            width: the number of tokens of every pass with used logits, so that logits do not depend on other sequences'
                lengths; None for any number.
        """
        raise NotImplementedError(self.no_rows)

    def like(self, one: "Passes | Slot") -> Self:
        """Copy the facts that hold for several sequences as they do for one."""
        for name in SHARED:
            setattr(self, name, getattr(one, name))
        self._engine = one.engine
        return self

    def fresh(self) -> "Passes":
        """The same model with an empty cache, where it `multiplies`."""
        raise NotImplementedError

    def begin(self, prompt: int) -> None:
        """See `Slot.begin`."""

    @property
    def length(self) -> int:
        """The length of a `Transform`, see `Slot.length`; an engine does not count."""
        return 0

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - most write over what they forget
        """Drop all but the first ``length`` tokens of a sequence, at most those cached; returns how many remain.

        Fewer than ``length`` remain where a cache cannot go back exactly, see `Slot.rollback`.
        """
        return length

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        """Cache the first ``start`` tokens and then a path of the tree after them; returns the new length."""
        raise NotImplementedError(self.no_trees)

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        """Copy the cached tokens from ``start`` to ``stop`` to another sequence, which then ends there.

        Their texts agree up to ``stop``.
        """
        raise NotImplementedError(self.no_rows)

    def watch(self, layers: Iterable[int]) -> None:
        """Return the states of these layers with every later pass, see `Slot.watch`."""
        for layer in layers:
            raise IndexError(f"{self.engine} has no layer {layer} that another could read")

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        """See `Slot.masked_pass`; only where it `holds_everything`."""
        raise NotImplementedError("it reads a sequence in its order")

    @property
    def engine(self) -> str:
        """The engine's name for reports."""
        return self._engine

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time spent on compiling, capturing or exporting; None for an engine that does none of these."""
        return None

    @property
    def widest_sample(self) -> int:
        """The most tokens of a request that `answer` samples from within the pass; 0 for none."""
        return 0

    @property
    def judges(self) -> bool:
        """Whether `answer` judges the drafts of several texts at once."""
        return False

    @property
    def specialises(self) -> bool:
        """Whether every reader has its own compiled or captured pass, which takes long to prepare."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether the host can start a pass quickly enough to start the next one ahead.

        The next pass then reads its token on the device, before the host has the last pass's numbers.
        """
        return False

    @property
    def foresee(self) -> "Foresee | None":
        """Predicts the acceptance of undrawn tokens, after the last pass; `answer` passes its own to its reader."""
        return None

    @property
    def observed(self) -> int:
        """For a draft head W, the number of positions from the sequence's start with known verifier states."""
        return 0

    def observe_states(self, start: int, states: "States") -> None:
        """See `Slot.observe_states`."""
        raise NotImplementedError("only a draft head reads states")

    @cached_property
    def _readers(self) -> "dict[int, tuple[PassReader, PassReader]]":
        """By `id`: a reader and the first equal one."""
        return {}

    def _known(self, reader: "PassReader") -> "PassReader":
        """The first reader equal to this one. Texts have separate readers, and comparing them is slow."""
        known = self._readers.get(id(reader))  # the entry references the reader, so that no other reader gets its id
        if known is None:
            if len(self._readers) > READERS:
                self._readers.clear()
            equal = next((first for _, first in self._readers.values() if first == reader), reader)
            known = self._readers[id(reader)] = (reader, equal)
        return known[1]
