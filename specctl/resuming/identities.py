"""The ids of millions of records in little memory, and input in which every id occurs once."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from specctl.errors import RecordError
from specctl.jsonl import DUPLICATE, Record, deciding

_FULL = 0.6
"""Share of the places that may be taken; then the table doubles."""
_MASK = (1 << 32) - 1


def hash_of(text: str) -> int:
    """The first 8 bytes of a hash, never 0. Of 10^6 texts two have the same with a probability of 3e-8."""
    return int.from_bytes(blake2b(text.encode("ascii", "backslashreplace"), digest_size=8).digest(), "little") or 1


def content_of(data: Mapping[str, Any]) -> int:
    """A hash of 32 bits of what decides how a record is answered."""
    return hash_of(json.dumps(deciding(data), sort_keys=True)) & _MASK


class Identities:
    """Maps texts, of which only `hash_of` is kept, to numbers of 32 bits: 20 to 40 bytes for each.

    A dictionary of Python objects would take five times that.
    """

    def __init__(self) -> None:
        self._count = 0
        self._keys = array("Q", bytes(8 * 1024))  # a power of 2; 0 where nothing is
        self._values = array("I", bytes(4 * 1024))

    def __len__(self) -> int:
        return self._count

    def get(self, text: str) -> int | None:
        """The number of a text, None where it has none."""
        key = hash_of(text)
        place = self._place(key)
        return self._values[place] if self._keys[place] else None

    def put(self, text: str, value: int) -> None:
        """Set the number of a text; of a larger one the last 32 bits are kept."""
        if self._count > _FULL * len(self._keys):
            self._double()
        key = hash_of(text)
        place = self._place(key)
        self._count += not self._keys[place]
        self._keys[place], self._values[place] = key, value & _MASK

    def _place(self, key: int) -> int:
        """Where a key is, or the free place where it belongs."""
        keys, last = self._keys, len(self._keys) - 1
        place = key & last
        while keys[place] and keys[place] != key:
            place = (place + 1) & last
        return place

    def _double(self) -> None:
        keys, values = self._keys, self._values
        self._keys, self._values = array("Q", bytes(16 * len(keys))), array("I", bytes(8 * len(keys)))
        for key, value in zip(keys, values, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._values[place] = key, value & _MASK


def distinct(records: Iterable[Record]) -> Iterator[Record]:
    """The records; one with the id of an earlier one gets an error, for its result could not be told from the other."""
    lines = Identities()
    for record in records:
        if record.id is None:
            yield record
            continue
        if (line := lines.get(record.key)) is None:
            lines.put(record.key, record.line)
            yield record
            continue
        what = f"line {line} has the same id" + (
            "" if record.has_id else "; a record without an id has its line number"
        )
        yield replace(record, error=RecordError(DUPLICATE, what))
