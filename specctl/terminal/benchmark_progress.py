"""A table on the terminal that fills in while a benchmark runs."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from specctl.metrics import UNKNOWN, Metrics
from specctl.printable import one_line
from specctl.records import CompletionSummary
from specctl.terminal.display import FullScreen
from specctl.terminal.output import tell
from specctl.terminal.progress_lines import Count
from specctl.terminal.work_progress import TerminalProgress

_FIGURES = 62
"""Columns of the terminal that the figures of a row take."""


class FinishedRun(Protocol):
    """What the table reads from a run: one candidate's answer to one prompt, at one length and in one repeat."""

    @property
    def candidate(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def repeat(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def turns(self) -> Sequence[CompletionSummary]: ...


class BenchProgress:
    """A table that fills in as runs finish, with the time left; a context manager.

    It draws only when a run begins or is added, so that drawing does not slow the measured runs. It disappears at the
    end and after an interrupt, when tables of the results follow, and stays after an error. Where there is no terminal,
    it writes a line every few seconds.

    Args:
        progress: shows it.
        candidates: labels in the order of the rows.
        baseline: label of the candidate that the others are compared with.
        total: number of runs of the whole benchmark.
        done: runs of an earlier, interrupted benchmark; they fill the table but do not count for the time left.
        greedy: count the runs whose tokens differ from the baseline's.
    """

    def __init__(
        self,
        progress: TerminalProgress,
        candidates: Sequence[str],
        baseline: str,
        total: int,
        done: Iterable[FinishedRun] = (),
        greedy: bool = False,
    ) -> None:
        self._display = FullScreen(progress.console, self._view, refreshes_per_second=0)
        self._progress = progress
        self._baseline = baseline
        self._rows = {label: _Row() for label in candidates}
        self._by_question: dict[tuple[str, int, int], dict[str, FinishedRun]] = {}
        self._lines = ExitStack()
        self._current = ""
        self._failures: list[str] = []
        self._greedy = greedy
        for run in done:
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
        # After an error no result tables come; what has been measured so far must not disappear.
        self._display.stop(keep=error is not None and not isinstance(error, KeyboardInterrupt))
        self._lines.close()
        for text in self._failures:
            tell(text, "warning")

    def start(self, candidate: str, prompt: str) -> None:
        """Show the run that starts now; call before its clock starts."""
        self._current = f"{candidate} on {prompt}"
        self._draw()

    def add(self, run: FinishedRun) -> None:
        """Count a finished run."""
        self._add(run)
        self._count.advance(sum(len(turn.tokens) for turn in run.turns))
        self._draw()

    def fail(self, text: str) -> None:
        """Warn of a candidate that cannot go on; where a table is drawn, as soon as it has disappeared."""
        if self._progress.draws:
            self._failures.append(text)
        else:
            tell(text, "warning")

    def _add(self, run: FinishedRun) -> None:
        self._rows[run.candidate].add(run)
        answers = self._by_question.setdefault((run.prompt, run.repeat, run.length), {})
        answers[run.candidate] = run
        if run.candidate == self._baseline:
            for candidate, answer in answers.items():
                self._rows[candidate].pair(answer, run)
        elif baseline := answers.get(self._baseline):
            self._rows[run.candidate].pair(run, baseline)

    def _draw(self) -> None:
        self._display.refresh()

    def _view(self) -> RenderableType:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        # A long label must not take the room of the figures.
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
        # On top, where they are seen on a low terminal too.
        return Group(Text(status, style="bold"), current, table)

    def _status(self) -> str:
        return f"{self._count}{', '[: 2 * bool(self._current)]}{self._current}"


class _Row:
    """The sums that one row of the table shows."""

    def __init__(self) -> None:
        self.runs = self.differing = 0
        self._all, self._paired, self._baseline = Metrics(), Metrics(), Metrics()

    def add(self, run: FinishedRun) -> None:
        self.runs += 1
        for turn in run.turns:
            self._all.add(turn)

    def pair(self, run: FinishedRun, baseline: FinishedRun) -> None:
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
