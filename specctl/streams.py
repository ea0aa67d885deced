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


def read_prompt() -> str:
    """All of standard input without its last line break, which ``echo`` and editors add."""
    with open_input("-") as stream:
        try:
            text = stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def open_output(path: str, *, append: bool = False) -> Iterator[IO[str]]:
    """A file, or standard output for ``-``, as UTF-8 text; raises UsageError if it cannot be written."""
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
    """Empty a file that was opened to append; a device or a pipe is left as it is."""
    if stream is not sys.stdout and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.truncate(0)


def check_distinct(source: str | None, output: str, trace: str | None) -> None:
    """Raise UsageError if two of input, output and trace are the same file, since one would overwrite the other.

    Args:
        source: path, ``-`` for standard input, None where nothing is read.
        output: path, or ``-`` for standard output.
        trace: as ``output``; None for none.
    """
    roles = {"input": (source, sys.stdin), "output": (output, sys.stdout), "trace": (trace, sys.stdout)}
    seen: dict[object, str] = {}
    for role, (path, standard) in roles.items():
        if path is None or (identity := _identity(path, standard, role)) is None:
            continue
        if identity in seen:
            raise UsageError(f"{seen[identity]} and {role} are the same file", "use a different file for each")
        seen[identity] = role


def _identity(path: str, standard: IO[str], role: str) -> object:
    """A value that is equal for two paths of the same file; None for a stream that can be shared."""
    try:
        found = os.fstat(standard.fileno()) if path == "-" else Path(path).stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino
    except (OSError, ValueError):  # the file does not exist yet
        if path != "-":
            return Path(path).absolute()
    return "standard output" if path == "-" and role != "input" else None


def count_lines(path: str | None) -> int | None:
    """Number of non-blank lines of a regular file; None for a stream, whose length is unknown."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.strip())
