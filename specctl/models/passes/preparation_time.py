"""Time spent on compiling and capturing passes, which happens once and is not part of any round."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class _Spent(threading.local):
    """The state of one thread.

    Attributes:
        seconds: the time that `working_seconds` leaves out.
        prepared: the part of it that was spent on `preparing`.
        within: whether it is `preparing`.
    """

    seconds = 0.0
    prepared = 0.0
    within = False


_spent = _Spent()


def working_seconds() -> float:
    """A clock in seconds that stops while this thread is `preparing`; only differences are meaningful."""
    return perf_counter() - _spent.seconds


def waited_seconds() -> float:
    """How long the clock stopped for the work of others, see `OwnClock`; only differences are meaningful."""
    return _spent.seconds - _spent.prepared


@contextmanager
def preparing() -> Iterator[None]:
    """Time within this context does not count as work, see `working_seconds`."""
    if _spent.within:
        yield
        return
    began, _spent.within = perf_counter(), True
    try:
        yield
    finally:
        took = perf_counter() - began
        _spent.seconds, _spent.prepared = _spent.seconds + took, _spent.prepared + took
        _spent.within = False


class OwnClock:
    """Within it `working_seconds` starts at a given value in this thread; afterwards it continues as before.

    Args:
        seconds: the start value.
    """

    __slots__ = ("_kept", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._kept = _spent.seconds
        _spent.seconds = perf_counter() - self._seconds

    def __exit__(self, *_: object) -> None:
        _spent.seconds = self._kept
