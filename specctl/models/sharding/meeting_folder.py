"""The folder in which the ranks of a group meet."""

import os
import tempfile
from pathlib import Path

from specctl.outputs.locks import locked, remove_abandoned

PREFIX = "specctl-shards-"
_LOCK = "lock"


class MeetingFolder:
    """A folder of this user's among the temporary files; locked, so that others see that its process lives.

    Those of leaders that were killed are removed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_abandoned(left, left / _LOCK)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        locked(self._lock)

    def remove(self) -> None:
        """Remove it with what is in it."""
        os.close(self._lock)
        self._folder.cleanup()
