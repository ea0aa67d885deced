"""Signals are told as they arrive, and who listens otherwise is left alone."""

import queue
import signal
import socket

import pytest

from specctl.processes import Arrivals


@pytest.fixture
def handled():
    """A signal that Python handles."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def listening():
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found


def test_a_signal_is_told_and_nothing_after_the_end(handled):
    heard = queue.SimpleQueue()
    arrivals = Arrivals(heard.put)
    signal.raise_signal(handled)
    assert heard.get(timeout=60) == handled
    arrivals.close()
    assert listening() == -1
    signal.raise_signal(handled)
    arrivals.close()
    assert heard.empty()


def test_who_listens_before_or_since_goes_on_listening(handled):
    mine, other = socket.socketpair()
    other.setblocking(False)
    heard = queue.SimpleQueue()
    with mine, other:
        signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
        try:
            Arrivals(heard.put).close()
            assert listening() == other.fileno()
            signal.set_wakeup_fd(-1)
            arrivals = Arrivals(heard.put)
            signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
            arrivals.close()
            signal.raise_signal(handled)
            assert mine.recv(1) == bytes([handled])
        finally:
            signal.set_wakeup_fd(-1)
    assert heard.empty()
