"""Tables, the columns they share, and their forms: plain text and Markdown."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar

from tabulate import tabulate

from specctl.printable import one_line
from specctl.statistics import Interval

UNKNOWN = "-"
UP, DOWN = " ↑", " ↓"  # Mark columns in which higher, or lower, is better
Item = TypeVar("Item")
Columns = Mapping[str, Callable[[Item], object]]
"""Names of `COLUMNS`, each with a function from an item to its value: finished text, a number, or None if unknown."""
BLOCK = "█"  # The character of bars in a table
DEFINITIONS = "`specctl words` explains columns."  # Part of the note below the first table of a command
WIDE = 120  # Width of a plain line above which headings are broken into several lines
_JOINED = "\N{NO-BREAK SPACE}"  # Keeps an arrow on the line with the heading's last word
_PLACEHOLDER = re.compile(r"\b(?:NAME|N)\b")
_MARKUP = re.compile(r"[\\`*|]|<(?=[\w/!?])|\](?=[(:])|&(?=[\w#])|(?<![^\W_])_|_(?![^\W_])|#$")
"""Characters that begin or end code, emphasis, a cell, a heading, HTML, a link or an entity."""
_BLOCK_START = re.compile(r"^(\d+(?=[.)](?:\s|$))|)([-#+=~.)>])")
"""Beginnings that turn a paragraph into a list, a heading, a quotation or a fence."""


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


def fixed(decimals: int) -> Callable[[Any], str]:
    """A function that formats a number with this many decimals."""
    return lambda value: f"{value:.{decimals}f}"


class Column(NamedTuple):
    """The format of a column in every table; docs/words.md defines its meaning."""

    better: str  # whether its heading is marked with `UP`, `DOWN` or nothing
    cell: Callable[[Any], str]  # makes the text of a known value


COLUMNS = {
    name: Column(better, cell)
    for better, cell, names in (
        # labels of rows, and finished texts
        (
            "",
            str,
            "candidate; policy; head; draft; profile; setting; engine; category; prompt; answers; by; signal",
        ),
        (
            "",
            str,
            "length; concurrency; repeat; turn; position; latency; simulated; bound or estimate; verdict; depth; K",
        ),
        ("", str, "prompts; runs; requests; texts; tokens; block; steps; tokens in a pass; file; side; started; fact"),
        ("", str, "in A; in B; none's token; its token; logit gap; why; settings of; version; device; weights; cache"),
        (
            "",
            str,
            "draft length; accepted length; nodes; accepted; acceptance; draft entropy (nats); pays at target ms",
        ),
        ("", str, "95% interval; off by; best constant; best threshold; best signal; predicted"),
        (UP, str, "of oracle; of specctl; measured speedup; predicted speedup"),
        (DOWN, str, "differ; failed; texts differ"),
        # speeds and times
        (UP, fixed(1), "tokens/s; A tokens/s; B tokens/s; measured tokens/s; predicted tokens/s; simulated tokens/s"),
        (UP, fixed(1), "none, tokens/s; its tokens/s; tokens/s with a threshold"),
        (UP, fixed(2), "requests/s; tokens/step; simulated speedup"),
        (DOWN, fixed(1), "first token ms"),
        (DOWN, fixed(2), "mean ms; p50 ms; p90 ms; p99 ms; ms/token"),
        (DOWN, fixed(3), "NAME ms; ms/step; ms/token (eq. 5.1); loop overhead"),
        (UP, show_interval, "speedup; speedup (totals); speedup (mean of prompts); B/A; against none"),
        (DOWN, show_interval, "TTFT B/A; TPOT B/A"),
        # drafting
        (UP, percent, "acceptance rate; fewest passes / passes; oracle time / time; signal bound / time; token N"),
        (UP, fixed(2), "mean acceptance length; of N"),
        (DOWN, fixed(3), "verification rate; discard rate; draft rate; redundancy; target passes/token"),
        ("", fixed(3), "NAME passes/token"),
        (DOWN, fixed(3), "NAME sigma; NAME eta"),
        ("", percent, "stop: policy; stop: max_draft; stop: budget; stop: eos"),
        ("", percent, "time: draft; time: verify; time: prefill; time: other"),
        # signals, predictions and bounds
        (UP, fixed(3), "AUROC"),
        (DOWN, fixed(3), "calibration error; mean gap; mean |gap|"),
        (DOWN, fixed(4), "KL (nats); weighted loss; weighted loss (nats)"),
        (DOWN, percent, "vacuous; above the truth"),
        ("", percent, "argmax agreement"),
        ("", fixed(2), "mean accepted in a row"),
        ("", fixed(3), "mean; sd; 10%; 25%; 30%; median; 70%; 75%; 90%; H_q; H_{q,p}; KL(q||p)"),
        ("", fixed(3), "acceptance probability; mean prediction"),
        ("", fixed(4), "best signal's loss"),
    )
    for name in names.split("; ")
}
"""Every column by name; NAME stands for a model or a part."""


def column(name: str) -> Column:
    """The column of this name; raises KeyError if there is none."""
    if name in COLUMNS:
        return COLUMNS[name]
    return next((found for known, found in COLUMNS.items() if stands_for(known, name)), None) or COLUMNS[name]


def stands_for(word: str, name: str) -> bool:
    """Whether a name is this word with its placeholders, NAME and N, filled in."""
    return re.fullmatch(".+".join(map(re.escape, _PLACEHOLDER.split(word))), name) is not None


@dataclass(frozen=True, slots=True)
class Table:
    """Cells ready to be shown."""

    title: str  # of the table; the whole message where there are no columns
    columns: tuple[str, ...]  # headings
    rows: tuple[tuple[str, ...], ...]  # cells, each row as long as ``columns``
    labels: int = 1  # how many leading columns contain words; the others contain numbers
    note: str = ""  # explanation of the numbers
    alarm: bool = False  # whether it must not be overlooked

    @classmethod
    def of(cls, title: str, columns: Columns[Item], items: Iterable[Item], **more: Any) -> "Table":
        """A table with one row per item, formatted by `COLUMNS`; ``more`` are further attributes."""
        return cls.filled(title, columns, ([value(one) for value in columns.values()] for one in items), **more)

    @classmethod
    def filled(cls, title: str, names: Iterable[str], rows: Iterable[Sequence[object]], **more: Any) -> "Table":
        """A table of values, formatted by the entries of `COLUMNS` with these names.

        Args:
            title, more: attributes.
            names: of columns.
            rows: values as in `Columns`.
        """
        names = tuple(names)
        known = [column(name) for name in names]
        headings = tuple(name + shown.better for name, shown in zip(names, known, strict=True))
        return cls(title, headings, tuple(tuple(map(_cell, known, row)) for row in rows), **more)

    @property
    def without_bars(self) -> "Table":
        """The table without columns of bars, for output with pictures."""
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


def _cell(shown: Column, value: object) -> str:
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else shown.cell(value)


def as_text(shown: Iterable[Table]) -> str:
    """Aligned plain text."""
    return "\n\n".join("\n".join(_text_lines(table)) for table in shown) + "\n"


def as_markdown(table: Table) -> str:
    """The table with its note, without its title. Cells and note are escaped."""
    parts = []
    if table.columns:
        headings, *rows = ([_escaped(cell) for cell in row] for row in table.grid)
        parts.append(_aligned(rows, table, "pipe", headings))
    if table.note:
        note = inert(table.note)
        parts.append(f"**{note}**" if table.alarm else note)
    return "\n\n".join(parts) + "\n"


def inert(text: str) -> str:
    """Text escaped as a Markdown paragraph or heading of one line."""
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
    """The lines of the table; headings of several lines are aligned at the bottom."""
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
    # Numbers are finished strings; parsing them would lose trailing decimals.
    return tabulate(grid, headings, tablefmt=form, colalign=table.alignment, disable_numparse=True)


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: f"\\{found[0]}", one_line(text))


def _one_line(cell: str) -> str:
    return " ".join(cell.split())


def plain(value: Any, *, digits: int | None = None, optional: Set[str] = frozenset()) -> Any:
    """Dataclasses, named tuples and mappings as dicts, other sequences as lists, everything inside them too.

    Args:
        value: to convert.
        digits: decimals that floats are rounded to; None leaves them as they are.
        optional: names of dataclass fields that are left out where they are empty.
    """

    def inner(item: Any) -> Any:
        return plain(item, digits=digits, optional=optional)

    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: inner(item) for name, item in items.items() if item or name not in optional}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: inner(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    return round(value, digits) if digits is not None and isinstance(value, float) else value
