"""Time spent on compiling and capturing passes, which happens once and belongs to no round."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class _Spent(threading.local):
    """Of one thread.

    Attributes:
        seconds: what `working_seconds` leaves out.
        prepared: the part of it that was spent on `preparing`.
        within: whether it is `preparing`.
    """

    seconds = 0.0
    prepared = 0.0
    within = False


_spent = _Spent()


def working_seconds() -> float:
    """A clock in seconds that stands still while this thread is `preparing`; only differences mean anything."""
    return perf_counter() - _spent.seconds


def waited_seconds() -> float:
    """How long the clock stood still for what others did, as `OwnClock` has it; only differences mean anything."""
    return _spent.seconds - _spent.prepared


@contextmanager
def preparing() -> Iterator[None]:
    """Whatever this takes is not work, see `working_seconds`."""
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
    """Within it `working_seconds` starts from these seconds in this thread; afterwards it goes on as before.

    Args:
        seconds: where it stands.
    """

    __slots__ = ("_kept", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._kept = _spent.seconds
        _spent.seconds = perf_counter() - self._seconds

    def __exit__(self, *_: object) -> None:
        _spent.seconds = self._kept
