"""Values on a pipe: eight bytes with the length, then a pickle. Both ends are processes of one program."""

import os
import pickle
from collections.abc import Iterator
from struct import Struct
from typing import Any

_LENGTH = Struct("<Q")
_BLOCK = 1 << 20


def framed(value: Any) -> bytes:
    """A value as the bytes of a frame."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """The values that arrive on a descriptor; of a frame that was cut off nothing is seen.

    Attributes:
        ended: whether the other end is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = bytearray()
        self.ended = False

    def arrived(self) -> Iterator[Any]:
        """Read once, which waits where nothing is there, and yield the values that are whole by now."""
        try:
            found = os.read(self._descriptor, _BLOCK)
        except BlockingIOError:
            return
        self.ended = not found
        self._read += found
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            body = bytes(self._read[_LENGTH.size : end])
            del self._read[:end]
            yield pickle.loads(body)
