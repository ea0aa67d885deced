"""Ctrl-C: what it ends, and where it came."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import NoReturn


class Interrupt:
    """Handles Ctrl-C as Python does, and remembers the calls that were under way.

    Native code may drop a KeyboardInterrupt of a function that it calls and raise another error in its place: torch
    does so where it asks an object for its first item.
    """

    def __init__(self) -> None:
        self._calls: set[tuple[CodeType, int]] = set()

    def __call__(self, _signal: int, frame: FrameType | None) -> NoReturn:
        self._calls.clear()
        while frame is not None:
            self._calls.add((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        raise KeyboardInterrupt

    def became(self, error: BaseException) -> bool:
        """Whether an error, or one that it arose from, came out of a call that was under way at the last Ctrl-C."""
        cause: BaseException | None = error
        while cause is not None:
            at = cause.__traceback__
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            if at is not None and (at.tb_frame.f_code, at.tb_lasti) in self._calls:
                return True
            cause = cause.__context__
        return False


interrupt = Interrupt()


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Note a first Ctrl-C while the block runs, and raise KeyboardInterrupt at a second one only.

    Yields a function that says whether there was one.
    """
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
