"""Lines from a person at a terminal: editing, history, and continuation lines."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

CONTINUES = "\\"
_FIRST, _NEXT = "> ", ". "


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Join each line that ends in a backslash with the next one."""
    parts: list[str] = []
    for line in lines:
        parts.append(line.removesuffix(CONTINUES))
        if not line.endswith(CONTINUES):
            yield "\n".join(parts)
            parts.clear()
    if parts:
        yield "\n".join(parts)


class LineInput:
    """Asks for lines on the terminal; with readline also line editing, history and pasting of several lines.

    Args:
        words: completed by the Tab key at the start of a line.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self._edits = sys.stdout.isatty() and _prepare_readline(list(words))

    def ask(self) -> str:
        """The next complete input; raises EOFError at the end, and KeyboardInterrupt, which discards partial input."""
        return next(joined(self._lines()))

    def _lines(self) -> Iterator[str]:
        prompt = _FIRST
        while True:
            yield self._line(prompt)
            prompt = _NEXT

    def _line(self, prompt: str) -> str:
        if self._edits:
            return input(prompt)
        # Standard output may be a file that should hold answers only.
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def _prepare_readline(words: list[str]) -> bool:
    """Set readline up for `input`; returns whether readline exists."""
    try:
        import readline
    except ImportError:
        return False
    libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    if not libedit:
        readline.parse_and_bind("set enable-bracketed-paste on")  # pasted line breaks do not end the input
    readline.set_completer_delims("")
    readline.set_completer(_completer(words))
    return True


def _completer(words: list[str]) -> Callable[[str, int], str | None]:
    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if text and word.startswith(text)]
        return found[state] if state < len(found) else None

    return complete


@contextmanager
def unechoed() -> Iterator[None]:
    """Hide typed characters while the block runs; they stay in the terminal for the next read.

    Even the echoed ``^C`` of an interrupt moves the cursor, and a display could not be erased completely.
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
