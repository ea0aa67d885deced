"""A table on the terminal that fills in while a benchmark runs."""

from collections.abc import Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from specctl.metrics import Metrics
from specctl.printable import one_line
from specctl.records import CompletionSummary

_UNKNOWN = "-"


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

    It draws only when a run is added, never from another thread, so that drawing does not slow the measured runs. It
    disappears at the end, and stays after an error or an interrupt. If the console is not a terminal, nothing is drawn.

    Args:
        console: draws the table; should write to standard error.
        candidates: labels in the order of the rows.
        baseline: label of the candidate that the others are compared with.
        total: number of runs of the whole benchmark.
        done: runs of an earlier, interrupted benchmark; they fill the table but do not count for the time left.
        greedy: count the runs whose tokens differ from the baseline's.
    """

    def __init__(
        self,
        console: Console,
        candidates: Sequence[str],
        baseline: str,
        total: int,
        done: Iterable[FinishedRun] = (),
        greedy: bool = False,
    ) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._watched = console.is_interactive
        self._baseline = baseline
        self._rows = {label: _Row() for label in candidates}
        self._by_question: dict[tuple[str, int, int], dict[str, FinishedRun]] = {}
        self._total = total
        self._current = ""
        self._greedy = greedy
        for run in done:
            self._count(run)
        self._resumed = self._finished
        self._began = monotonic()

    def __enter__(self) -> Self:
        self._began = monotonic()
        if self._watched:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The result tables will not come; what has been measured so far must not disappear.
        self._live.transient = error is None
        self._live.stop()

    def start(self, candidate: str, prompt: str) -> None:
        """Show the run that starts now; call before its clock starts."""
        self._current = f"{candidate} on {prompt}"
        self._draw()

    def add(self, run: FinishedRun) -> None:
        """Count a finished run."""
        self._count(run)
        self._draw()

    @property
    def _finished(self) -> int:
        return sum(row.runs for row in self._rows.values())

    def _count(self, run: FinishedRun) -> None:
        self._rows[run.candidate].add(run)
        answers = self._by_question.setdefault((run.prompt, run.repeat, run.length), {})
        answers[run.candidate] = run
        if run.candidate == self._baseline:
            for candidate, answer in answers.items():
                self._rows[candidate].pair(answer, run)
        elif baseline := answers.get(self._baseline):
            self._rows[run.candidate].pair(run, baseline)

    def _draw(self) -> None:
        if self._live.is_started:
            self._live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("candidate", no_wrap=True, overflow="ellipsis")
        for name in ("runs", "tokens/s", "speedup", "mean acceptance length", "acceptance rate"):
            table.add_column(name, justify="right")
        if self._greedy:
            table.add_column("differ", justify="right")
        for label, row in self._rows.items():
            differ = Text(str(row.differing), style="bold red" if row.differing else "")
            table.add_row(Text(one_line(label)), *row.cells(), *([differ] if self._greedy else []))
        finished = self._finished
        status = f"{finished} of {self._total} runs · {self._time_left(finished)}"
        current = [Text(one_line(self._current), style="dim", no_wrap=True)] if self._current else []
        return Group(table, Text(status, style="bold"), *current)

    def _time_left(self, finished: int) -> str:
        new = finished - self._resumed
        if not new:
            return "time left unknown"
        minutes, seconds = divmod(round((monotonic() - self._began) / new * (self._total - finished)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"


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
            f"{metrics.tokens_per_second:.1f}" if self.runs else _UNKNOWN,
            f"{self._paired.tokens_per_second / baseline:.2f}" if baseline else _UNKNOWN,
            f"{metrics.mean_acceptance_length:.2f}" if metrics.rounds else _UNKNOWN,
            f"{metrics.acceptance_rate:.1%}" if metrics.drafted else _UNKNOWN,
        )
