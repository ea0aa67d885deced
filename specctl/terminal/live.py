"""The live view of one or several texts: text coloured by origin, the last rounds, and running figures."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, count, pairwise
from time import monotonic
from typing import NamedTuple, Self

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.text import Text

from specctl.metrics import Metrics, shown_rates
from specctl.printable import one_line, printable
from specctl.records import Completion, FinishReason, Round
from specctl.terminal.display import FullScreen
from specctl.terminal.output import WordWrap


class Figure(NamedTuple):
    """A name and its value, both ready to be shown."""

    label: str
    value: str

    @property
    def text(self) -> Text:
        return Text.assemble((self.label, "dim"), " ", (self.value, "bold"))


def running_figures(metrics: Metrics, max_new_tokens: int, rounds: Sequence[Round]) -> list[Figure]:
    """The figures to show, the most important first; no threshold for a policy without one.

    In a hierarchy every draft, named by its key in the profile, has figures for its forward passes per generated token,
    its redundancy and its threshold.
    """
    figures = [
        Figure("tokens", f"{metrics.generated_tokens} of {max_new_tokens}"),
        Figure("tokens/s", f"{metrics.tokens_per_second:.1f}"),
        *(Figure(label, value) for label, value in shown_rates(metrics)),
    ]
    thresholds = _thresholds(rounds)
    if len(metrics.levels) < 2:
        return [*figures, *(Figure("threshold", f"{value:.3f}") for value in thresholds[:1] if value is not None)]
    for key, level in zip(_keys(), metrics.levels, strict=False):
        passes = level.forwards / metrics.generated_tokens if metrics.generated_tokens else 0.0
        figures.append(Figure(f"{key} passes/token", f"{passes:.3f}"))
        figures.append(Figure(f"{key} redundancy", f"{level.redundancy:.3f}"))
    figures += [
        Figure(f"{key} threshold", f"{value:.3f}")
        for key, value in zip(_keys(), thresholds, strict=False)
        if value is not None
    ]
    return figures


def _thresholds(rounds: Sequence[Round]) -> list[float | None]:
    """Thresholds of the draft and of each level below it, from the last round that has every level."""
    round_ = next((candidate for candidate in reversed(rounds) if candidate.inner), rounds[-1] if rounds else None)
    found: list[float | None] = []
    while round_ is not None:
        found.append(round_.threshold)
        round_ = round_.inner[-1] if round_.inner else None
    return found


def _keys() -> Iterator[str]:
    """The drafts' keys in a profile, from the target's own draft down."""
    return (".".join(["draft"] * depth) for depth in count(1))


def column(figures: Iterable[Figure], width: int) -> list[Text]:
    """One figure per line, label left and value right, each line ``width`` cells."""
    return [
        Text.assemble((figure.label, "dim"), (figure.value.rjust(width - len(figure.label)), "bold"))
        for figure in figures
    ]


def flow(figures: Iterable[Figure], width: int) -> list[Text]:
    """Figures side by side on as few lines of ``width`` cells as possible; no figure is split across lines."""
    lines: list[Text] = []
    for figure in figures:
        entry = figure.text
        entry.truncate(width, overflow="ellipsis")
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


ACCEPTED, DISCARDED = "█", "▒"
BARE, MANY = "·", "+"  # In a round's tree, a cell for no tokens and one for more than nine
COLUMN_WIDTH = 64  # Least width of a column of rounds, in cells, where there are several columns
_LABEL_WIDTH = len(" 40/40 max_draft")


def strip(rounds: Sequence[Round], rows: int, width: int) -> list[Text]:
    """Lines of ``width`` cells that show the last rounds, newest last; in several columns if they fit."""
    columns = max(1, width // COLUMN_WIDTH)
    column_width = width // columns
    shown = rounds[-rows * columns :] if rows > 0 else []
    index_width = len(str(shown[-1].index + 1)) if shown else 0
    scale = _common_scale(shown, max(4, column_width - index_width - 2 - _LABEL_WIDTH))
    cells = [_entry(round_, index_width, scale, column_width) for round_ in shown]
    height = min(rows, len(cells))
    return [_fitted(Text().join(cells[row::height]), width) for row in range(height)]


def bar(round_: Round, scale: float = 1.0) -> Text:
    """A bar with ``scale`` cells per drafted token; in a hierarchy gaps separate the tokens of inner rounds.

    After another gap follow tokens that a lookup copied, in another colour.
    """
    length = max(1, round(round_.drafted * scale)) if round_.drafted else 0
    whole = round_.accepted == round_.drafted
    accepted = length if whole else min(round(round_.accepted * scale), length - 1)
    collected = accumulate(len(inner.emitted) for inner in round_.inner)
    cuts = {cut for tokens in collected if 0 < (cut := round(tokens * scale)) < length}
    copies = round((round_.drafted - round_.copied) * scale) if round_.copied else length
    cuts |= {copies} if 0 < copies < length else set()
    segments = [
        Text.assemble(
            (ACCEPTED * (min(end, accepted) - min(start, accepted)), "green" if start < copies else "blue"),
            (DISCARDED * (max(end, accepted) - max(start, accepted)), "dim"),
        )
        for start, end in pairwise(sorted({0, length} | cuts))
    ]
    return Text(" ").join(segments)


def tree(round_: Round) -> Text:
    """The number of a tree's tokens at each level, one cell each; levels on the accepted path stand out."""
    marks = Text()
    for place, nodes in enumerate(round_.tree):
        mark = BARE if not nodes else str(nodes) if nodes < 10 else MANY
        marks.append(mark, "green" if place < round_.accepted else "dim")
    return marks


