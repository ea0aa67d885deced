"""Text on a terminal in lines that end between words, also while it grows."""

import re
import shutil

from rich.cells import cell_len

from specctl.outputs import Sink
from specctl.printable import harmless

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_NARROWEST = 20
"""Columns below which a terminal breaks lines as it likes."""


def wrapped(sink: Sink) -> Sink:
    """The sink, or where it is a terminal one that breaks lines between words."""
    return WordWrap(sink) if sink.isatty() else sink


class WordWrap:
    """A sink that writes a line feed for the space at which a line would leave the terminal's width.

    The last word of what was written is held back until it has an end, or until `end`: the next token may go on with
    it. A word that is wider than the terminal is left to the terminal.

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
        """Write what can be written; the last word may still be growing."""
        self._sink.flush()

    def write(self, text: str) -> int:
        self._sink.write(self.laid_out(text))
        return len(text)

    def end(self) -> None:
        """Write the last word too."""
        self._sink.write(self.rest())
        self._sink.flush()

    def laid_out(self, text: str) -> str:
        """What a terminal gets for more text."""
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
        """The last word, which then has ended, and what is behind it."""
        told = self._placed(shutil.get_terminal_size().columns) + self._space
        self._column += cell_len(self._space)
        self._space = ""
        return told

    def _placed(self, width: int) -> str:
        """The word that has ended, behind its space or on a line of its own."""
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
