"""Passes over several texts whose last tokens are read at once."""

from collections.abc import Sequence

import numpy as np

from specctl.models.passes.forward import Forward, Numbers, joined_numbers
from specctl.models.passes.token_reader import TokenReader
from specctl.models.running.runner import RowPasses, RowRequest

Reading = tuple[list[float], Numbers | None]
"""What a `TokenReader` gives, with its numbers on the host."""
READERS = 1024
"""Readers of texts that are known to be equal to others, after which they are looked at anew."""


class ReadPasses:
    """`Shared` over the passes of a model: texts that draw their tokens alike are read by one call.

    Args:
        passes: of the model.
    """

    def __init__(self, passes: RowPasses) -> None:
        self._passes = passes
        self._readers: dict[int, tuple[TokenReader, TokenReader]] = {}  # by `id`: a reader, and the first equal one

    def run(self, requests: Sequence[RowRequest], /) -> list[Forward | Reading]:
        forwards = self._passes.run(requests)
        found: list[Forward | Reading] = []
        read: dict[int, tuple[TokenReader, list[int]]] = {}
        for place, (request, forward) in enumerate(zip(requests, forwards, strict=True)):
            if request.reader is not None:
                reader = self._known(request.reader)
                read.setdefault(id(reader), (reader, []))[1].append(place)
            elif request.keep and isinstance(forward.columns, np.ndarray):
                # Who was asked for later may be answered by the next pass before this is read.
                forward.columns = forward.columns.copy()
            found.append(forward)
        for reader, places in read.values():
            columns = [forwards[place].columns for place in places]
            logits = columns[0] if len(columns) == 1 else joined_numbers(columns)
            # Laws may be parts of the logits, which the next pass overwrites.
            own = logits.copy() if len(columns) == 1 and isinstance(logits, np.ndarray) else logits
            readings = reader.read_rows(own, [requests[place].uniform for place in places])
            for place, reading in zip(places, readings, strict=True):
                found[place] = reading
        return found

    def _known(self, reader: TokenReader) -> TokenReader:
        """The first of the readers that are equal to one: texts have their own, and comparing them takes long."""
        known = self._readers.get(id(reader))
        if known is None or known[0] is not reader:
            if len(self._readers) > READERS:
                self._readers.clear()
            equal = next((first for _, first in self._readers.values() if first == reader), reader)
            known = self._readers[id(reader)] = (reader, equal)
        return known[1]