def _common_scale(rounds: Sequence[Round], room: int) -> float:
    def scale(round_: Round) -> float:
        gaps = max(0, len(round_.inner) - 1) + (0 < round_.copied < round_.drafted)
        bars = 2 if round_.tree else 1
        return max(room - gaps, (room + 1) // 2) / (bars * round_.drafted)

    return min((scale(round_) for round_ in rounds if round_.drafted), default=1.0, key=lambda value: min(value, 1.0))


def _entry(round_: Round, index_width: int, scale: float, width: int) -> Text:
    stop = round_.stop.value if round_.stop else "target only"
    entry = Text.assemble(
        (f"{round_.index + 1:>{index_width}} ", "dim"),
        bar(round_, min(scale, 1.0)),
        " " if round_.drafted else "",
        *((tree(round_), " ") if round_.tree and scale >= 1 else ()),
        f"{round_.accepted}/{round_.drafted} ",
        (stop, "dim"),
    )
    return _fitted(entry, width)


def _fitted(text: Text, width: int) -> Text:
    text.truncate(width, overflow="crop", pad=True)
    return text


KEPT_LINES = 256
KEPT_PIECES = 4096
KEPT_CHARS = 8192


class Origin(StrEnum):
    """The origin of a piece of generated text; text of a target without a draft counts as bonus.

    Copied text is accepted text from a lookup that drafts in turn with a model.
    """

    ACCEPTED = "accepted"
    COPIED = "copied"
    CORRECTION = "correction"
    BONUS = "bonus"


# Distinct without colour too, for NO_COLOR.
ORIGIN_STYLES = {
    Origin.ACCEPTED: "green",
    Origin.COPIED: "italic blue",
    Origin.CORRECTION: "yellow underline",
    Origin.BONUS: "bold cyan",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """The text added by a group of new tokens of one origin; may be empty."""

    text: str
    origin: Origin


class TextTail:
    """The last lines of a text that only grows.

    Each finished line is laid out and rendered once, so the cost does not grow with the text. Lines further back than a
    screen are dropped.

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
        # The length counts too, because zero-width characters would otherwise make lines endless.
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


KEPT_ROUNDS = 64
FIGURES_WIDTH = 36  # Width of the figures' column next to the strip, in cells
_FRAME = 4
_SIDE_BY_SIDE = (72, 14)
_SMALLEST_FRAMED = (12, 5)
_MOST_BARS = 5
_LEAST_TEXT = 5  # Rows that the figures' column must leave for text and rule
_GAP = "   "


_KEPT = 400  # Most characters of a text on its line, or of a prompt before its completion
_SEEN = 2.0  # Seconds below which a panel was too short to read
_LAST_ROUNDS = 5  # Number of rounds shown below the figures of such a panel
_FINISHED = {
    FinishReason.STOP: "stop (end of sequence or stop string)",
    FinishReason.LENGTH: "length (token limit reached)",
    FinishReason.INTERRUPTED: "interrupted",
}


class ShownText:
    """A text on the screen, coloured by origin, with its last rounds and running figures, fitted to the terminal.

    One thread may add rounds while another draws: they wait in a queue until the next drawing counts them.

    Args:
        view: shows it.
        name: the record's, shown where there are several texts.
        prompt: the text that is continued.

    Attributes:
        tokens: number of its tokens.
        below: screen rows left for other texts.
    """

    def __init__(self, view: "LiveView", name: str, prompt: str) -> None:
        self.name, self.tokens, self.below = name, 0, 0
        self._view, self._end = view, ""
        self._arrived: deque[tuple[Round, Sequence[Piece]]] = deque()
        self._tail = TextTail(prompt)
        self._rounds: deque[Round] = deque(maxlen=KEPT_ROUNDS)
        self._metrics = Metrics()

    def on_round(self, round_: Round, pieces: Sequence[Piece]) -> None:
        """Count a round and the text it added; cheap, since another thread draws."""
        self.tokens += len(round_.emitted)
        self._view.tokens += len(round_.emitted)
        self._end = (self._end + "".join(piece.text for piece in pieces))[-_KEPT:]
        if self._view.drawing:
            self.add(round_, pieces)

    def add(self, round_: Round, pieces: Sequence[Piece]) -> None:
        """Queue a round for the next drawing."""
        self._arrived.append((round_, tuple(pieces)))

    def line(self, width: int) -> Text:
        """Its line while another text is the oldest: the end of its text."""
        start = f"{self.name:>6} {self.tokens:>5} tokens  "
        room, end = max(1, width - len(start)), one_line(self._end)
        return Text.assemble((start, "dim"), end if len(end) <= room else f"…{end[1 - room :]}")

    def finish(self, completion: Completion | None) -> None:
        """Print the summary of the generation, complete or interrupted, once the drawing is erased."""
        console = self._view.console
        if not console.is_terminal:
            return
        if completion is None:
            self._take_in(console)
            metrics, rounds, reason = self._metrics, list(self._rounds), FinishReason.INTERRUPTED
        else:
            metrics, rounds = Metrics.of([completion]), list(completion.rounds)
            reason = completion.finish_reason
        stops = ", ".join(f"{reason} {count}" for reason, count in metrics.stops.most_common())
        figures = running_figures(metrics, self._view.limit, rounds)
        if stops:
            figures.append(Figure("drafting stopped by", stops))
        if completion is not None:
            figures.append(Figure("target passes", str(metrics.rounds)))
            figures.append(Figure("first tokens after", f"{completion.first_token_seconds:.2f} s"))
            figures.append(Figure("total", f"{completion.total_seconds:.2f} s"))
        figures.append(Figure("finished", _FINISHED[reason]))
        # A panel shown only for a moment leaves its last rounds on the screen.
        last = strip(rounds, _LAST_ROUNDS, console.width) if monotonic() - self._view.began < _SEEN else []
        for line in (self._view.heading, *flow(figures, console.width), *last):
            console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._take_in(console)
        width, height = options.max_width, max(1, max(1, console.height - 1) - self.below)
        if width < _SMALLEST_FRAMED[0] or height < _SMALLEST_FRAMED[1]:
            yield _block(self._tail.lines(console, max(2, width), height))
        else:
            yield self._framed(console, width - _FRAME, height - 2)

    def _take_in(self, console: Console) -> None:
        while self._arrived:
            round_, pieces = self._arrived.popleft()
            self._metrics.add_round(round_)
            self._rounds.append(round_)
            self._tail.append(console, pieces)

    def _framed(self, console: Console, width: int, height: int) -> Panel:
        below = self._below(width, height)
        rule: list[RenderableType] = [Rule(style="dim")] if height >= 10 else []
        text = self._tail.lines(console, width, height - len(below) - len(rule))
        for line in below:
            line.truncate(width, overflow="ellipsis")
        return Panel(
            Group(_block(text), *rule, *below),
            title=self._view.heading,
            title_align="left",
            subtitle=_legend(self._metrics),
            subtitle_align="right",
            border_style="dim",
        )

    def _below(self, width: int, height: int) -> list[Text]:
        """Figures and strip: side by side if they fit, else the figures above the strip."""
        rounds = list(self._rounds)
        figures = running_figures(self._metrics, self._view.limit, rounds)
        if width >= _SIDE_BY_SIDE[0] and height >= max(_SIDE_BY_SIDE[1], len(figures) + _LEAST_TEXT):
            right = strip(rounds, len(figures), width - FIGURES_WIDTH - len(_GAP))
            right += [Text()] * (len(figures) - len(right))
            return [Text(_GAP).join(pair) for pair in zip(column(figures, FIGURES_WIDTH), right, strict=True)]
        room = max(1, height // 2)
        lines = flow(figures, width)[: max(1, room - 1)]
        return lines + strip(rounds, min(_MOST_BARS, room - len(lines)), width)


def _block(lines: Sequence[Sequence[Segment]]) -> Segments:
    return Segments([segment for line in lines for segment in (*line, Segment.line())])


def _legend(metrics: Metrics) -> Text:
    """The possible origins; copies next to a model's draft are rare."""
    return Text(" · ", style="dim").join(
        Text(origin.value, style=f"not dim {ORIGIN_STYLES[origin]}")
        for origin in Origin
        if origin is not Origin.COPIED or metrics.copied
    )


class LiveView:
    """The oldest text as a panel; with several texts, a line for each other one and the total speed.

    It is drawn while a text is shown, and in a ``with`` block also while it waits for texts. It disappears afterwards,
    so that it cannot mix with text on standard output. Nothing is drawn unless the console is a terminal.

    Args:
        console: draws; should write to standard error.
        title: names of the models.
        policy: the stopping policy's name.
        max_new_tokens: the token limit of each text.

    Attributes:
        tokens: of all texts so far, except abandoned ones.
    """

    def __init__(self, console: Console, title: str, policy: str, max_new_tokens: int) -> None:
        self.console, self.limit = console, max_new_tokens
        self.heading = Text.assemble((one_line(title), "not dim bold"), (f" · {one_line(policy)}", "dim"))
        self.tokens = 0
        self.began = monotonic()
        self._display = FullScreen(console, lambda: self)
        self._texts: list[ShownText] = []
        self._stays = False

    @property
    def drawing(self) -> bool:
        """Whether a terminal shows it."""
        return self._display.started

    def __enter__(self) -> Self:
        self._stays = True
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def _start(self) -> None:
        self.began = monotonic()
        self._display = FullScreen(self.console, lambda: self)
        self._display.start()

    @contextmanager
    def text(self, name: str, prompt: str) -> Iterator[ShownText]:
        """Show a text, which continues ``prompt``, while the block runs."""
        shown = ShownText(self, name, prompt)
        self._texts = [*self._texts, shown]
        if len(self._texts) == 1 and not self._stays:
            self._start()
        try:
            yield shown
        except BaseException:
            self.tokens -= shown.tokens  # it restarts when there is room, or has failed
            raise
        finally:
            if len(self._texts) == 1 and not self._stays:
                self._display.stop()
            self._texts = [one for one in self._texts if one is not shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = self._texts  # another thread may replace the list
        if not texts:
            yield Text("waiting for records", style="dim")
            return
        oldest = texts[0]
        if len(texts) == 1 and not self._stays:
            yield oldest
            return
        others = texts[1 : 1 + max(0, console.height // 2 - 2)]
        oldest.below = 1 + len(others)
        yield oldest
        rate = self.tokens / max(1e-9, monotonic() - self.began)
        more = len(texts) - 1 - len(others)
        hidden = f" · {more} not shown" if more else ""
        yield Text(f"{oldest.name:>6} above · {len(texts)} at once · {rate:.1f} tokens/s of all{hidden}", style="bold")
        for one in others:
            yield one.line(options.max_width)


def recall(console: Console, prompt: str, layout: WordWrap) -> None:
    """Write the end of a prompt on a terminal, without a line break, so that its completion follows."""
    if console.is_terminal:
        end = prompt if len(prompt) <= _KEPT else f"…{prompt[-_KEPT:]}"
        laid = layout.laid_out(printable(end)) + layout.rest()
        console.print(Text(laid, style="dim"), end="", soft_wrap=True)
