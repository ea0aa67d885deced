"""States that a draft head was given and has not read yet."""

from specctl.models.passes.watching import States, joined_states

MOST = 512
"""Places that may wait: states of several layers take more memory than what a head makes of them."""


class WaitingStates:
    """The verifier's states of the newest places, as they came, until the draft head drafts again.

    Rounds in which nothing is drafted thus cost a head nothing: they add a reference to what the verifier computed
    anyway, and what the head makes of the states is computed for all places at once.

    Attributes:
        count: how many places wait.
    """

    def __init__(self) -> None:
        self._parts: list[States] = []
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether they should be read now, whether or not the head drafts."""
        return self.count >= MOST

    def add(self, states: States, known: int) -> None:
        """Take the states of the next places; the first ``known`` of them wait already or have been read."""
        count = next(iter(states.values())).shape[0] - known
        if count > 0:
            self._parts.append({layer: rows[known:] for layer, rows in states.items()})
            self.count += count

    def cut(self, count: int) -> None:
        """Let all but the first ``count`` places be forgotten."""
        while self.count > count:
            last = self._parts.pop()
            held = len(next(iter(last.values())))
            self.count -= held
            if self.count < count:
                self.add({layer: rows[: count - self.count] for layer, rows in last.items()}, 0)

    def take(self) -> States | None:
        """All of them, which wait no longer; None if there are none."""
        taken, self._parts, self.count = self._parts, [], 0
        return taken[0] if len(taken) == 1 else joined_states(taken)
