"""The live view of several texts that are written at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from specctl.printable import one_line
from specctl.records import Round
from specctl.terminal.display import FullScreen
from specctl.terminal.panel import GenerationPanel
from specctl.terminal.tail import Piece

_KEPT = 400
"""Characters of a text that its line may show."""


@dataclass(slots=True, eq=False)
class ShownText:
    """One of the texts: takes its rounds.

    Attributes:
        name: the record's.
        panel: what is drawn of it while it is the oldest.
        tokens: how many it has.
        end: its last characters.
    """

    view: "BatchView"
    name: str
    panel: GenerationPanel
    tokens: int = 0
    end: str = ""

    def on_round(self, round_: Round, pieces: Sequence[Piece]) -> None:
        """Count a round and the text it added; cheap, since another thread draws."""
        self.panel.add(round_, pieces)
        self.tokens += len(round_.emitted)
        self.view.tokens += len(round_.emitted)
        self.end = (self.end + "".join(piece.text for piece in pieces))[-_KEPT:]

    def line(self, width: int) -> Text:
        """What is shown of it while another one is the oldest: the end of what it has."""
        start = f"{self.name:>6} {self.tokens:>5} tokens  "
        room, end = max(1, width - len(start)), one_line(self.end)
        return Text.assemble((start, "dim"), end if len(end) <= room else f"…{end[1 - room :]}")


class BatchView:
    """The oldest text as a panel, a line for each other one, and the speed of all; a context manager.

    It disappears when the block ends. On a console that is not a terminal nothing is drawn.

    Args:
        console: draws; should write to standard error.
        title: names of the models.
        policy: the stopping policy's name.
        max_new_tokens: the token limit of each text.

    Attributes:
        tokens: of all texts so far, but for those that were given up.
    """

    def __init__(self, console: Console, title: str, policy: str, max_new_tokens: int) -> None:
        self.tokens = 0
        self._title, self._policy, self._limit = title, policy, max_new_tokens
        self._display = FullScreen(console, lambda: self)
        self._texts: list[ShownText] = []
        self._began = monotonic()

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    @contextmanager
    def text(self, name: str, prompt: str) -> Iterator[ShownText]:
        """Show a text, which continues ``prompt``, while the block runs."""
        shown = ShownText(self, name, GenerationPanel(self._title, self._policy, prompt, self._limit))
        self._texts = [*self._texts, shown]  # another thread may be drawing the list that was
        try:
            yield shown
        except BaseException:
            self.tokens -= shown.tokens  # it begins again when there is room, or is none
            raise
        finally:
            self._texts = [one for one in self._texts if one is not shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = self._texts
        if not texts:
            yield Text("waiting for records", style="dim")
            return
        oldest, others = texts[0], texts[1 : 1 + max(0, console.height // 2 - 2)]
        oldest.panel.below = 1 + len(others)
        yield oldest.panel
        rate = self.tokens / max(1e-9, monotonic() - self._began)
        more = len(texts) - 1 - len(others)
        hidden = f" · {more} not shown" if more else ""
        yield Text(f"{oldest.name:>6} above · {len(texts)} at once · {rate:.1f} tokens/s of all{hidden}", style="bold")
        for one in others:
            yield one.line(options.max_width)
