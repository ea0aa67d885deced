"""Progress of long work: a spinner, or a bar with the time left."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from specctl.printable import one_line, printable


def note(console: Console, text: str) -> None:
    """Print one line; a narrow terminal wraps it instead of cutting it."""
    console.print(Text(f"note: {printable(text)}"), soft_wrap=True)


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


@contextmanager
def loading(console: Console, message: str) -> Iterator[Callable[[str], None]]:
    """Show a message with a spinner and the elapsed time while the block runs; silent if the console is not a terminal.

    Yields a function that replaces the message.
    """
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    with Progress(
        SpinnerColumn(),
        text,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_interactive,
    ) as progress:
        task = progress.add_task(one_line(message), total=None)
        yield lambda now: progress.update(task, description=one_line(now))


@dataclass(frozen=True, slots=True)
class TerminalProgress:
    """Draws bars and writes lines on a console; see `specctl.observing.progress.Progress`."""

    console: Console

    @contextmanager
    def counting(self, what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
        """Show a bar with the elapsed time and the time left while the block runs, on a terminal only.

        Yields a function that counts one more. Work ``done`` by an earlier run does not count for the speed.
        """
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        with Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            disable=not self.console.is_interactive,
        ) as progress:
            task = progress.add_task(one_line(what), total=total, completed=done)
            yield lambda: progress.advance(task)

    def doing(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        return loading(self.console, what)

    def say(self, text: str) -> None:
        self.console.print(Text(printable(text)), soft_wrap=True)
