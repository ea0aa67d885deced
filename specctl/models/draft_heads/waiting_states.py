"""States that a draft head was given and has not read yet."""

from typing import Any

import numpy as np
import numpy.typing as npt

from specctl.models.passes.watching import States, joined_states

MOST = 512
"""Places that may wait: states of several layers take more memory than what a head makes of them."""
ROOM = 64
"""Places to make room for at first; the memory doubles when it is full."""


class WaitingStates:
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
