"""The interface through which long work reports its progress."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol


class Advance(Protocol):
    """Counts one more of the counted things, and the tokens that were generated for it."""

    def __call__(self, tokens: int = 0) -> None: ...


def ignored(tokens: int = 0) -> None:
    """An `Advance` for work without a display."""


@dataclass(slots=True)
class Tally:
    """Counts of a run's records so far."""

    answered: int = 0  # written in this run, errors included
    failed: int = 0  # how many of these lines are errors
    kept: int = 0  # had a line from an earlier run

    def add(self, *, fine: bool) -> None:
        """Count a line of this run."""
        self.answered += 1
        self.failed += not fine


class Progress(Protocol):
    """Receives progress; `specctl.terminal.progress.TerminalProgress` shows it, `SILENT` ignores it."""

    def doing(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show ``what`` while the block runs; yields a function that replaces the description."""

    def counting(self, what: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """Show a count up to ``total`` while the block runs; yields a function that adds 1 to the count.

        Args:
            what: plural of the counted things, such as ``prompts``.
            total: their number.
            done: the number that an earlier run finished.
        """

    def say(self, text: str) -> None:
        """Show one line that stays, such as what was finished."""


class _Silent:
    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[str], None]]:  # noqa: ARG002
        yield lambda _: None

    @contextmanager
    def counting(self, what: str, total: int, done: int = 0) -> Iterator[Advance]:  # noqa: ARG002
        yield ignored

    def say(self, text: str) -> None:
        pass


SILENT: Progress = _Silent()
