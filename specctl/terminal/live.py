"""The live view of a generation on a terminal."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from specctl.metrics import Metrics
from specctl.records import Completion, FinishReason, Round
from specctl.terminal.loading import loading
from specctl.terminal.numbers import Figure, flow, running_figures
from specctl.terminal.panel import GenerationPanel
from specctl.terminal.tail import Origin, Piece

__all__ = ["LiveView", "Origin", "Piece", "loading"]

REFRESHES_PER_SECOND = 12
_FINISHED = {
    FinishReason.STOP: "stop (end of sequence or stop string)",
    FinishReason.LENGTH: "length (token limit reached)",
    FinishReason.INTERRUPTED: "interrupted",
}


class LiveView:
    """A panel that follows one generation and leaves a short summary behind; a context manager.

    The panel disappears when `finish` is called or the block ends, so that it cannot mix with text written to standard
    output afterwards. On a console that is not a terminal nothing is drawn.

    Args:
        console: draws the panel; should write to standard error.
        title: names of the models.
        policy: the stopping policy's name.
        prompt: the text that is continued.
        max_new_tokens: the generation's token limit.
    """

    def __init__(self, console: Console, title: str, policy: str, prompt: str, max_new_tokens: int) -> None:
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._panel = GenerationPanel(title, policy, prompt, max_new_tokens)
        self._live = ResizableLive(self._panel, console)

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_round(self, round_: Round, pieces: Sequence[Piece]) -> None:
        """Count a round and the text it added; cheap, since another thread draws."""
        if self._live.is_started:
            self._panel.add(round_, pieces)

    def finish(self, completion: Completion) -> None:
        """Remove the panel and print the summary of the whole generation."""
        self._live.stop()
        if not self._console.is_terminal:
            return
        metrics = Metrics.of([completion])
        stops = ", ".join(f"{reason} {count}" for reason, count in metrics.stops.most_common())
        figures = [
            *running_figures(metrics, self._max_new_tokens, completion.rounds),
            *([Figure("drafting stopped by", stops)] if stops else []),
            Figure("first tokens after", f"{completion.first_token_seconds:.2f} s"),
            Figure("total", f"{completion.total_seconds:.2f} s"),
            Figure("finished", _FINISHED[completion.finish_reason]),
        ]
        for line in (self._panel.heading, *flow(figures, self._console.width)):
            self._console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)


class ResizableLive(Live):
    """A transient display that is erased completely even if the terminal gets narrower.

    A terminal that gets narrower wraps the lines already drawn, so that the last drawing takes more rows than before.
    """

    def __init__(self, panel: GenerationPanel, console: Console) -> None:
        super().__init__(
            panel,
            console=console,
            transient=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
        )
        self._panel = panel

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        rows_each = -(-self._panel.drawn_width // self.console.width)
        processed = super().process_renderables(renderables)
        if rows_each > 1 and self.console.is_interactive:
            wrapped = self._panel.drawn_height * (rows_each - 1)
            climb = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * wrapped
            processed.insert(1, Control(*climb))
        return processed
