"""How a few sequences of many are read: in a pass of all, whose others read fillers, or each in a pass of its own."""

from collections.abc import Sequence

WIDEST = 8
"""Tokens of a sequence from which on a pass over all is not weighed against others: it is a prompt's."""
RISING = 1.02
"""By how much the least time of a pass is taken to have risen when the next one is timed."""
AGAIN = 128
"""Once in so many decisions the way that seems to take longer is taken, and timed anew."""


class PassWays:
    """Learns what passes take, and which way takes less.

    A pass takes what it took at least with as many tokens, else with the nearest number that was timed; less in
    proportion if that is larger, so that a way which may be faster is tried.

    Args:
        rows: sequences of a pass over all.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._one: dict[int, float] = {}  # seconds of a pass over one sequence, by its tokens
        self._all: dict[int, float] = {}  # of one over all, by theirs, fillers included
        self._decided = 0

    def apart(self, sizes: Sequence[int], fillers: int) -> bool:
        """Whether some sequences are to have a pass each.

        Args:
            sizes: how many tokens each of them reads.
            fillers: how many others would read one each.
        """
        few = 1 < len(sizes) <= self._rows // 2
        if not few or max(sizes) > WIDEST or not self._all:  # which is timed first
            return False
        if not self._one:
            return True
        self._decided += 1
        whole = _at(self._all, sum(sizes) + fillers)
        less = sum(_at(self._one, size) for size in sizes) < whole
        return less is not (self._decided % AGAIN == 0)

    def took(self, tokens: int, seconds: float, *, alone: bool) -> None:
        """A pass was made.

        Args:
            tokens: that it read, fillers included.
            seconds: that it took.
            alone: whether it was over one sequence.
        """
        if tokens > (WIDEST if alone else WIDEST * self._rows):
            return
        known = self._one if alone else self._all
        known[tokens] = min(seconds, RISING * known.get(tokens, seconds))


def _at(known: dict[int, float], tokens: int) -> float:
    if (found := known.get(tokens)) is not None:
        return found
    near = min(known, key=lambda each: abs(each - tokens))
    return known[near] * min(1.0, tokens / near)
