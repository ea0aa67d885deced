"""Outputs of a command: opened, locked and checked before its work begins, by one set of rules.

An output is never one of the inputs, nor another output. A file with content is replaced only with ``--force``, unless
the command continues it; pipes, devices and standard output hold nothing to lose. Earlier content stays until the work
begins (`OutputFile.begin`). One process at a time writes an output. A write is made whole or not at all, and an error
names the file.
"""

import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import time
from types import TracebackType
from typing import Protocol, Self, TextIO, overload

from specctl.errors import OutputError, UsageError

ABANDONED = 3600.0  # Seconds after which an unlocked folder counts as left by a killed process


def locked(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; False if another process has locked it."""
    return _obtained(descriptor) is not False


def remove_abandoned(folder: Path, lock: Path) -> None:
    """Remove a folder of this user without files newer than `ABANDONED`, if no process holds its lock.

    Anything but a folder stays, and so does a folder that cannot be removed.

    Args:
        folder: possibly left by a killed process.
        lock: the file that its process locked, in the folder or elsewhere; created if missing.
    """
    if sys.platform == "win32":
        return
    with suppress(OSError):  # another process may be removing it too
        if folder.is_symlink() or not folder.is_dir() or folder.lstat().st_uid != os.getuid():
            return
        if max(path.lstat().st_mtime for path in (folder, *folder.rglob("*"))) > time() - ABANDONED:
            return
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            if _obtained(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _obtained(descriptor: int) -> bool | None:
    """Lock an open file or folder; False if another process has locked it, None where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return None
    return True


STDOUT = "standard output"
_BLOCK = 1 << 16


class Sink(Protocol):
    """A destination of text: an output or a text stream."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Turn write errors of the block into an OutputError that names the file, except for a closed pipe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


class _StandardOutput(io.TextIOWrapper):
    """Standard output with errors that name it."""

    def write(self, text: str, /) -> int:
        with naming(STDOUT):
            return super().write(text)

    def flush(self) -> None:
        with naming(STDOUT):
            super().flush()


def name_standard_output() -> None:
    """Turn errors of standard output into OutputErrors for all writers."""
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
        """Whether it is a regular file, not a stream, pipe or device."""
        return self._descriptor is not None and is_regular(self._descriptor)

    def begin(self, keep: int | None = None) -> bool:
        """Remove earlier content: all of it, or in a continued file the part after the last line feed.

        Args:
            keep: in a continued file, the number of bytes that stay.

        Returns:
            Whether the file is now empty; true unless it is a regular file.
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
        """Replace the whole content; a regular file keeps its old content until the new one is complete."""
        if self._descriptor is None or not is_regular(self._descriptor):
            self.write(text)
        else:
            write_whole(self.path.resolve(), text)

    def isatty(self) -> bool:
        """Whether it writes to a terminal."""
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
    """Whether an open file is a regular one, not a pipe or device."""
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


class Outputs:
    """All outputs of a command, held until the block ends. Empty files that a failed run created are removed.

    Args:
        force: replace files that have content.
    """

    def __init__(self, *, force: bool = False) -> None:
        self._force = force
        self._roles: dict[object, str] = {}
        self._open = ExitStack()
        self._made = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        with self._open:
            if kind is not None:
                self._made.close()

    def further(self) -> "Outputs":
        """Further outputs that end before these. They may be neither these outputs nor their inputs."""
        further = Outputs(force=self._force)
        further._roles = dict(self._roles)
        return further

    def reads(self, role: str, path: str | Path | None) -> None:
        """Register an input; ``-`` is standard input, None is ignored. Raises UsageError if the file does not exist."""
        if path is None:
            return
        if str(path) != "-" and not os.path.isdir(path):
            try:
                Path(path).stat()
                if not os.access(path, os.R_OK):
                    raise PermissionError(13, os.strerror(13))
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
        self.protect(role, path)

    def protect(self, role: str, path: str | Path | None) -> None:
        """Forbid a file, or the files in a folder, as outputs; missing ones are ignored."""
        if path is None:
            return
        files = [path] if str(path) == "-" or not os.path.isdir(path) else sorted(Path(path).iterdir())
        for file in files:
            if (identity := _identity(file, sys.stdin)) is not None:
                self._roles.setdefault(identity, role)

    @overload
    def file(self, role: str, path: None, *, resumed: bool | None = None) -> None: ...
    @overload
    def file(self, role: str, path: str | Path, *, resumed: bool | None = None) -> OutputFile: ...
    @overload
    def file(self, role: str, path: str | Path | None, *, resumed: bool | None = None) -> OutputFile | None: ...
    def file(self, role: str, path: str | Path | None, *, resumed: bool | None = None) -> OutputFile | None:
        """Open a file without changing its content.

        Args:
            role: its name in messages: ``output``, ``trace``.
            path: the file; ``-`` is standard output, None no file.
            resumed: whether this run continues the file; None if the command never does.

        Raises:
            UsageError: it cannot be written, is an input or another output, has content that must not be replaced, or
                is being written by another process.
        """
        if path is None:
            return None
        path = Path(path)
        self._claim(path, role)
        if str(path) == "-":
            _write_utf8(sys.stdout)
            return OutputFile(path, None, continued=False)
        new = not os.path.exists(path)
        descriptor = self._opened(path)
        if new:
            self._made.callback(_remove_empty, path, descriptor)
            self._claim(path, role)
        filled = is_regular(descriptor) and os.fstat(descriptor).st_size > 0
        if filled and not (self._force or resumed):
            raise UsageError(f"{path} exists already", _how(resumed))
        return OutputFile(path, descriptor, continued=filled and bool(resumed))

    def folder(
        self, role: str, path: Path | None, written: Sequence[str] = ("*",), *, resumed: bool | None = None
    ) -> None:
        """Make and lock a folder.

        Args:
            role: its name in messages.
            path: the folder; None for no folder.
            written: patterns of the names that will be written in it; other files in the folder stay.
            resumed: see `file`.

        Raises:
            UsageError: as `file`.
        """
        if path is None:
            return
        made = [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            for folder in reversed(made):
                self._made.callback(_remove_folder, folder)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(13, os.strerror(13))
        except FileExistsError:
            raise UsageError(f"cannot write {path}: it is a file, not a folder") from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        self._claim(path, role)
        if sys.platform != "win32":
            self._held(path, os.open(path, os.O_RDONLY))
        for found in sorted(found for pattern in written for found in path.glob(pattern)):
            if (identity := _identity(found, sys.stdout)) in self._roles and found.is_file():
                raise UsageError(f"{role} would replace {found}, the {self._roles[identity]}", "use another folder")
            if not (self._force or resumed):
                raise UsageError(f"{path} already holds {found.name}", _how(resumed))

    def _claim(self, path: Path, role: str) -> None:
        identity = _identity(path, sys.stdout)
        if (other := self._roles.get(identity, role)) != role:
            raise UsageError(f"{other} and {role} are the same file", "use a different file for each")
        if identity is not None:
            self._roles[identity] = role

    def _opened(self, path: Path) -> int:
        while True:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
                descriptor = os.open(path, flags, 0o666)
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from error
            if not is_regular(descriptor):
                self._open.callback(os.close, descriptor)
                return descriptor
            self._held(path, descriptor)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
            # Another, failed run removed the file after it was opened here.

    def _held(self, path: Path, descriptor: int) -> None:
        if not locked(descriptor):
            os.close(descriptor)
            raise UsageError(f"another process is writing {path}", "wait until it has ended, or choose another name")
        self._open.callback(os.close, descriptor)


def _identity(path: str | Path, standard: TextIO) -> object:
    """A value that is equal for all paths of a file; None for a shareable stream or a missing file."""
    try:
        found = os.fstat(standard.fileno()) if str(path) == "-" else Path(path).stat()
    except (OSError, ValueError, AttributeError):
        return STDOUT if str(path) == "-" and standard is sys.stdout else None
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return found.st_dev, found.st_ino
    return STDOUT if str(path) == "-" and standard is sys.stdout else None


def _how(resumed: bool | None) -> str:
    continuing = "" if resumed is None else "continue it with --resume, "
    return f"{continuing}replace it with --force, or choose another name"


def _remove_empty(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        # The path may have been replaced since it was opened.
        if os.fstat(descriptor).st_size == 0 and os.path.samestat(path.stat(), os.fstat(descriptor)):
            path.unlink()


def _remove_folder(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _write_utf8(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", newline="\n")
