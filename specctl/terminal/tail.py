"""The end of a growing text, laid out in lines that do not move while the text grows."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from specctl.printable import printable

KEPT_LINES = 256
KEPT_PIECES = 4096
KEPT_CHARS = 8192


class Origin(StrEnum):
    """Where a piece of the generated text comes from; text of a target without a draft counts as bonus.

    Copied text was accepted too: of a lookup that drafts in turn with a model.
    """

    ACCEPTED = "accepted"
    COPIED = "copied"
    CORRECTION = "correction"
    BONUS = "bonus"


# Each differs from the others without colour too, for NO_COLOR.
ORIGIN_STYLES = {
    Origin.ACCEPTED: "green",
    Origin.COPIED: "italic blue",
    Origin.CORRECTION: "yellow underline",
    Origin.BONUS: "bold cyan",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that a group of newly emitted tokens of one origin added; may be empty."""

    text: str
    origin: Origin


class TextTail:
    """The last lines of a text that only grows.

    Each finished line is laid out and rendered once, so that adding and drawing cost the same however long the text is.
    Lines further back than a screen are dropped.

    Args:
        prompt: text before the generated text; drawn dim.
    """

    def __init__(self, prompt: str) -> None:
        self._kept = deque([(prompt[-KEPT_CHARS:], "dim")], maxlen=KEPT_PIECES)
        self._lines: deque[list[Segment]] = deque(maxlen=KEPT_LINES)
        self._open = Text()
        self._width = 0

    def append(self, console: Console, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            kept = (piece.text[-KEPT_CHARS:], ORIGIN_STYLES[piece.origin])
            self._kept.append(kept)
            if self._width:
                self._write(console, *kept)

    def lines(self, console: Console, width: int, rows: int) -> list[list[Segment]]:
        """At most ``rows`` last lines, each exactly ``width`` cells wide (2 or more; ``rows`` 1 or more)."""
        if width != self._width:
            self._width = width
            self._lines.clear()
            self._open = Text()
            for text, style in self._kept:
                self._write(console, text, style)
        finished = list(self._lines)[-(rows - 1) :] if rows > 1 else []
        return [*finished, self._rendered(console, self._open)]

    def _write(self, console: Console, text: str, style: str) -> None:
        for number, part in enumerate(printable(text).split("\n")):
            if number:
                self._finish(console, self._open)
                self._open = Text()
            for start in range(0, len(part), self._width):
                self._open.append(part[start : start + self._width], style)
                self._break_lines(console)

    def _break_lines(self, console: Console) -> None:
        # The length counts too: zero-width characters would otherwise pile up on a line without end.
        limit = 4 * self._width
        while len(self._open) > limit or cell_len(self._open.plain) > self._width:
            line, self._open = self._open.divide([_break_position(self._open.plain[:limit], self._width)])
            self._finish(console, line)

    def _finish(self, console: Console, line: Text) -> None:
        self._lines.append(self._rendered(console, line))

    def _rendered(self, console: Console, line: Text) -> list[Segment]:
        return Segment.adjust_line_length(list(Segment.simplify(line.render(console))), self._width)


def _break_position(text: str, width: int) -> int:
    fitting = next(map(len, chop_cells(text, width)), len(text))
    after_space = text.rfind(" ", 0, fitting + 1) + 1
    return after_space if text[:after_space].strip() else fitting
