"""The folder in which the ranks of a group meet, and those that killed leaders left behind."""

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import time

PREFIX = "specctl-shards-"
ABANDONED = 3600.0
"""Seconds after which the folder of a leader that no longer lives is removed by the next one."""
_LOCK = "lock"


class MeetingFolder:
    """A folder of this user's among the temporary files; locked, so that others see that its process lives.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        _free(self._lock)

    def remove(self) -> None:
        """Remove it with what is in it."""
        os.close(self._lock)
        self._folder.cleanup()


def _sweep(among: Path) -> None:
    """Remove old folders of this user whose leaders have ended."""
    if sys.platform == "win32":
        return
    with suppress(OSError), os.scandir(among) as entries:
        for entry in entries:
            with suppress(OSError):  # another process may be sweeping too
                if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
                    continue
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.getuid() and time() - found.st_mtime > ABANDONED and _left(Path(entry.path)):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _left(folder: Path) -> bool:
    """Whether no process has a folder locked."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # its leader did not get that far
        return True
    try:
        return _free(lock)
    finally:
        os.close(lock)


def _free(lock: int) -> bool:
    """Lock an open file; False where another process has, or where files cannot be locked."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
