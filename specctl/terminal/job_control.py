"""What a terminal's owner does to it while something is drawn there: stops the program, goes on, changes the size."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specctl.terminal.display import Display


@contextmanager
def obeyed(drawn: "Display") -> Iterator[None]:
    """Hide what is drawn before Ctrl-Z stops the process, show it when the process goes on in the foreground.

    Python calls signal handlers in the main thread only, between two steps of Python code; during a long forward pass
    the terminal would be left as it is until the pass ends. So a thread of our own reads the signals as they arrive.
    Handlers can be set in the main thread only; in another one nothing is done, nor on a system without these signals.
    """
    if current_thread() is not main_thread() or not hasattr(signal, "SIGTSTP"):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Without a handler a signal is not reported. Where a parent has it ignored, it stays ignored.
    watched = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
    handled = [number for number in watched if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, lambda *_: None) for number in handled}
    earlier_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = Thread(target=_obey, args=(reading, drawn), name="job control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def in_foreground(terminal: int) -> bool:
    """Whether this process may draw on the terminal of a file descriptor: a shell's background job may not."""
    if not hasattr(os, "tcgetpgrp"):
        return True
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not this session's terminal, so no job control either
        return True


def _obey(reading: int, drawn: "Display") -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number == signal.SIGTSTP and _stoppable():
                drawn.hide()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                drawn.show()
            elif number == signal.SIGWINCH:
                drawn.resized()


def _stoppable() -> bool:
    """Whether a shell is there that could continue this process: in the group of its session's leader none is."""
    with suppress(OSError):
        return os.getpgrp() != os.getsid(0)
    return False
