"""Passes over several texts that are read at once: their last tokens, and their drafts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specctl.models.passes.forward import Numbers
from specctl.models.passes.token_reader import PassReader
from specctl.models.passes.watching import kept_states
from specctl.models.running.runner import RowPasses, RowRequest

Reading = tuple[list[float], Numbers | None]
"""What a `TokenReader` gives, with its numbers on the host."""
READERS = 1024
"""Readers of texts that are known to be equal to others, after which they are looked at anew."""


class ReadPasses:
    """`Shared` over the passes of a model: texts that draw or judge their tokens alike are read by one call.

    Args:
        passes: of the model.
    """

    def __init__(self, passes: RowPasses) -> None:
        self._passes = passes
        self._readers: dict[int, tuple[PassReader, PassReader]] = {}  # by `id`: a reader, and the first equal one

    def run(self, requests: Sequence[RowRequest], /) -> list[Any]:
        forwards = self._passes.run(requests)
        found: list[Any] = [*forwards]
        read: dict[int, tuple[PassReader, list[int]]] = {}
        for place, request in enumerate(requests):
            if request.reader is not None:
                reader = self._known(request.reader)
                read.setdefault(id(reader), (reader, []))[1].append(place)
            else:  # a prompt's pieces are put together after the last of them
                forward = forwards[place]
                if request.keep and isinstance(forward.columns, np.ndarray):
                    forward.columns = forward.columns.copy()
                forward.states = kept_states(forward.states)
        for reader, places in read.values():
            readings = reader.read_rows(
                [forwards[place] for place in places], [requests[place].about for place in places]
            )
            for place, reading in zip(places, readings, strict=True):
                found[place] = reading
        return found

    def _known(self, reader: PassReader) -> PassReader:
        """The first of the readers that are equal to one: texts have their own, and comparing them takes long."""
        known = self._readers.get(id(reader))  # which holds it, so that no other has its id
        if known is None:
            if len(self._readers) > READERS:
                self._readers.clear()
            equal = next((first for _, first in self._readers.values() if first == reader), reader)
            known = self._readers[id(reader)] = (reader, equal)
        return known[1]
