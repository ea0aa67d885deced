"""What an engine is to the rest: a model whose passes read one or more sequences."""

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

READERS = 1024  # Readers that are known to be equal to others; with more of them they are compared again


class Facts:
    """What a model and its engine can do. `Passes` and every `Slot` have these attributes."""

    context: int  # the most tokens that the cache of a sequence may hold
    device: "torch.device"  # of the logits
    runs_model: bool = True  # whether it runs one of `Pair.models`; a draft head or a draft without files does not
    verifies: bool = True  # whether it can read the tokens of a draft in one pass, and so verify another draft
    captures: bool = False  # whether its passes are captured, which no other thread may disturb
    # why trees cannot be read, as the end of a sentence; None if they can
    no_trees: str | None = "it reads tokens one after the other"
    # whether what follows a draft token depends on its place alone; then `extend_tree` returns one row
    marginals: bool = False
    # why `over` cannot be called, as the end of a sentence; None if it can
    no_rows: str | None = "it reads one text at a time"
    # whether each text gets passes of its own (`fresh`), because they cost little or cannot be shared
    multiplies: bool = False
    holds_everything: bool = False  # whether every layer keeps the whole sequence, and `masked_pass` can be called
    # of a draft head, the layers of its verifier whose states it reads; empty for everything else
    layers: tuple[int, ...] = ()
    state_size: int = 0  # of a draft head D, the width of these states
    longest: int | None = None  # the most tokens that it can draft in a round; None for any number
    index: "SuffixIndex | None" = None  # of a lookup, where it finds what to copy; None for a draft with logits
    # of a draft that writes some ids only, the ids of its logits' columns, which every `Forward` of it has too; None
    # where a column is an id
    draft_vocabulary: "DraftVocabulary | None" = None
    # of a draft with another tokenizer, what it drafts, in words; None for one with the target's
    translates: str | None = None
    whole_prompts: bool = False  # whether a prompt that is read in parts gives other logits
    fixed_width: int | None = None  # tokens of every pass whose logits are used; None for any number
    # whether it writes text that is cut into tokens of the target: its predictions are certain, and no distribution can
    # be drafted from
    writes_text: bool = False
    token_bytes: int = 0  # of its cache for each token; 0 where that is not known
    rows_bytes: int = 0  # of weights that passes over several sequences hold besides its own; 0 where they share them
    # of its passes on a CPU, where they have a number of their own; None where it is torch's
    threads: int | None = None
    # milliseconds of a small round by number of threads that was tried; empty if nothing was
    tried: Mapping[int, float] = MappingProxyType({})


class Request(NamedTuple):
    """What one sequence wants of a pass."""

    slot: int  # the sequence's number, from 0
    after: int  # how many of its cached tokens the new ones follow; later ones are overwritten
    # T ids, at least one; for a reader also a single one that is on the device, see `Slot.sample`
    tokens: Sequence[int]
    keep: int  # the number of last tokens whose logits are wanted
    hidden: bool = False  # whether their hidden states are wanted, too
    rotated_as: int = 0  # the length of text whose rotation the tokens have, see `Slot.rotate_as`; 0 for most models
    # computes the answer from the pass's logits, for example a sampled token; None where the answer is the pass itself.
    # Its pass has no hidden states.
    reader: "PassReader | None" = None
    about: Any = None  # what the reader needs of this text, such as the uniform number of a draw
    previous: "torch.Tensor | None" = None  # ``(S,)`` of the text's last token, for a reader that needs it, or None
    parents: Sequence[int] | None = None  # of a tree's tokens, see `Slot.extend_tree`; None for a chain
    before: int = 0  # of a tree, how many of its tokens are cached already

    @property
    def size(self) -> float:
        return len(self.tokens)


FACTS = tuple(Facts.__annotations__)  # The names of all `Facts`
SHARED = ("context", "device", "runs_model", "verifies", "threads", "draft_vocabulary", "no_trees")
"""What passes over several sequences have in common with those over one."""


