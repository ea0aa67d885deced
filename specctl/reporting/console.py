"""Tables on a terminal, or as aligned plain text where there is none."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from specctl.printable import one_line
from specctl.reporting.table import Table, as_text

_FOLDED = 28  # Least width to which a label is folded
_PIECES = re.compile(r"[^,:(]+[,:(]?|[,:(]")


def print_tables(console: Console, shown: Iterable[Table]) -> None:
    """Write tables with their notes; as aligned plain text where the console is not a terminal.

    An alarm has a red frame.
    """
    shown = list(shown)
    if not console.is_terminal:
        console.file.write(as_text(shown))
        return
    for table in shown:
        style = "bold red" if table.alarm else "bold"
        console.print(cell(table.title, style), soft_wrap=True)
        if table.columns:
            console.print(*_fitting(table, console.width), sep="\n")
        if table.note:
            console.print(cell(table.note, "bold red" if table.alarm else "dim"))
        console.print()


def cell(text: str, style: str = "") -> Text:
    """Text of a table, without terminal control sequences and rich markup."""
    return Text(one_line(text), style=style)


def _folded(text: str, room: int) -> Text:
    """The text of a cell, broken after commas if it is wider than its column."""
    lines = [""]
    for piece in _PIECES.findall(one_line(text)):
        if lines[-1] and cell_len(lines[-1]) + cell_len(piece) > room:
            lines.append("")
        lines[-1] += piece
    return Text("\n".join(lines))


def _fitting(table: Table, width: int) -> Iterator[RichTable]:
    """The table; if its columns do not fit the width, several parts that repeat the labels."""
    # Headings may wrap between words; cells of numbers never do, because a broken number is hard to read.
    cells = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    for headings in ([[name] for name in table.columns], [name.split() for name in table.columns]):
        widths = [
            max(cell_len(one_line(text)) for text in (*heading, *column))
            for heading, column in zip(headings, cells, strict=True)
        ]
        if sum(widths) + 2 * len(widths) < width:
            break
    labels = list(range(table.labels))
    # A policy's long label is folded if that saves a second part.
    if table.labels and (too_much := sum(widths) + 2 * len(widths) + 1 - width) > 0:
        longest = max(labels, key=widths.__getitem__)
        if widths[longest] - too_much >= _FOLDED:
            widths[longest] -= too_much
    parts = [list(labels)]
    for index in range(table.labels, len(table.columns)):
        if len(parts[-1]) > table.labels and sum(widths[used] + 2 for used in (*parts[-1], index)) + 1 > width:
            parts.append(list(labels))
        parts[-1].append(index)
    for part in parts:
        yield _rich(table, part, widths)


def _rich(table: Table, columns: Iterable[int], widths: Sequence[int]) -> RichTable:
    shown = RichTable(
        box=box.HEAVY if table.alarm else box.SIMPLE_HEAD,
        border_style="bold red" if table.alarm else "",
        padding=(0, 1, 0, 0),
    )
    columns = list(columns)
    for index in columns:
        justify: JustifyMethod = "left" if index < table.labels else "right"
        shown.add_column(cell(table.columns[index]), justify=justify, width=widths[index], overflow="fold")
    above: Sequence[str] = ()
    for row in table.rows:
        if table.labels > 1 and above and row[0] != above[0]:
            shown.add_section()
        shown.add_row(*(_folded(row[index], widths[index]) for index in columns))
        above = row
    return shown
