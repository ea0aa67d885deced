"""Locks on outputs: one writer at a time.

A lock is advisory and belongs to an open file, so it ends with its process, however that ends. Where the platform has
no `flock` (Windows), or the file system does not support it, nothing is locked: a second writer is not noticed there.
"""

import sys


def locked(descriptor: int) -> bool:
    """Lock an open file or folder for as long as it is open; False if another process has locked it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
