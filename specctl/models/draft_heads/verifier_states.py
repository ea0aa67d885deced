"""The verifier's states given to a draft head: states that are still pending, and features computed from the others.

This module does not import torch: arrays are numpy's or torch's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specctl.models.passes.forward import joined_numbers
from specctl.models.passes.watching import States, joined_states

MOST = 512  # Places that may wait: states of several layers take more memory than what a head makes of them
ROOM = 64  # Places to make room for at first; the memory doubles when it is full
TAIL = 256  # Features that are stored of places already read, for rollbacks to a place before them


class PendingStates:
    """The verifier's states of the newest positions, held until the draft head drafts again.

    Rounds without drafting thus cost a head almost nothing, and all pending states are fused at once. Tensors are held
    by reference. Numpy arrays are copied into a reused buffer, because the verifier's next pass overwrites them.

    Attributes:
        count: the number of places that wait.
    """

    def __init__(self) -> None:
        self._parts: list[States] = []
        self._rows: dict[int, npt.NDArray[Any]] = {}  # of each layer, of those that came without `_parts`
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether the pending states should be read now, even if the head does not draft."""
        return self.count >= MOST

    def add(self, states: States, known: int) -> None:
        """Add the states of the next positions; the first ``known`` of them are pending already or have been read.

        Raises:
            ValueError: ``known`` is below 0: states of places before these are missing.
        """
        if known < 0:
            raise ValueError(f"the states of {-known} places before these were not given")
        first = next(iter(states.values()))
        count = len(first) - known
        if count <= 0:
            return
        start, self.count = self.count, self.count + count
        if self._parts or not isinstance(first, np.ndarray):
            self._add_part({layer: rows[known:] for layer, rows in states.items()}, start)
            return
        if not self._rows or self.count > len(next(iter(self._rows.values()))):
            self._make_room(states, start)
        for layer, rows in self._rows.items():
            rows[start : start + count] = states[layer][known:]

    def _add_part(self, states: States, start: int) -> None:
        if start and not self._parts:  # numpy's, and now a tensor
            self._parts.append({layer: rows[:start].copy() for layer, rows in self._rows.items()})
        self._parts.append({n: rows.copy() if isinstance(rows, np.ndarray) else rows for n, rows in states.items()})

    def _make_room(self, states: States, filled: int) -> None:
        places = max(ROOM, 2 * self.count)
        for layer, rows in states.items():
            room = np.empty((places, rows.shape[1]), dtype=rows.dtype)
            if filled:
                room[:filled] = self._rows[layer][:filled]
            self._rows[layer] = room

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` places."""
        while self._parts and self.count > count:
            last = self._parts.pop()
            held = len(next(iter(last.values())))
            self.count -= held
            if self.count < count:
                self._parts.append({layer: rows[: count - self.count] for layer, rows in last.items()})
                self.count = count
        self.count = min(self.count, count)

    def take(self) -> States | None:
        """Remove and return all pending states; None if there are none. Later calls reuse numpy arrays' memory."""
        count, self.count = self.count, 0
        if not count:
            return None
        if not self._parts:
            return {layer: rows[:count] for layer, rows in self._rows.items()}
        taken, self._parts = self._parts, []
        return taken[0] if len(taken) == 1 else joined_states(taken)


class HeadInputs:
    """The features with which a chain head reads each token: those of the previous position, if known.

    Features of positions before W are known, though the oldest may have been dropped. A later token is read with the
    features that the head itself output for the previous token.

    Args:
        blank: ``(1, F)``, the features of place -1, the start of the sequence: zeros, numpy's or torch's like all.
        fuse: computes features ``(T, F)`` from states, ``(T, D)`` for each of the head's layers.
        mask: ``(1, F)``, the features used for all tokens without known ones, in one pass; None if the head continues
            from its own output.

    Attributes:
        count: W, one more than the last position with known features.
        true: tokens that were read with features of the verifier's states, all at the start of the sequence.
    """

    def __init__(self, blank: Any, fuse: Callable[[States], Any], mask: Any = None) -> None:
        self._blank, self._fuse, self._mask = blank, fuse, mask
        self._pending = PendingStates()
        self._features = blank[:0]  # (N, F), of places W - N to W - 1
        self._own, self._own_after = blank, 0  # (1, F), and the number of tokens read when the head wrote it
        self.count = 0
        self.true = 0

    @property
    def observed(self) -> int:
        """One more than the last position with a given state."""
        return self.count + self._pending.count

    def observe_states(self, start: int, states: States) -> None:
        """See `Slot`."""
        self._pending.add(states, self.observed - start)
        if self._pending.full:
            self.take_pending()

    def take_pending(self) -> None:
        """Fuse the states that wait."""
        if (states := self._pending.take()) is not None:
            features = self._fuse(states)
            self._features = joined_numbers([self._features, features])
            self.count += len(features)

    def of(self, first: int, count: int) -> Any:  # (count, F)
        """The features of places from ``first`` on; zeros for place -1, the start of the sequence."""
        begin = self.count - len(self._features)
        found = self._features[max(first, 0) - begin : first + count - begin]
        return found if first >= 0 else joined_numbers([self._blank, found])

    def known(self, length: int) -> int:
        """The number of tokens after ``length`` that can be read with features of the verifier's states."""
        return self.count + 1 - length

    def next(self, length: int, count: int) -> Any:  # (count, F)
        """The features to read the next tokens with, after ``length`` tokens."""
        known = self.known(length)
        if self._mask is not None:
            found = [self.of(length - 1, min(known, count))] if known > 0 else []
            return joined_numbers([*found, *[self._mask] * (count - max(known, 0))])
        if known > 0:
            return self.of(length - 1, count)
        return self._own if self._own_after == length else joined_numbers([self._blank])

    def pieces(self, length: int, tokens: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Tokens in the passes that read them: those whose features are known, and each after them by itself."""
        done = 0
        if self._mask is not None and tokens:
            yield tokens
            return
        while done < len(tokens):
            some = tokens[done : done + max(1, self.known(length + done))]
            done += len(some)
            yield some

    def advance(self, length: int, count: int, own: Any) -> None:
        """Note that ``count`` tokens after ``length`` were read, and the features ``(1, F)`` written after the last."""
        if self.true == length <= self.count:
            self.true += min(count, self.known(length))
            begin = self.count - len(self._features)
            if length - begin > 2 * TAIL:  # drop most features of places that have been read
                self._features = joined_numbers([self._features[length - TAIL - begin :]])  # a copy
        self._own, self._own_after = own, length + count

    def rollback(self, length: int) -> int:
        """Roll back to tokens read with the verifier's features; returns the number of tokens that stay cached.

        If the features needed next have been dropped, no later position counts as known.

        Args:
            length: the number of tokens to roll back to.
        """
        self.true = min(self.true, length)
        known, needed = self.count, self.true - 1  # the place whose features are read next
        begin = self.count - len(self._features)
        left = min(length, self.count)
        if 0 <= needed < begin:
            left = min(left, needed)
        self._features = self._features[: max(left - begin, 0)]
        self.count = left
        self._pending.cut(max(0, length - known) if left == known else 0)
        return self.true
