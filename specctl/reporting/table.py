"""A table ready to be shown, as plain text or as Markdown."""

from collections.abc import Iterable
from dataclasses import dataclass

from specctl.statistics.intervals import Interval

UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells ready to be shown.

    Attributes:
        labels: how many leading columns hold words; the others hold numbers.
        note: what a reader has to know to read it.
        alarm: whether it reports something that must not be overlooked.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1
    note: str = ""
    alarm: bool = False


def as_text(shown: Iterable[Table]) -> str:
    """Aligned plain text."""
    return "\n\n".join("\n".join(_text_lines(table)) for table in shown) + "\n"


def as_markdown(table: Table) -> str:
    """The table with its note, without its title."""
    lines = []
    if table.columns:
        rules = [":--" if column < table.labels else "--:" for column in range(len(table.columns))]
        lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (table.columns, tuple(rules), *table.rows)]
    if table.note:
        note = f"**{table.note}**" if table.alarm else table.note
        lines += ["", note] if lines else [note]
    return "\n".join(lines) + "\n"


def _text_lines(table: Table) -> Iterable[str]:
    yield f"!!! {table.title} !!!" if table.alarm else table.title
    if table.columns:
        grid = (table.columns, *table.rows)
        widths = [max(len(_one_line(row[column])) for row in grid) for column in range(len(table.columns))]
        for row in grid:
            cells = [
                _one_line(cell).ljust(width) if column < table.labels else _one_line(cell).rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  ".join(cells).rstrip()
    if table.note:
        yield table.note


def _one_line(cell: str) -> str:
    return " ".join(cell.split())


def _escaped(cell: str) -> str:
    return _one_line(cell).replace("\\", "\\\\").replace("|", "\\|")


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
