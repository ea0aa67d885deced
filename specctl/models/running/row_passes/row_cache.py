"""Layers of a KV cache with a row for each of several sequences, at fixed addresses."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class RowCursor:
    """Where the current pass writes in a cache of `RowLayer`, and how far it attends; one for all layers.

    Attributes:
        rows: ``(n,)`` int64, the rows of the cache that the pass's sequences have.
        slots: ``(n, W)`` int64, where in its row each of their tokens is written.
        span: how many slots its tokens may attend to.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    span: int


class RowLayer(CacheLayerMixin):
    """A full-attention layer that writes in place, where a cursor points: ``(rows, heads, capacity, head_dim)``."""

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cursor: RowCursor, rows: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cursor, self._rows, self._capacity = cursor, rows, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states, self._capacity), self._buffer(value_states, self._capacity)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor, capacity: int) -> torch.Tensor:
        # Zeros: masked slots are still multiplied by 0, and uninitialised memory may hold NaN.
        return states.new_zeros(self._rows, states.shape[1], capacity, states.shape[3])

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
        return self.keys[:, :, :span].index_select(0, rows), self.values[:, :, :span].index_select(0, rows)

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        """Give a row the slots of another one from ``start`` to ``stop``."""
        for buffer in (self.keys, self.values):
            buffer[row, :, start:stop] = buffer[source, :, start:stop]

    def grow(self, capacity: int) -> None:
        """Move all rows to larger buffers, or none; the last slot of a row is where padding goes, and stays behind."""
        if capacity <= self._capacity:
            return
        if self.is_initialized:
            old = self.keys, self.values
            grown = self._buffer(self.keys, capacity), self._buffer(self.values, capacity)
            for new, had in zip(grown, old, strict=True):
                new[:, :, : self._capacity - 1] = had[:, :, :-1]
            self.keys, self.values = grown
        self._capacity = capacity

    def get_seq_length(self) -> int:
        return 0  # who makes the passes counts; positions and masks come from it

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the layer's signature
        return self._cursor.span, 0

    def get_max_length(self) -> int:
        return self._capacity
