"""Keeps typed characters off the screen while a display is drawn there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unechoed() -> Iterator[None]:
    """Show nothing of what is typed while the block runs; it stays in the terminal for the next read.

    Even the ``^C`` of an interrupt would move the cursor, and a display could then not be erased completely.
    """
    try:
        import termios

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, AttributeError):  # no terminal, or a system without termios
        yield
        return
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
