"""Tables on a terminal, or as aligned plain text where there is none."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from specctl.printable import one_line
from specctl.reporting.table import Table, as_text


def print_tables(console: Console, shown: Iterable[Table]) -> None:
    """Write tables with their notes; as aligned plain text where the console is no terminal.

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
    """Text of a table, with nothing in it that a terminal or rich's markup would obey."""
    return Text(one_line(text), style=style)


def _fitting(table: Table, width: int) -> Iterator[RichTable]:
    """The table, in several parts that repeat the labels where its columns do not fit the width."""
    # Headings wrap between words, cells never: a number in two pieces is hard to read.
    widths = [
        max(cell_len(one_line(text)) for text in (*name.split(), *(row[index] for row in table.rows)))
        for index, name in enumerate(table.columns)
    ]
    labels = list(range(table.labels))
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
        shown.add_row(*(cell(row[index]) for index in columns))
        above = row
    return shown
