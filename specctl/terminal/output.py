"""Text on standard output and messages on standard error, without terminal control sequences."""

import os
import re
import shutil
import sys
import textwrap
from contextlib import suppress

from rich.cells import cell_len

from specctl.outputs import Sink
from specctl.printable import escaped, harmless, printable

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_NARROWEST = 20  # Width below which wrapping is left to the terminal


def wrapped(sink: Sink) -> Sink:
    """The sink itself, or for a terminal a sink that breaks lines between words."""
    return WordWrap(sink) if sink.isatty() else sink


class WordWrap:
    """A sink that replaces a space by a line feed where a line would exceed the terminal's width.

    The last word is held back until it is complete, or until `end`, because the next token may continue it. The
    terminal breaks words wider than itself.

    Args:
        sink: a terminal.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._column = 0
        self._space = self._word = ""

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        """Flush the sink; the last word, which may still grow, is held back."""
        self._sink.flush()

    def write(self, text: str) -> int:
        self._sink.write(self.laid_out(text))
        return len(text)

    def end(self) -> None:
        """Write the last word too."""
        self._sink.write(self.rest())
        self._sink.flush()

    def laid_out(self, text: str) -> str:
        """The output for more text."""
        width = shutil.get_terminal_size().columns
        laid: list[str] = []
        for part in _PARTS.findall(harmless(text)):
            if part == "\n":
                laid += [self._placed(width), self._space, "\n"]
                self._column, self._space = 0, ""
            elif part.isspace():
                laid.append(self._placed(width))
                self._space += part
            else:
                self._word += part
        return "".join(laid)

    def rest(self) -> str:
        """The last word, which then counts as complete, and the text after it."""
        told = self._placed(shutil.get_terminal_size().columns) + self._space
        self._column += cell_len(self._space)
        self._space = ""
        return told

    def _placed(self, width: int) -> str:
        """The completed word, after its space or on a new line."""
        if not self._word:
            return ""
        space, word = self._space, self._word
        self._space = self._word = ""
        room, wide = cell_len(space), cell_len(word)
        if space and wide < width >= _NARROWEST and self._column + room + wide > width:
            self._column = wide
            return f"\n{word}"
        self._column = (self._column + room + wide) % width if wide > width else self._column + room + wide
        return f"{space}{word}"


_INTERVAL = re.compile(r"\d[\d.,]*x? \(\d[\d.]* to \d[\d.]*")  # A number with its interval: ``1.31x (1.16 to 1.65)``
_JOINED = "\N{NO-BREAK SPACE}"


def write_text(sink: Sink, text: str) -> None:
    """Write text that may come from a model or a file; cleaned for a terminal, unchanged for a file or a pipe."""
    sink.write(harmless(text) if sink.isatty() else text)


def write_out(text: str) -> None:
    """`write_text` on standard output, with a line feed after it."""
    if sys.stdout is not None:
        write_text(sys.stdout, f"{text}\n")


def write_sentence(text: str) -> None:
    """`write_out` for one line; for a terminal broken between words, never within a number and its interval."""
    broken = sys.stdout is not None and sys.stdout.isatty()
    write_out(_wrapped(text) if broken else text)


def write_json(document: str) -> None:
    """`write_out` for a JSON document; a terminal receives JSON escapes, which keep its meaning.

    The same escapes are used everywhere if the document is not valid UTF-8, for example because of a file name.
    """
    if sys.stdout is not None:
        sys.stdout.write((escaped(document) if sys.stdout.isatty() or not _is_text(document) else document) + "\n")


def _is_text(document: str) -> bool:
    try:
        document.encode()
    except UnicodeEncodeError:
        return False
    return True


def print_message(text: str, label: str = "", style: str = "") -> None:
    """Write a message to standard error, cleaned even for a file, because logs are read in terminals.

    Args:
        text: one or several lines.
        label: stands before the text, with a colon.
        style: parameters of the escape sequence that colours the label on a terminal.
    """
    colour = style and sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    start = f"\033[{style}m{label}:\033[0m " if colour else f"{label}: " if label else ""
    told = printable(text)
    if sys.stderr is not None and sys.stderr.isatty():
        told = _wrapped(told, len(label) + 2 if label else 0)
    with suppress(OSError):  # standard error may be closed
        print(start + told, file=sys.stderr, flush=True)


def _wrapped(text: str, before: int = 0) -> str:
    """The text with its lines broken between words for a terminal; indented ones stay whole, to be copied."""
    width = max(shutil.get_terminal_size().columns, 20)
    lines: list[str] = []
    for line in text.split("\n"):
        taken = "" if lines else " " * before
        joined = _INTERVAL.sub(lambda found: found[0].replace(" ", _JOINED), line)
        parts = textwrap.wrap(joined, width, initial_indent=taken, break_long_words=False, break_on_hyphens=False)
        parts = [part.replace(_JOINED, " ") for part in parts]
        whole = line.startswith(" ") or len(parts) < 2
        lines += [line] if whole else [parts[0].removeprefix(taken), *parts[1:]]
    return "\n".join(lines)