class Passes(Facts, ABC):
    """A model over one or more sequences, each of its own length: the one thing that an engine implements.

    A sequence's place in it is a `Slot`, which all callers use. An engine that runs single sequences in another way
    than several, by a graph of their own for example, decides that in here.
    """

    slots: int = 1  # how many sequences, at least 1
    inner: "Slot | None" = None  # of a `Transform`, the slot that it changes; None for an engine
    _engine: str = ""
    # whether the caller wants `Forward.signals`, where a pass can compute them in less time
    wants_signals: bool = False

    @abstractmethod
    def forward(self, requests: Sequence[Request]) -> Sequence[Forward]:
        """One pass for requests of different sequences. No reader is called.

        What a sequence gets does not depend on the others, and the next pass may overwrite it. A pass can be repeated:
        it writes the same places.
        """

    def answer(self, request: Request) -> Any:
        """The answer to a lone request; the next pass may overwrite it.

        An engine that samples within its passes does so here, see `widest_sample`.
        """
        (found,) = self.forward((request,))
        if request.reader is None:
            return found
        (answer,) = request.reader.read_rows([found], [request.about])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, requests: Sequence[Request]) -> Sequence[Any]:
        """The answers to requests of different sequences, in memory of their own.

        Texts that sample or judge their tokens alike are read by one call of their reader. An exception is the answer
        of that text alone.
        """
        forwards = self.forward(requests)
        found: list[Any] = [*forwards]
        read: dict[int, tuple[PassReader, list[int]]] = {}
        for place, request in enumerate(requests):
            if request.reader is not None:
                reader = self._known(request.reader)
                read.setdefault(id(reader), (reader, []))[1].append(place)
            else:  # a prompt's pieces are put together after the last of them
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
        """The same model over several sequences, with caches of their own; `no_rows` says why it cannot be called.

        Args:
            slots: how many sequences, at least 2.
            width: tokens of every pass whose logits are used, so that they do not depend on other sequences' lengths;
                None for any.
        """
        raise NotImplementedError(self.no_rows)

    def like(self, one: "Passes | Slot") -> Self:
        """Take over what holds for several sequences as it does for one."""
        for name in SHARED:
            setattr(self, name, getattr(one, name))
        self._engine = one.engine
        return self

    def fresh(self) -> "Passes":
        """The same model with an empty cache, where it `multiplies`."""
        raise NotImplementedError

    def begin(self, prompt: int) -> None:
        """As of `Slot`."""

    @property
    def length(self) -> int:
        """Of a `Transform`, see `Slot`; an engine does not count."""
        return 0

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - most write over what they forget
        """Drop all but the first ``length`` tokens of a sequence, at most those cached; returns how many are left.

        It is fewer than asked where a cache cannot go back that far, see `Slot.rollback`.
        """
        return length

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        """Cache the first ``start`` tokens and then a path of the tree after them; returns how many are cached."""
        raise NotImplementedError(self.no_trees)

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        """Let a sequence hold what another one has cached of its tokens from ``start`` to ``stop``, and no more after.

        Both have the same tokens up to there.
        """
        raise NotImplementedError(self.no_rows)

    def watch(self, layers: Iterable[int]) -> None:
        """Give the states of these layers with every later pass, see `Slot.watch`."""
        for layer in layers:
            raise IndexError(f"{self.engine} has no layer {layer} that another could read")

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        """As of `Slot`, where it `holds_everything`."""
        raise NotImplementedError("it reads a sequence in its order")

    @property
    def engine(self) -> str:
        """Its name, for reports."""
        return self._engine

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time that it has spent on compiling, capturing or exporting; None if it does none of them."""
        return None

    @property
    def widest_sample(self) -> int:
        """The most tokens of a request with a reader that `answer` samples from within the pass; 0 for none."""
        return 0

    @property
    def judges(self) -> bool:
        """Whether `answer` judges the drafts of several texts at once."""
        return False

    @property
    def specialises(self) -> bool:
        """Whether every reader has a pass of its own compiled or captured, which takes long."""
        return False

    @property
    def runs_ahead(self) -> bool:
        """Whether starting a pass takes the host so little time that the next one may be started ahead.

        That is over the token that is on the device, before the numbers of the last pass are read.
        """
        return False

    @property
    def foresee(self) -> "Foresee | None":
        """What it predicts of tokens that are not drawn yet, after the last pass; `answer` gives its reader its own."""
        return None

    @property
    def observed(self) -> int:
        """Of a draft head W, the first W places of the sequence are those whose states it was given."""
        return 0

    def observe_states(self, start: int, states: "States") -> None:
        """As of `Slot`."""
        raise NotImplementedError("only a draft head reads states")

    @cached_property
    def _readers(self) -> "dict[int, tuple[PassReader, PassReader]]":
        """By `id`: a reader, and the first equal one."""
        return {}

    def _known(self, reader: "PassReader") -> "PassReader":
        """The first of the readers that are equal to one: texts have their own, and comparing them takes long."""
        known = self._readers.get(id(reader))  # which holds it, so that no other has its id
        if known is None:
            if len(self._readers) > READERS:
                self._readers.clear()
            equal = next((first for _, first in self._readers.values() if first == reader), reader)
            known = self._readers[id(reader)] = (reader, equal)
        return known[1]
