"""A table on the terminal that fills in while a benchmark runs."""

from contextlib import ExitStack
from time import monotonic
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from specctl.metrics import UNKNOWN, Metrics
from specctl.observing.results import BASELINE, Run, RunSet
from specctl.printable import one_line
from specctl.terminal.display import FullScreen
from specctl.terminal.output import print_message
from specctl.terminal.progress import Count, TerminalProgress

_FIGURES = 62  # Width of a row's numbers in columns


class BenchProgress:
    """A table that fills in as runs finish, with the time left; a context manager.

    It draws only when a run begins or is added, so that drawing does not slow the measured runs. At the end and after
    an interrupt it disappears, because tables of the results follow; after an error it stays. Without a terminal, it
    writes a line every few seconds.

    Args:
        progress: shows it.
        results: of an earlier, interrupted benchmark; its runs fill the table but do not count for the time left.
        total: number of runs of the whole benchmark.
    """

    def __init__(self, progress: TerminalProgress, results: RunSet, total: int) -> None:
        self._display = FullScreen(progress.console, self._view, refreshes_per_second=0)
        self._progress = progress
        self._rows = {candidate.label: _Row() for candidate in results.header.candidates}
        self._by_question: dict[tuple[str, int, int], dict[str, Run]] = {}
        self._lines = ExitStack()
        self._current = ""
        self._failures: list[str] = []
        self._greedy = not results.header.sampling.get("temperature")
        for run in results.runs:
            self._add(run)
        self._count = Count("runs", total, sum(row.runs for row in self._rows.values()))

    def __enter__(self) -> Self:
        self._count.began = monotonic()
        if self._progress.draws:
            self._display.start()
        elif self._progress.lines is not None:
            self._lines.enter_context(self._progress.lines.during(self._status))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # No result tables follow an error, so keep the measurements on the screen.
        self._display.stop(keep=error is not None and not isinstance(error, KeyboardInterrupt))
        self._lines.close()
        for text in self._failures:
            print_message(text, "warning")

    def start(self, candidate: str, prompt: str) -> None:
        """Show the run that starts now; call before its clock starts."""
        self._current = f"{candidate} on {prompt}"
        self._display.refresh()

    def add(self, run: Run) -> None:
        """Count a finished run."""
        self._add(run)
        self._count.advance(sum(len(turn.tokens) for turn in run.turns))
        self._display.refresh()

    def fail(self, text: str) -> None:
        """Warn that a candidate cannot continue; while a table is drawn, delay the warning until it disappears."""
        if self._progress.draws:
            self._failures.append(text)
        else:
            print_message(text, "warning")

    def _add(self, run: Run) -> None:
        self._rows[run.candidate].add(run)
        answers = self._by_question.setdefault((run.prompt, run.repeat, run.length), {})
        answers[run.candidate] = run
        if run.candidate == BASELINE:
            for candidate, answer in answers.items():
                self._rows[candidate].pair(answer, run)
        elif baseline := answers.get(BASELINE):
            self._rows[run.candidate].pair(run, baseline)

    def _view(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        # A long label must leave room for the numbers.
        room = max(self._progress.console.width - _FIGURES, 20)
        table.add_column("candidate", no_wrap=True, overflow="ellipsis", max_width=room)
        for name in ("runs", "tokens/s", "speedup", "mean acceptance length", "acceptance rate"):
            table.add_column(name, justify="right")
        if self._greedy:
            table.add_column("differ", justify="right")
        for label, row in self._rows.items():
            differ = Text(str(row.differing), style="bold red" if row.differing else "")
            table.add_row(Text(one_line(label)), *row.cells(), *([differ] if self._greedy else []))
        status = f"{self._count.done} of {self._count.total} runs · {self._count.left or 'time left unknown'}"
        current = Text(one_line(self._current), style="dim", no_wrap=True, overflow="ellipsis")
        # On top, so that a low terminal shows it too.
        return Group(Text(status, style="bold"), current, table)

    def _status(self) -> str:
        return f"{self._count}{', '[: 2 * bool(self._current)]}{self._current}"


class _Row:
    """The sums shown in one row of the table."""

    def __init__(self) -> None:
        self.runs = self.differing = 0
        self._all, self._paired, self._baseline = Metrics(), Metrics(), Metrics()

    def add(self, run: Run) -> None:
        self.runs += 1
        for turn in run.turns:
            self._all.add(turn)

    def pair(self, run: Run, baseline: Run) -> None:
        for turn in run.turns:
            self._paired.add(turn)
        for turn in baseline.turns:
            self._baseline.add(turn)
        self.differing += [turn.tokens for turn in run.turns] != [turn.tokens for turn in baseline.turns]

    def cells(self) -> tuple[str, ...]:
        metrics, baseline = self._all, self._baseline.tokens_per_second
        return (
            str(self.runs),
            f"{metrics.tokens_per_second:.1f}" if self.runs else UNKNOWN,
            f"{self._paired.tokens_per_second / baseline:.2f}" if baseline else UNKNOWN,
            f"{metrics.mean_acceptance_length:.2f}" if metrics.rounds else UNKNOWN,
            f"{metrics.acceptance_rate:.1%}" if metrics.drafted else UNKNOWN,
        )
