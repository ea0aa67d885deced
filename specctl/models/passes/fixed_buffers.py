"""KV caches at fixed addresses, and passes over them that can be compiled and captured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from specctl.models.passes.compilation import Compiler
from specctl.models.passes.forward import Token, TokenReader
from specctl.models.passes.masks import aligned, placed_in_tree, tree_rows
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.tree_sight import WIDEST, TreeSight, gather_path


class Cursor:
    """Where the current pass writes in a cache of `FixedLayer`, and how far it attends; shared by all layers."""

    positions: torch.Tensor  # ``(T,)`` int64, the slots of the pass's tokens
    span: int  # the number of slots its tokens may attend to; those after a token are masked


class BufferLayer(CacheLayerMixin):
    """A full-attention layer over buffers ``(rows, heads, capacity, head_dim)``, written where a cursor points.

    Args:
        cursor: the position to write at.
        capacity: slots per row.
        rows: one for each sequence.
    """

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cursor: Any, capacity: int, rows: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cursor, self._capacity, self._rows = cursor, capacity, rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states, self._capacity), self._buffer(value_states, self._capacity)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor, capacity: int) -> torch.Tensor:
        # Zeros: masked slots are still multiplied by 0, and uninitialised memory may hold NaN.
        return states.new_zeros(self._rows, states.shape[1], capacity, states.shape[3])

    def grow(self, capacity: int, filled: int) -> None:
        """Allocate new buffers and move the first ``filled`` tokens of each row, or none."""
        if capacity == self._capacity:
            return
        if self.is_initialized:
            old = self.keys, self.values
            grown = self._buffer(self.keys, capacity), self._buffer(self.values, capacity)
            for new, had in zip(grown, old, strict=True):
                new[:, :, :filled] = had[:, :, :filled]
            self.keys, self.values = grown
        self._capacity = capacity

    def get_seq_length(self) -> int:
        return 0  # the caller that makes the passes counts; it also makes positions and masks

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the layer's signature
        return self._cursor.span, 0

    def get_max_length(self) -> int:
        return self._capacity


class FixedLayer(BufferLayer):  # type: ignore[no-untyped-call]
    """The layer of one sequence, with a `Cursor`."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the layer's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``(1, heads, T, head_dim)`` states where the cursor points; returns the slots to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._cursor.positions, key_states)
        self.values.index_copy_(2, self._cursor.positions, value_states)
        return self.keys[:, :, : self._cursor.span], self.values[:, :, : self._cursor.span]

    def move(self, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the buffers."""
        gather_path((self.keys, self.values), start, path)


class RowCursor:
    """Where the current pass writes in a cache of `RowLayer`, and how far it attends; shared by all layers."""

    rows: torch.Tensor  # ``(n,)`` int64, the cache rows of the pass's sequences
    # whether the k-th sequence reads and writes row k, so that keys and values need no copy; only padding may write to
    # another row
    whole: bool
    slots: torch.Tensor  # ``(n, W)`` int64, the slot of each token in its row
    span: int  # the number of slots its tokens may attend to


class RowLayer(BufferLayer):  # type: ignore[no-untyped-call]
    """The layer of several sequences, with a `RowCursor`; padding goes to the last slot of a row."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the layer's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``(n, heads, W, head_dim)`` states where the cursor points; returns the slots to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots, span = self._cursor.rows, self._cursor.slots, self._cursor.span
        places = rows[:, None], slots
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.transpose(1, 2).index_put_(places, states.transpose(1, 2))
        if self._cursor.whole:
            return self.keys[: len(rows), :, :span], self.values[: len(rows), :, :span]
        return self.keys[:, :, :span].index_select(0, rows), self.values[:, :, :span].index_select(0, rows)

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        """Copy a row's slots from ``start`` to ``stop`` to another row."""
        for buffer in (self.keys, self.values):
            buffer[row, :, start:stop] = buffer[source, :, start:stop]

    def move(self, row: int, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the slots of a row."""
        gather_path((self.keys[row : row + 1], self.values[row : row + 1]), start, path)


SPARE = 256
STEP = 64  # Buffer sizes are multiples of this number of slots
SHORTEST = 256  # Spans are powers of two from here on, since a graph attends to a fixed number of slots
PIECE = 512  # Prompt tokens that go through the model at once


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes need different compiled code."""

    width: int  # tokens in the pass; 0 for any number above 1, since one compiled pass covers all of these
    hidden: bool = False  # whether hidden states are wanted
    reader: TokenReader | None = None  # reads one token's pass within it; None for a pass that returns logits
    rows: int = 0  # the number of its further arguments, from the first, with a row for each token
    tree: bool = False  # whether the first of these is the tree's mask


class FixedBuffers(ABC):
    """Preallocated buffers: a step writes in place, a rollback moves a counter, and addresses stay the same.

    Addresses change only when a sequence outgrows the buffers.

    Args:
        layers: the number of layers with keys and values.
        vocabulary: V, the length of a row of logits.
        context: the most tokens of a sequence.
        device: of the network.
        capacity: initial capacity in tokens.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    length = 0
    _slack = 0  # slots that a pass may write after a sequence's end

    def __init__(
        self,
        layers: int,
        vocabulary: int,
        context: int,
        device: torch.device,
        *,
        capacity: int = SPARE,
        compiler: Compiler | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.device = device
        self._compiler = compiler
        self._compiled: dict[PassKind, Callable[..., Any]] = {}
        self._cursor = Cursor()
        self._capacity = self._room_for(min(capacity, context))
        # One slot more than any pass attends to: a pass over the whole buffer would be compiled separately.
        self._layers = [FixedLayer(self._cursor, self._capacity + 1) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._slots = self._numbered(self._capacity)

    @property
    def engine(self) -> str:
        return "static" if self._compiler is None else "static, compiled"

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time spent on compiling so far; None if passes are not compiled."""
        return None if self._compiler is None else self._compiler.seconds

    @property
    def widest_sample(self) -> int:
        """The most tokens that are sampled within their pass: more than one would need another compiled pass."""
        return 1

    @property
    def specialises(self) -> bool:
        """Whether every reader has its own compiled or captured pass."""
        return self.preparing_seconds is not None

    @abstractmethod
    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """A function of ids ``(1, T)``, positions ``(T,)``, slots ``(S,)`` from 0 on, and further arguments.

        Repeating it has no further effect, since it writes the same entries again. It returns three results: tensors, a
        dictionary of tensors, or None. Without a reader the first is the logits of the last ``keep`` tokens, or of all
        tokens for 0, and the second their hidden states. With a reader, these two are the reader's results.
        """

    def _run(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | float | None) -> Any:
        """One short pass, compiled if there is a compiler and an earlier pass has allocated the buffers.

        A token on the device is the pass's only token. ``given`` has the tokens' rows, if the pass reads any, then a
        reader's uniform and previous numbers, if there is a reader.
        """
        return self._run_once(kind, tokens, *given)

    def _run_once(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | float | None) -> Any:
        """`_run` for a pass that is not worth preparing, such as a prompt's."""
        ids = _ids(tokens, self.device)
        end = self.length + len(tokens)
        there = [self._filled(value) if isinstance(value, float) else value for value in given]
        # A copy, since a view from offset 0 would be compiled separately.
        positions = self._slots[self.length : end].clone()
        return self._best(kind, ids, positions, self._slots[: aligned(end)], *there)

    def _best(
        self,
        kind: PassKind,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *more: torch.Tensor | None,
    ) -> Any:
        given = (ids, positions, slots, *more)
        kind = replace(kind, width=1 if kind.width == 1 else 0)
        # A size of 1 would be compiled separately, which is not worth it for a sequence's first token.
        if self._compiler is None or not self._layers[0].is_initialized or len(slots) == 1:
            return self._pass(kind)(*given)
        step = self._compiled.get(kind)
        if step is None:
            buffers = [buffer for layer in self._layers for buffer in (layer.keys, layer.values)]
            rows = more[: kind.rows]
            single = kind.width == 1
            step = self._compiled[kind] = self._compiler.compiled(self._pass(kind), given, buffers, single, rows)
        return step(*given)

    def _filled(self, number: float) -> torch.Tensor:
        """A host number as ``()`` float64 on the device, without a copy that would wait."""
        return torch.full((), number, dtype=torch.float64, device=self.device)

    def _pieces(self, count: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """For each piece of ``count`` prompt tokens: the tokens, their positions, and the slots that their pass attends
        to.
        """
        for start in range(0, count, PIECE):
            end = min(start + PIECE, count)
            yield (
                slice(start, end),
                self._slots[self.length + start : self.length + end],
                self._slots[: aligned(self.length + end)],
            )

    def _holds(self, tokens: int) -> bool:
        """Whether the buffers can hold this many tokens."""
        return tokens + self._slack <= self._capacity

    def _room_for(self, tokens: int) -> int:
        """The number of slots for this many tokens, rounded so that the strides between buffer rows take few values."""
        return -(-(tokens + self._slack) // STEP) * STEP

    def _reserve(self, tokens: int) -> None:
        """Grow the buffers to hold this many tokens.

        Raises:
            torch.OutOfMemoryError: the cache is lost; the next pass allocates all buffers again.
        """
        if self._holds(tokens):
            return
        capacity = self._room_for(max(tokens, min(tokens + max(SPARE, tokens // 2), self.context)))
        self._capacity = 0  # until every layer has grown
        for layer in self._layers:
            layer.grow(capacity + 1, self.length)
        self._slots = self._numbered(capacity)
        self._capacity = capacity

    def _numbered(self, count: int) -> torch.Tensor:  # (count,)
        # Inference tensors differ from the first, normal ones, and passes would be compiled again for them.
        with torch.inference_mode(False):
            return torch.arange(count, device=self.device)


def span_class(slots: int) -> int:
    return max(SHORTEST, 1 << (slots - 1).bit_length())


def width_of(tokens: Sequence[Token]) -> int:
    """The width of a `PassKind` for these tokens, at most `WIDEST`."""
    assert len(tokens) <= WIDEST
    return 1 if len(tokens) == 1 else 0


def _ids(tokens: Sequence[Token], device: torch.device) -> torch.Tensor:  # (1, T)
    first = tokens[0]
    return (
        first.long().view(1, 1)
        if isinstance(first, torch.Tensor)
        else sent([int(token) for token in tokens], device)[None]
    )


Found = tuple[torch.Tensor, torch.Tensor | None, Any]
"""Logits ``(R, V)`` of a pass, the hidden states of the same tokens if they are wanted, and what else it gives."""


class FixedBufferNetwork(FixedBuffers):
    """A `Slot` over preallocated buffers; subclasses provide the network.

    Args:
        layers, vocabulary, context, device, capacity, compiler: as for `FixedBuffers`.
    """

    no_trees: str | None = None

    @cached_property
    def _sight(self) -> TreeSight:
        return TreeSight()

    @abstractmethod
    def _network(
        self,
        kind: PassKind,
        keep: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        slots: torch.Tensor,
        written: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Found:
        """Run the network, with the buffers as its cache.

        Args:
            kind, keep: see `_pass`.
            ids: ``(1, T)``.
            positions: ``(T,)``, the tokens' positions in their text.
            mask: ``(T, S)`` boolean, the slots that each token sees.
            slots: ``(S,)``, from 0 on.
            written: ``(T,)``, the slots that the pass writes to.
            rows: ``(T, H)`` of `_next_rows`.
        """

    def _next_rows(self, count: int) -> torch.Tensor | None:  # noqa: ARG002 - a model reads its tokens and nothing else
        """The network's further input for the next tokens ``(count, H)``; None for a network that reads only tokens."""
        return None

    def _advance(self, count: int, further: Any) -> None:  # noqa: ARG002 - for those that keep it
        """Count tokens as read; ``further`` is the network's further output for them."""
        self.length += count

    def _read(self, tokens: Sequence[int], keep: int, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Read tokens that fit into the buffers.

        Returns:
            Logits, and hidden states if wanted, of at least the last ``keep`` tokens, and the network's further output
                for each piece.
        """
        rows = self._next_rows(len(tokens))
        kind = PassKind(width_of(tokens) if len(tokens) <= WIDEST else 0, hidden, rows=int(rows is not None))
        if len(tokens) <= WIDEST:
            run = self._run if keep and self.length else self._run_once  # prompts have too many widths to capture
            logits, last, further = run(kind, tokens, *([] if rows is None else [rows]))
            self._advance(len(tokens), further)
            return logits, last, [further]
        # A prompt runs uncompiled, in pieces that keep its masks small.
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        more = []
        for piece, positions, slots in self._pieces(len(tokens)):
            ids = sent(tokens[piece], self.device)[None]
            after = len(tokens) - piece.stop
            wanted = max(1, min(keep - after, ids.shape[1]))
            step = self._pass(kind, keep=wanted)
            logits, last, further = step(ids, positions, slots, None if rows is None else rows[piece])
            more.append(further)
            if keep > after or not after:
                found.append((logits, last))
        self._advance(len(tokens), more[-1])
        states = torch.cat([last for _, last in found if last is not None]) if hidden else None
        return torch.cat([logits for logits, _ in found]), states, more

    def _read_tree(
        self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool, *rows: torch.Tensor
    ) -> Found:
        """A pass of `extend_tree` that fits into the buffers; for ``rows`` see `_network`."""
        sight = sent(tree_rows(self._sight.grown(parents, before)), self.device)
        found: Found = self._run(PassKind(0, hidden, rows=1 + len(rows), tree=True), tokens, sight, *rows)
        self.length += len(tokens)
        return found

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """As in `FixedBuffers`; the third result is the network's further output."""

        def masked(
            ids: torch.Tensor,
            written: torch.Tensor,
            slots: torch.Tensor,
            positions: torch.Tensor,
            mask: torch.Tensor,
            rows: torch.Tensor | None,
        ) -> Found:
            self._cursor.positions, self._cursor.span = written, slots.shape[0]
            # Padding may have positions beyond the range of learned position embeddings.
            known = positions.clamp_max(self.context - 1) if self._slack else positions
            return self._network(kind, keep, ids, known, mask, slots, written, rows)

        def logits_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor | None = None
        ) -> Found:
            return masked(ids, positions, slots, positions, slots <= positions[:, None], rows)

        def tree_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            sight: torch.Tensor,
            rows: torch.Tensor | None = None,
        ) -> Found:
            """``sight`` of `tree_rows`."""
            return masked(ids, positions, slots, *placed_in_tree(positions, slots, sight), rows)

        reader = kind.reader
        if reader is None:
            return tree_of if kind.tree else logits_of

        def reading_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            rows: torch.Tensor | None,
            uniform: torch.Tensor | None,
            previous: torch.Tensor | None,
        ) -> Found:
            logits, hidden, further = logits_of(ids, positions, slots, rows)
            values, probs = reader(logits[-1], uniform, None if hidden is None else hidden[-1], previous)
            return values, probs, further

        return reading_of
