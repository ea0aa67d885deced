"""Locks on outputs: one writer at a time; and folders of processes that were killed.

A lock is advisory and belongs to an open file, so it ends with its process, however that ends. Where the platform has
no `flock` (Windows), or the file system does not support it, nothing is locked: a second writer is not noticed there,
and no folder is taken for abandoned.
"""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from time import time

ABANDONED = 3600.0
"""Seconds after which a folder that nobody has locked is taken for one of a process that was killed."""


def locked(descriptor: int) -> bool:
    """Lock an open file or folder for as long as it is open; False if another process has locked it."""
    return _obtained(descriptor) is not False


def remove_abandoned(folder: Path, lock: Path) -> None:
    """Remove a folder of this user's in which nothing is newer than `ABANDONED`, if no process has its lock.

    What is no folder, or cannot be removed, stays.

    Args:
        folder: which a process may have made that was killed.
        lock: the file that this process had locked while it lived, in the folder or elsewhere; created where missing.
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
