"""Signals as they arrive: Python's own handlers wait until native code returns."""

import os
import signal
import threading
from collections.abc import Callable


class Arrivals:
    """Tells of every signal that Python handles, from a thread of its own, whatever the main thread is in.

    Outside of the main thread, and where something else listens already, nothing is told.

    Args:
        heard: called with a signal's number, in that thread.
    """

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._ear: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        other = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            os.close(ear)
            os.close(self._mouth)
            return
        self._ear = ear
        threading.Thread(target=_listen, args=(ear, heard), name="signals", daemon=True).start()

    def close(self) -> None:
        """Tell no more. Outside of the main thread this does nothing: only there can it be changed."""
        if self._ear is not None and threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current != self._mouth:  # something else listens since
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            os.close(self._mouth)
            self._ear = None


def _listen(ear: int, heard: Callable[[int], None]) -> None:
    while arrived := os.read(ear, 64):
        for number in arrived:
            heard(number)
    os.close(ear)
