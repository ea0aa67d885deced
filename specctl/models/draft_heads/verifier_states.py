"""The rows that a chain head reads: what it made of its verifier's states, and what it wrote itself. No torch here."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specctl.models.passes.forward import joined_numbers
from specctl.models.passes.watching import States, joined_states

MOST = 512
"""Places that may wait: states of several layers take more memory than what a head makes of them."""
ROOM = 64
"""Places to make room for at first; the memory doubles when it is full."""


class PendingStates:
    """The verifier's states of the newest places, as they came, until the draft head drafts again.

    Rounds in which nothing is drafted thus cost a head next to nothing, and what it makes of the states is computed for
    all places at once. Of a tensor, a reference waits. Numpy's rows, which the verifier's next pass overwrites, are
    copied, behind those before them in memory that is there for all texts.

    Attributes:
        count: how many places wait.
    """

    def __init__(self) -> None:
        self._parts: list[States] = []
        self._rows: dict[int, npt.NDArray[Any]] = {}  # of each layer, of those that came without `_parts`
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether they should be read now, whether or not the head drafts."""
        return self.count >= MOST

    def add(self, states: States, known: int) -> None:
        """Take the states of the next places; the first ``known`` of them wait already or have been read.

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
        """Let all but the first ``count`` places be forgotten."""
        while self._parts and self.count > count:
            last = self._parts.pop()
            held = len(next(iter(last.values())))
            self.count -= held
            if self.count < count:
                self._parts.append({layer: rows[: count - self.count] for layer, rows in last.items()})
                self.count = count
        self.count = min(self.count, count)

    def take(self) -> States | None:
        """All of them, which wait no longer; None if there are none.

        Numpy's are in memory that those who wait next will take.
        """
        count, self.count = self.count, 0
        if not count:
            return None
        if not self._parts:
            return {layer: rows[:count] for layer, rows in self._rows.items()}
        taken, self._parts = self._parts, []
        return taken[0] if len(taken) == 1 else joined_states(taken)


TAIL = 256
"""Rows that are kept of places already read, for rollbacks to a place before them."""


class HeadInputs:
    """Which row a chain head reads each token with: that of the place before it, as far as its state was observed.

    Rows of the places before W are known, of which the first may have been dropped. A token behind them is read with
    the row that the head wrote after the token before it. Of the places behind W the states may wait.

    Args:
        blank: ``(1, R)``, the row of place -1, the start of the sequence: zeros, by numpy or of torch as all rows are.
        fuse: makes rows ``(T, R)`` of states, ``(T, D)`` for each of the head's layers.
        mask: ``(1, R)``, the row that all tokens without a known one are read with, in one pass; None where the head
            goes on from its own.

    Attributes:
        count: W, one more than the last place whose row is known.
        true: tokens that were read with rows of the verifier's states, all of them at the start of the sequence.
    """

    def __init__(self, blank: Any, fuse: Callable[[States], Any], mask: Any = None) -> None:
        self._blank, self._fuse, self._mask = blank, fuse, mask
        self._waiting = PendingStates()
        self._rows = blank[:0]  # (N, R), of places W - N to W - 1
        self._own, self._own_after = blank, 0  # (1, R), and how many tokens had been read when the head wrote it
        self.count = 0
        self.true = 0

    @property
    def observed(self) -> int:
        """One more than the last place whose state was given."""
        return self.count + self._waiting.count

    def observe_states(self, start: int, states: States) -> None:
        """As in `Slot`."""
        self._waiting.add(states, self.observed - start)
        if self._waiting.full:
            self.take_pending()

    def take_pending(self) -> None:
        """Make rows of the states that wait."""
        if (states := self._waiting.take()) is not None:
            rows = self._fuse(states)
            self._rows = joined_numbers([self._rows, rows])
            self.count += len(rows)

    def of(self, first: int, count: int) -> Any:  # (count, R)
        """The rows of places ``first`` and those after it; zeros for place -1, the start of the sequence."""
        begin = self.count - len(self._rows)
        rows = self._rows[max(first, 0) - begin : first + count - begin]
        return rows if first >= 0 else joined_numbers([self._blank, rows])

    def known(self, length: int) -> int:
        """For how many of the tokens behind ``length`` there are rows of the verifier's states."""
        return self.count + 1 - length

    def next(self, length: int, count: int) -> Any:  # (count, R)
        """The rows to read the next tokens with, of which those before ``length`` were read."""
        known = self.known(length)
        if self._mask is not None:
            rows = [self.of(length - 1, min(known, count))] if known > 0 else []
            return joined_numbers([*rows, *[self._mask] * (count - max(known, 0))])
        if known > 0:
            return self.of(length - 1, count)
        return self._own if self._own_after == length else joined_numbers([self._blank])

    def pieces(self, length: int, tokens: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Tokens in the passes that read them: those whose rows are known, and each behind them by itself."""
        done = 0
        if self._mask is not None and tokens:
            yield tokens
            return
        while done < len(tokens):
            some = tokens[done : done + max(1, self.known(length + done))]
            done += len(some)
            yield some

    def advance(self, length: int, count: int, own: Any) -> None:
        """Note that tokens were read.

        Args:
            length: tokens read before.
            count: of them.
            own: ``(1, R)``, the row that the head wrote after the last.
        """
        if self.true == length <= self.count:
            self.true += min(count, self.known(length))
            self._forget_read(length)
        self._own, self._own_after = own, length + count

    def _forget_read(self, place: int) -> None:
        """Drop most rows of places before ``place``, which have been read."""
        begin = self.count - len(self._rows)
        if place - begin > 2 * TAIL:
            self._rows = joined_numbers([self._rows[place - TAIL - begin :]])  # a copy

    def rollback(self, length: int) -> int:
        """Go back to tokens that were read with rows of the verifier's states.

        No place is known then behind one that is needed and no longer there.

        Args:
            length: tokens that stay.

        Returns:
            How many stay as read.
        """
        self.true = min(self.true, length)
        known, needed = self.count, self.true - 1  # the place whose row is read next
        begin = self.count - len(self._rows)
        kept = min(length, self.count)
        if 0 <= needed < begin:
            kept = min(kept, needed)
        self._rows = self._rows[: max(kept - begin, 0)]
        self.count = kept
        self._waiting.cut(max(0, length - known) if kept == known else 0)
        return self.true
