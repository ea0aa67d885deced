"""The live view of a generation on a terminal."""

from collections.abc import Sequence
from time import monotonic
from typing import Self

from rich.console import Console
from rich.text import Text

from specctl.metrics import Metrics
from specctl.printable import printable
from specctl.records import Completion, FinishReason, Round
from specctl.terminal.display import FullScreen
from specctl.terminal.panel import GenerationPanel
from specctl.terminal.running_figures import Figure, flow, running_figures
from specctl.terminal.strip import strip
from specctl.terminal.tail import Origin, Piece
from specctl.terminal.word_wrap import WordWrap
from specctl.terminal.work_progress import loading

__all__ = ["LiveView", "Origin", "Piece", "loading"]

_SEEN = 2.0
"""Seconds of a panel below which nobody could read it."""
_LAST_ROUNDS = 5
"""How many rounds are shown below the figures of such a panel."""
_RECALLED = 400
"""Characters of a prompt that are shown before its completion."""
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
        self._began = monotonic()
        self._panel = GenerationPanel(title, policy, prompt, max_new_tokens)
        self._display = FullScreen(console, lambda: self._panel)

    def __enter__(self) -> Self:
        self._began = monotonic()
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def on_round(self, round_: Round, pieces: Sequence[Piece]) -> None:
        """Count a round and the text it added; cheap, since another thread draws."""
        if self._display.started:
            self._panel.add(round_, pieces)

    def recall(self, prompt: str, layout: WordWrap) -> None:
        """Write the end of the text that is continued, without a line break: its completion comes next, laid out with
        it."""
        if self._console.is_terminal:
            end = prompt if len(prompt) <= _RECALLED else f"…{prompt[-_RECALLED:]}"
            laid = layout.laid_out(printable(end)) + layout.rest()
            self._console.print(Text(laid, style="dim"), end="", soft_wrap=True)

    def finish(self, completion: Completion | None) -> None:
        """Remove the panel and print the summary of the whole generation, or of what an interrupt left of it."""
        self._display.stop()
        if not self._console.is_terminal:
            return
        brief = monotonic() - self._began < _SEEN
        metrics, rounds = self._panel.counted(self._console) if completion is None else (Metrics.of([completion]), ())
        stops = ", ".join(f"{reason} {count}" for reason, count in metrics.stops.most_common())
        figures = [
            *running_figures(metrics, self._max_new_tokens, rounds if completion is None else completion.rounds),
            *([Figure("drafting stopped by", stops)] if stops else []),
        ]
        if completion is not None:
            figures.append(Figure("target passes", str(metrics.rounds)))
            figures.append(Figure("first tokens after", f"{completion.first_token_seconds:.2f} s"))
            figures.append(Figure("total", f"{completion.total_seconds:.2f} s"))
        reason = FinishReason.INTERRUPTED if completion is None else completion.finish_reason
        figures.append(Figure("finished", _FINISHED[reason]))
        # What was drawn for a moment only stays to be read.
        last = strip(completion.rounds if completion is not None else rounds, _LAST_ROUNDS, self._console.width)
        for line in (self._panel.heading, *flow(figures, self._console.width), *(last if brief else ())):
            self._console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
