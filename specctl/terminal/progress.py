"""Progress of long work on standard error: bars, a table that fills in, or a line now and then."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from specctl.metrics import UNKNOWN, Metrics
from specctl.printable import one_line, printable
from specctl.records import CompletionSummary
from specctl.terminal.display import Bottom, FullScreen
from specctl.terminal.output import print_message

PATIENCE = 10.0
"""Seconds that work may take before the first line, without --progress."""
INTERVAL = 5.0
"""Least seconds between two lines."""
SHARE = 50
"""A line at most each time that work has gone on for 1/50 of its time: a long run fills no log."""


def clock(seconds: float) -> str:
    """E.g. ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@dataclass(slots=True)
class Count:
    """Counted work, with its speed and the time left.

    Attributes:
        what: plural of the counted things.
        total: their number; None if unknown.
        done: how many are finished.
        earlier: how many of them an earlier run finished; they do not count for the speed.
        tokens: tokens generated so far.
        began: when the work began, in seconds of a monotonic clock.
    """

    what: str
    total: int | None
    done: int = 0
    earlier: int = field(init=False)
    tokens: int = 0
    began: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self.earlier = self.done

    def advance(self, tokens: int = 0) -> None:
        """Count one more thing, which generated this many tokens."""
        self.done += 1
        self.tokens += tokens

    @property
    def speed(self) -> str:
        """Tokens per second since the work began; empty where no tokens are generated."""
        taken = monotonic() - self.began
        return f"{self.tokens / taken:.1f} tokens/s" if self.tokens and taken > 0 else ""

    @property
    def left(self) -> str:
        """The time left; empty where it is unknown."""
        new = self.done - self.earlier
        if self.total is None or not new:
            return ""
        return f"{clock((monotonic() - self.began) / new * max(0, self.total - self.done))} left"

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        number = self.done if self.total is None else self.total
        what = self.what.removesuffix("s") if number == 1 else self.what
        return ", ".join(filter(None, (f"{self.done}{of} {what}", self.speed, self.left)))


class ProgressLines:
    """Writes a line with the elapsed time every few seconds while a block runs.

    Args:
        console: where to; its quietness is respected.
        patience: seconds from now until the first line.
    """

    def __init__(self, console: Console, patience: float = PATIENCE) -> None:
        self._console = console
        self._began = monotonic()
        self.due = self._began + patience

    @contextmanager
    def during(self, state: Callable[[], object]) -> Iterator[None]:
        """Write lines that end in ``state()``; it is called by another thread."""
        ended = Event()
        thread = Thread(target=self._write_lines, args=(state, ended), name="progress lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _write_lines(self, state: Callable[[], object], ended: Event) -> None:
        while not ended.wait(max(0.0, self.due - monotonic())):
            self.write(state())

    def write(self, state: object) -> None:
        now = monotonic()
        elapsed = now - self._began
        self.due = now + max(INTERVAL, elapsed / SHARE)
        with suppress(OSError):  # a log that cannot be written must not end the work
            self._console.print(Text(one_line(f"progress: {clock(elapsed)} elapsed, {state}")), soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Print one line; a narrow terminal breaks it between words."""
    console.print(Text(f"note: {printable(text)}"), soft_wrap=not console.is_terminal)


@contextmanager
def resumable(
    console: Console, path: object | None, how: str = "the same command with --resume continues"
) -> Iterator[None]:
    """Report after an interrupt of the block that finished work is in ``path``, if any, and ``how`` to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if path is not None:
            note(console, f"interrupted; what was finished is in {path}; {how}")
        raise


class TerminalProgress:
    """Draws bars or writes lines on a console; see `specctl.observing.progress.Progress`.

    Args:
        console: should write to standard error. A terminal shows bars and spinners; anything else gets a line every few
            seconds, as soon as the work has taken some seconds.
        shown: False for neither; True for lines from the start.
    """

    def __init__(self, console: Console, shown: bool | None = None) -> None:
        self.console = console
        wanted = shown is not False and not console.quiet
        self.draws = wanted and console.is_interactive
        self.lines: ProgressLines | None = None
        if wanted and not console.is_interactive:
            self.lines = ProgressLines(console, 0.0 if shown else PATIENCE)

    @contextmanager
    def counting(self, what: str, total: int | None, done: int = 0) -> Iterator[Callable[..., None]]:
        """Show a bar with the elapsed time, the speed and the time left while the block runs.

        Yields a function that counts one more, and the tokens it generated. Work ``done`` by an earlier run does not
        count for the speed.
        """
        count = Count(what, total, done)
        columns = (
            _description(),
            BarColumn(),
            MofNCompleteColumn(),
            _Elapsed(Column(no_wrap=True)),
            _Told(lambda: count.left),
        )
        bars = Progress(*columns, _Told(lambda: count.speed), console=self.console)
        task = bars.add_task(one_line(what), total=total, completed=done)

        def advance(tokens: int = 0) -> None:
            count.advance(tokens)
            bars.advance(task)

        with self._showing(bars, lambda: count):
            yield advance

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a message with a spinner and the elapsed time while the block runs.

        Yields a function that replaces the message.
        """
        bars = Progress(SpinnerColumn(), _description(), TimeElapsedColumn(), console=self.console)
        task = bars.add_task(one_line(what), total=None)
        with self._showing(bars, lambda: bars.tasks[0].description):
            yield lambda now: bars.update(task, description=one_line(now))

    def say(self, text: str) -> None:
        self.console.print(Text(printable(text)), soft_wrap=not self.console.is_terminal)

    @contextmanager
    def _showing(self, bars: Progress, state: Callable[[], object]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.draws:
                stack.enter_context(Bottom(self.console, bars.get_renderable))
            elif self.lines is not None:
                stack.enter_context(self.lines.during(state))
            yield


class _Elapsed(TimeElapsedColumn):
    """With its label: two bare times side by side are a riddle."""

    def render(self, task: Task) -> Text:
        return Text.assemble(super().render(task), " elapsed")


class _Told(ProgressColumn):
    """What a function returns now."""

    def __init__(self, say: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self._say = say

    def render(self, task: Task) -> Text:  # noqa: ARG002
        return Text(self._say())


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))


def loading(console: Console, message: str) -> AbstractContextManager[Callable[[str], None]]:
    """`TerminalProgress.doing` for a command with nothing else to show."""
    return TerminalProgress(console).doing(message)


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
    end and after an interrupt, when tables of the results follow, and stays after an error. Without a terminal,
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
            print_message(text, "warning")

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
            print_message(text, "warning")

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
