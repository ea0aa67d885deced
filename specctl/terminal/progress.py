"""Progress of long work on standard error: bars, a table that fills in, or a line now and then."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic

from rich.console import Console
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
from rich.text import Text

from specctl.printable import one_line, printable
from specctl.terminal.display import Bottom

PATIENCE = 10.0  # Seconds until the first line, without --progress
INTERVAL = 5.0  # Least number of seconds between two lines
SHARE = 50  # A line at most each time that work has gone on for 1/50 of its time: a long run fills no log


def clock(seconds: float) -> str:
    """E.g. ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


@dataclass(slots=True)
class Count:
    """Counted work, with its speed and the time left."""

    what: str  # plural of the counted things
    total: int | None  # total number; None if unknown
    done: int = 0  # number finished
    earlier: int = field(init=False)  # number finished by an earlier run, excluded from the speed
    tokens: int = 0  # tokens generated so far
    began: float = field(default_factory=monotonic)  # when the work began, in seconds of a monotonic clock

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
        console: where lines are printed, unless it is quiet.
        patience: seconds from now until the first line.
    """

    def __init__(self, console: Console, patience: float = PATIENCE) -> None:
        self._console = console
        self._began = monotonic()
        self.due = self._began + patience

    @contextmanager
    def during(self, state: Callable[[], object]) -> Iterator[None]:
        """Write lines that end in ``state()``, which another thread calls."""
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
    """If the block is interrupted, report that finished work is in ``path``, if any, and ``how`` to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if path is not None:
            note(console, f"interrupted; finished work is in {path}; {how}")
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
    """Labelled, because two bare times side by side are confusing."""

    def render(self, task: Task) -> Text:
        return Text.assemble(super().render(task), " elapsed")


class _Told(ProgressColumn):
    """The present value of a function."""

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
