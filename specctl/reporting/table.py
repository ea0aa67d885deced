"""A table ready to be shown, as plain text or as Markdown."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, TypeVar

from tabulate import tabulate

from specctl.printable import one_line
from specctl.statistics.intervals import Interval

UNKNOWN = "-"
Item = TypeVar("Item")
Columns = dict[str, Callable[[Item], str]]
"""Headings, each with what makes the cell of an item."""
BLOCK = "█"
"""What bars of a table are drawn with."""
UP, DOWN = " ↑", " ↓"
"""Mark the heading of a column in which higher, or lower, is better."""
DEFINITIONS = "`specctl words` explains columns."
"""Stands in the note of the first table of a command."""
WIDE = 120
"""Characters of a plain line from which on headings are broken into several lines."""
_JOINED = "\N{NO-BREAK SPACE}"
"""Keeps an arrow on the line of its heading's last word."""
_MARKUP = re.compile(r"[\\`*|]|<(?=[\w/!?])|\](?=[(:])|&(?=[\w#])|(?<![^\W_])_|_(?![^\W_])|#$")
"""Characters that would begin or end code, emphasis, a cell, a heading, HTML, a link or an entity."""
_BLOCK_START = re.compile(r"^(\d+(?=[.)](?:\s|$))|)([-#+=~.)>])")
"""What could make a paragraph a list, a heading, a quotation or a fence."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells ready to be shown.

    Attributes:
        title: of the table; the whole message where there are no columns.
        columns: headings.
        rows: cells, each row as long as ``columns``.
        labels: how many leading columns contain words; the others contain numbers.
        note: what a reader needs to know about these numbers.
        alarm: whether it reports something that must not be overlooked.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    note: str = ""
    alarm: bool = False

    @classmethod
    def of(cls, title: str, columns: Columns[Item], items: Iterable[Item], **more: Any) -> "Table":
        """A row for each item; ``more`` are further attributes."""
        return cls(title, tuple(columns), tuple(tuple(cell(one) for cell in columns.values()) for one in items), **more)

    @property
    def without_bars(self) -> "Table":
        """The table without columns that are drawn with blocks, for places that have pictures."""
        kept = [
            index
            for index in range(len(self.columns))
            if not self.rows or any({*row[index]} != {BLOCK} for row in self.rows)
        ]
        if len(kept) == len(self.columns):
            return self
        columns, *rows = (tuple(row[index] for index in kept) for row in (self.columns, *self.rows))
        labels = sum(index < self.labels for index in kept)
        return replace(self, columns=columns, rows=tuple(rows), labels=labels)

    @property
    def grid(self) -> list[list[str]]:
        """Headings and rows, each cell on one line."""
        return [list(map(_one_line, row)) for row in (self.columns, *self.rows)]

    @property
    def alignment(self) -> tuple[str, ...]:
        """``left`` or ``right`` for each column."""
        return tuple("left" if column < self.labels else "right" for column in range(len(self.columns)))


def as_text(shown: Iterable[Table]) -> str:
    """Aligned plain text."""
    return "\n\n".join("\n".join(_text_lines(table)) for table in shown) + "\n"


def as_markdown(table: Table) -> str:
    """The table with its note, without its title. Whatever cells and note contain is shown literally."""
    parts = []
    if table.columns:
        headings, *rows = ([_escaped(cell) for cell in row] for row in table.grid)
        parts.append(_aligned(rows, table, "pipe", headings))
    if table.note:
        note = inert(table.note)
        parts.append(f"**{note}**" if table.alarm else note)
    return "\n\n".join(parts) + "\n"


def inert(text: str) -> str:
    """Text as a Markdown paragraph or heading of one line that shows it literally."""
    return _BLOCK_START.sub(r"\1\\\2", _escaped(_one_line(text)))


def _text_lines(table: Table) -> Iterator[str]:
    yield f"!!! {table.title} !!!" if table.alarm else table.title
    if table.columns:
        lines = _plain_lines(table, [[heading] for heading in table.grid[0]])
        if max(map(len, lines)) > WIDE:
            lines = _plain_lines(table, [_narrowed(*column) for column in zip(*table.grid, strict=True)])
        yield from lines
    if table.note:
        yield table.note


def _plain_lines(table: Table, headings: Sequence[Sequence[str]]) -> list[str]:
    """The lines of the table with the lines of each heading, which end above the first row."""
    height = max(map(len, headings))
    above = zip(*([""] * (height - len(lines)) + [*lines] for lines in headings), strict=True)
    grid = [*map(list, above), *table.grid[1:]]
    return [line.rstrip() for line in _aligned(grid, table, "plain").splitlines()]


def _narrowed(heading: str, *cells: str) -> list[str]:
    """A heading broken between words to the width of its column's cells."""
    joined = heading.replace(UP, f"{_JOINED}{UP[1:]}").replace(DOWN, f"{_JOINED}{DOWN[1:]}")
    room = max(1, *map(len, (*cells, *joined.split(" "))))
    lines = wrap(joined, room, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_JOINED, " ") for line in lines] or [""]


def _aligned(grid: Sequence[Sequence[str]], table: Table, form: str, headings: Sequence[str] = ()) -> str:
    # Numbers are strings that are ready to be shown: parsed, they would lose their decimals.
    return tabulate(grid, headings, tablefmt=form, colalign=table.alignment, disable_numparse=True)


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: f"\\{found[0]}", one_line(text))


def _one_line(cell: str) -> str:
    return " ".join(cell.split())


def show_interval(interval: Interval | None) -> str:
    """E.g. ``1.43 [1.38, 1.48]``."""
    if interval is None:
        return UNKNOWN
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def number(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"
