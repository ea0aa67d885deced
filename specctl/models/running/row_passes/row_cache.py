"""Layers of a KV cache with a row for each of several sequences, at fixed addresses."""

from typing import Any

import torch

from specctl.models.passes.cache import BufferLayer


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
        return self.keys[:, :, :span].index_select(0, rows), self.values[:, :, :span].index_select(0, rows)

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        """Give a row the slots of another one from ``start`` to ``stop``."""
        for buffer in (self.keys, self.values):
            buffer[row, :, start:stop] = buffer[source, :, start:stop]
