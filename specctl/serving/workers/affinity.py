"""Which replica has read most of a prompt already."""

from collections import Counter
from collections.abc import Iterable, Sequence

from specctl.models.running.context import common_beginning

BUSY = 256
"""Tokens of a prompt that a text under way counts as much as: it takes its replica's time too."""


class Affinity:
    """Remembers what replicas have in their caches: as many of the last texts as they have places.

    That is a guess, which costs nothing but time where it is wrong: a replica looks itself for what it holds.

    Args:
        places: of a replica; the places of the first have the first numbers.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._texts: dict[int, Sequence[int]] = {}  # ids by place, the one that changed last at the end

    def place(self, prompt: Sequence[int], idle: Sequence[int], busy: Iterable[int]) -> int:
        """The one to write behind a prompt: of a replica with little to do for it, that whose text is the oldest.

        Args:
            prompt: ids.
            idle: places that are free; at least one.
            busy: places whose texts are being written.
        """
        texts, kept = Counter(place // self._places for place in busy), Counter[int]()
        for place, text in self._texts.items():
            replica = place // self._places
            kept[replica] = max(kept[replica], common_beginning(text, prompt))

        changed = {place: number for number, place in enumerate(self._texts, 1)}

        def cost(place: int) -> tuple[int, int]:
            replica = place // self._places
            return BUSY * texts[replica] - kept[replica], changed.get(place, 0)

        return min(idle, key=cost)

    def holds(self, place: int, text: Sequence[int]) -> None:
        """A place's text, or as much of it as is known."""
        self._texts.pop(place, None)
        self._texts[place] = text

    def lost(self, place: int) -> None:
        """The replica of a place has ended, and with it what all of its places held."""
        first = place // self._places * self._places
        for one in range(first, first + self._places):
            self._texts.pop(one, None)
