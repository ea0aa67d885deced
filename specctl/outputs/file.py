"""One output: an open file or standard output, written whole line by whole line."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from specctl.errors import OutputError

STDOUT = "standard output"
_BLOCK = 1 << 16


class Sink(Protocol):
    """What text is written to: an output or a text stream."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Turn an error of the block's writes into an OutputError that names the file; a closed pipe stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


class _StandardOutput(io.TextIOWrapper):
    """Standard output whose errors say that it is."""

    def write(self, text: str, /) -> int:
        with naming(STDOUT):
            return super().write(text)

    def flush(self) -> None:
        with naming(STDOUT):
            super().flush()


def name_standard_output() -> None:
    """Let errors of standard output be OutputErrors, whoever writes to it."""
    old = sys.stdout
    # The console of Windows has a raw stream of its own.
    if isinstance(old, io.TextIOWrapper) and type(getattr(old.buffer, "raw", old.buffer)) is io.FileIO:
        raw = io.FileIO(old.fileno(), "w", closefd=False)
        sys.stdout = _StandardOutput(
            io.BufferedWriter(raw), old.encoding, old.errors, None, old.line_buffering, old.write_through
        )


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, by renaming a temporary file; raises OutputError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(path):
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


class OutputFile:
    """An open, locked output file, or standard output.

    Attributes:
        path: the file; ``-`` for standard output.
        continued: whether the file has content that this run continues.
    """

    def __init__(self, path: Path, descriptor: int | None, *, continued: bool) -> None:
        self.path, self.continued = path, continued
        self._descriptor = descriptor

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file, and no stream, pipe or device."""
        return self._descriptor is not None and is_regular(self._descriptor)

    def begin(self, keep: int | None = None) -> bool:
        """Remove earlier content that does not stay: all of it, or in a continued file what follows the last line feed.

        Args:
            keep: in a continued file, the number of bytes that stay.

        Returns:
            Whether nothing stays; true for what is not a regular file.
        """
        if self._descriptor is None or not is_regular(self._descriptor):
            return True
        if not self.continued:
            keep = 0
        elif keep is None:
            keep = whole_lines(self.path)
        with naming(self.path):
            if os.fstat(self._descriptor).st_size != keep:
                os.ftruncate(self._descriptor, keep)
        return keep == 0

    def write(self, text: str) -> int:
        """Write text; a regular file gets all of it or, after an error, none. Raises OutputError."""
        if self._descriptor is None:
            return sys.stdout.write(text)
        regular = is_regular(self._descriptor)
        before = os.fstat(self._descriptor).st_size if regular else 0
        left = memoryview(text.encode())
        try:
            with naming(self.path):
                while left:
                    left = left[os.write(self._descriptor, left) :]
        except BaseException:
            if regular:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, before)
            raise
        return len(text)

    def replace(self, text: str) -> None:
        """Make the text the whole content; a regular file has its old content until it has all of the new."""
        if self._descriptor is None or not is_regular(self._descriptor):
            self.write(text)
        else:
            write_whole(self.path.resolve(), text)

    def isatty(self) -> bool:
        """Whether a terminal shows what is written."""
        return sys.stdout.isatty() if self._descriptor is None else os.isatty(self._descriptor)

    def flush(self) -> None:
        if self._descriptor is None:
            sys.stdout.flush()


def whole_lines(path: Path) -> int:
    """The size in bytes of a file up to its last line feed."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def is_regular(descriptor: int) -> bool:
    """Whether an open file is a regular one, and no pipe or device."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
