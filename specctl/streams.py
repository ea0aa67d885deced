"""What a command reads, and standard streams that may be closed."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn, TypeVar

from specctl.errors import UsageError

T = TypeVar("T")


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """A file, or standard input for ``-``, as bytes; raises UsageError if it cannot be read."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 - closed below; only opening raises the error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    with stream:
        yield stream


def apart(stream: IO[bytes]) -> IO[bytes]:
    """The same stream for a thread of its own to read, which may still wait for a line when the program ends.

    Closing or finalising the original would wait for that thread. Nothing may have been read before.
    """
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError):  # it is not a file of the system
        return stream
    return os.fdopen(descriptor, "rb")


def read_prompt(path: str = "-") -> str:
    """All of a file, or of standard input for ``-``, without its last line break, which ``echo`` and editors add."""
    with open_input(path) as stream:
        try:
            text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            what = "standard input" if path == "-" else path
            raise UsageError(f"{what} is not UTF-8 text ({error.reason} at byte {error.start})") from error
        except OSError as error:  # such as a folder
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return text.removesuffix("\n").removesuffix("\r")


def from_file(path: str | None, read: Callable[[IO[bytes]], T]) -> T | None:
    """What ``read`` makes of a regular file; None for a stream, which can be read only once."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return read(file)


def count_lines(path: str | None) -> int | None:
    """Number of non-blank lines of a regular file; None for a stream, whose length is unknown."""
    return from_file(path, lambda file: sum(1 for line in file if line.strip()))


class Closed(io.TextIOBase):
    """Stands for a standard stream that was closed when the program started; using it is an error for users."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def buffer(self) -> NoReturn:
        raise self._error()

    def read(self, _size: int | None = -1, /) -> NoReturn:
        raise self._error()

    def write(self, _text: str, /) -> NoReturn:
        raise self._error()

    def _error(self) -> UsageError:
        return UsageError(f"{self.name} is closed", "redirect it to a file, a pipe or /dev/null")


def replace_closed() -> None:
    """Put something in place of closed standard streams, so that no file gets a number that libraries write to."""
    missing = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if not any(missing):
        return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < len(missing):
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if missing[0]:
        sys.stdin = Closed("standard input")
    if missing[1]:
        sys.stdout = Closed("standard output")
    if missing[2]:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the program runs
