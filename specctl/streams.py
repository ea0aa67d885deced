"""Files and standard streams that a command reads and writes."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specctl.errors import UsageError


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """A file, or standard input for ``-``, as bytes; raises UsageError where it cannot be read."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 - closed below; the error is opening's alone
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    with stream:
        yield stream


def read_prompt() -> str:
    """All of standard input, less the line break that ``echo`` and editors end it with."""
    with open_input("-") as stream:
        try:
            text = stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def open_output(path: str, *, append: bool = False) -> Iterator[IO[str]]:
    """A file, or standard output for ``-``, as UTF-8 text; raises UsageError where it cannot be written."""
    if path == "-":
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", newline="\n")
        yield sys.stdout
        return
    try:
        stream = Path(path).open("a" if append else "w", encoding="utf-8", newline="\n")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    with stream:
        yield stream


def start_over(stream: IO[str]) -> None:
    """Empty a file that was opened to append; a device or a pipe has nothing to take back."""
    if stream is not sys.stdout and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.truncate(0)


def check_distinct(source: str | None, output: str, trace: str | None) -> None:
    """Raise UsageError where two of input, output and trace are one file, for the one would spoil the other.

    Args:
        source: path, ``-`` for standard input, None where nothing is read.
        output: path, or ``-`` for standard output.
        trace: as ``output``; None for none.
    """
    places = {"input": (source, sys.stdin), "output": (output, sys.stdout), "trace": (trace, sys.stdout)}
    seen: dict[object, str] = {}
    for role, (path, standard) in places.items():
        if path is None or (place := _place(path, standard, role)) is None:
            continue
        if place in seen:
            raise UsageError(f"{seen[place]} and {role} are the same file", "give each a file of its own")
        seen[place] = role


def _place(path: str, standard: IO[str], role: str) -> object:
    """What tells a file from others; None for what can be shared."""
    try:
        found = os.fstat(standard.fileno()) if path == "-" else Path(path).stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino
    except (OSError, ValueError):  # nothing there yet
        if path != "-":
            return Path(path).absolute()
    return "standard output" if path == "-" and role != "input" else None


def count_lines(path: str | None) -> int | None:
    """Lines of a regular file that are not blank; None for anything else, whose end nobody knows."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.strip())
