"""The panel that shows a generation while it runs."""

from collections import deque
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.text import Text

from specctl.metrics import Metrics
from specctl.printable import one_line
from specctl.records import Round
from specctl.terminal.running_figures import column, flow, running_figures
from specctl.terminal.strip import strip
from specctl.terminal.tail import ORIGIN_STYLES, Origin, Piece, TextTail

KEPT_ROUNDS = 64
FIGURES_WIDTH = 36
"""Cells of the figures' column where it is next to the strip."""
_FRAME = 4
_SIDE_BY_SIDE = (72, 14)
_SMALLEST_FRAMED = (12, 5)
_MOST_BARS = 5
_LEAST_TEXT = 5
"""Rows that a column of figures must leave for text and rule."""
_GAP = "   "


class GenerationPanel:
    """Draws the text coloured by origin, the last rounds and the running figures, fitted to the terminal.

    One thread may call `add` while another draws: rounds wait in a queue until the next drawing counts them.

    Attributes:
        below: rows of the screen that are left to others.
    """

    def __init__(self, title: str, policy: str, prompt: str, max_new_tokens: int) -> None:
        self.heading = Text.assemble((one_line(title), "not dim bold"), (f" · {one_line(policy)}", "dim"))
        self.below = 0
        self._max_new_tokens = max_new_tokens
        self._arrived: deque[tuple[Round, Sequence[Piece]]] = deque()
        self._tail = TextTail(prompt)
        self._rounds: deque[Round] = deque(maxlen=KEPT_ROUNDS)
        self._metrics = Metrics()

    def add(self, round_: Round, pieces: Sequence[Piece]) -> None:
        self._arrived.append((round_, tuple(pieces)))

    def counted(self, console: Console) -> tuple[Metrics, Sequence[Round]]:
        """The figures of all rounds that arrived, and the last of these."""
        self._take_in(console)
        return self._metrics, list(self._rounds)

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
            title=self.heading,
            title_align="left",
            subtitle=_legend(self._metrics),
            subtitle_align="right",
            border_style="dim",
        )

    def _below(self, width: int, height: int) -> list[Text]:
        """Figures and strip: side by side if they fit, else the figures above the strip."""
        rounds = list(self._rounds)
        figures = running_figures(self._metrics, self._max_new_tokens, rounds)
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
    """The origins that there are; copies beside a model's draft are rare."""
    return Text(" · ", style="dim").join(
        Text(origin.value, style=f"not dim {ORIGIN_STYLES[origin]}")
        for origin in Origin
        if origin is not Origin.COPIED or metrics.copied
    )
