"""Layers of KV caches over buffers at fixed addresses, of one sequence or of several."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from specctl.models.passes.tree_sight import gather_path


class Cursor:
    """Where the current pass writes in a cache of `FixedLayer` and how far it attends; one for all layers.

    Attributes:
        positions: ``(T,)`` int64, the slots of the pass's tokens.
        span: how many slots its tokens may attend to; those ahead of a token are masked.
    """

    positions: torch.Tensor
    span: int


class BufferLayer(CacheLayerMixin):
    """A full-attention layer over buffers ``(rows, heads, capacity, head_dim)``, written where a cursor points.

    Args:
        cursor: tells where.
        capacity: tokens of a row.
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
        """Move the first ``filled`` tokens of each row to other buffers, or none."""
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
        return 0  # who makes the passes counts; positions and masks come from it

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
    """Where the current pass writes in a cache of `RowLayer`, and how far it attends; one for all layers.

    Attributes:
        rows: ``(n,)`` int64, the rows of the cache that the pass's sequences have.
        whole: whether the k-th sequence writes to row k and looks at it, so that keys and values need no copy; only
            what pads the pass may write to another one.
        slots: ``(n, W)`` int64, where in its row each of their tokens is written.
        span: how many slots its tokens may attend to.
    """

    rows: torch.Tensor
    whole: bool
    slots: torch.Tensor
    span: int


class RowLayer(BufferLayer):  # type: ignore[no-untyped-call]
    """The layer of several sequences, with a `RowCursor`; the last slot of a row is where padding goes."""

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
        """Give a row the slots of another one from ``start`` to ``stop``."""
        for buffer in (self.keys, self.values):
            buffer[row, :, start:stop] = buffer[source, :, start:stop]
