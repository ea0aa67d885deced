"""All outputs of a command, checked against its inputs and against each other."""

import os
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, overload

from specctl.errors import UsageError
from specctl.outputs.file import STDOUT, OutputFile, is_regular
from specctl.outputs.locks import locked


class Outputs:
    """All outputs of a command, held until the block ends. What a failed run created and left empty is removed.

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
        """Outputs that end before these, and are none of these nor of their inputs."""
        further = Outputs(force=self._force)
        further._roles = dict(self._roles)
        return further

    def reads(self, role: str, path: str | Path | None) -> None:
        """Note an input; ``-`` is standard input, None nothing. Raises UsageError if there is no such file."""
        if path is None:
            return
        if str(path) != "-" and not os.path.isdir(path):
            try:
                Path(path).stat()
                if not os.access(path, os.R_OK):
                    raise PermissionError(13, os.strerror(13))
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
        self.spare(role, path)

    def spare(self, role: str, path: str | Path | None) -> None:
        """Note a file, or the files in a folder, that no output may be; what does not exist is ignored."""
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
            role: what it is, for messages: ``output``, ``trace``.
            path: the file; ``-`` is standard output, None no file.
            resumed: whether this run continues the file; None where the command cannot.

        Raises:
            UsageError: it cannot be written, is an input or another output, has content that shall not be replaced, or
                another process is writing it.
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
            role: what it is, for messages.
            path: the folder; None for no folder.
            written: patterns of the names that will be written in it; other files in the folder stay.
            resumed: as in `file`.

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
            # A failed run has removed the file after it was opened here.

    def _held(self, path: Path, descriptor: int) -> None:
        if not locked(descriptor):
            os.close(descriptor)
            raise UsageError(f"another process is writing {path}", "wait until it has ended, or choose another name")
        self._open.callback(os.close, descriptor)


def _identity(path: str | Path, standard: TextIO) -> object:
    """A value that is equal for all paths of a file; None for a stream that can be shared, or what does not exist."""
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
        # What has been replaced is no longer what was opened.
        if os.fstat(descriptor).st_size == 0 and os.path.samestat(path.stat(), os.fstat(descriptor)):
            path.unlink()


def _remove_folder(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _write_utf8(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", newline="\n")
