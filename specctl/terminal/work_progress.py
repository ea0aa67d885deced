"""Progress of long work: a spinner or a bar with the time left, or lines where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

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
from specctl.terminal.progress_lines import PATIENCE, Count, ProgressLines


def note(console: Console, text: str) -> None:
    """Print one line; a narrow terminal breaks it between words."""
    console.print(Text(f"note: {printable(text)}"), soft_wrap=not console.is_terminal)


@contextmanager
def resumable(
    console: Console, path: object | None, how: str = "the same command with --resume continues"
) -> Iterator[None]:
    """Say after an interrupt of the block that finished work is in ``path``, and ``how`` to continue; not if None."""
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
    """Whatever a function says now."""

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
