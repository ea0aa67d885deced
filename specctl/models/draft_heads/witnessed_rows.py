"""The rows that a draft head reads: what it made of its verifier's states, for the newest places of a sequence."""

import torch

TAIL = 256
"""Rows that are kept of places already read, for rollbacks to a place before them."""


class WitnessedRows:
    """Rows of the places before W, of which the first may have been dropped.

    Args:
        width: H, the length of a row.
        device, dtype: of the rows.
    """

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(0, width, device=device, dtype=dtype)  # (N, H), of places W - N to W - 1
        self.count = 0
        """W, one more than the last place whose row is known."""

    def append(self, rows: torch.Tensor) -> None:
        """Add the rows ``(T, H)`` of the next places."""
        self._rows = torch.cat([self._rows, rows.to(self._rows)])
        self.count += len(rows)

    def of(self, first: int, count: int) -> torch.Tensor:  # (count, H)
        """The rows of places ``first`` and those after it; zeros for place -1, the start of the sequence."""
        begin = self.count - len(self._rows)
        rows = self._rows[max(first, 0) - begin : first + count - begin]
        return rows if first >= 0 else torch.cat([rows.new_zeros(1, rows.shape[1]), rows])

    def forget_read(self, place: int) -> None:
        """Drop most rows of places before ``place``, which have been read."""
        begin = self.count - len(self._rows)
        if place - begin > 2 * TAIL:
            self._rows = self._rows[place - TAIL - begin :].clone()

    def rollback(self, count: int, needed: int) -> None:
        """Know at most the first ``count`` places, and none behind one that is needed and no longer there.

        Args:
            count: places that stay.
            needed: the place whose row is read next.
        """
        begin = self.count - len(self._rows)
        kept = min(count, self.count)
        if 0 <= needed < begin:
            kept = min(kept, needed)
        self._rows = self._rows[: max(kept - begin, 0)]
        self.count = kept
