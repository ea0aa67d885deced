"""The interface through which long work reports its progress."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives progress; `specctl.terminal.loading.TerminalProgress` shows it, `SILENT` ignores it."""

    def doing(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """Show ``what`` while the block runs; yields a function that replaces the description."""

    def counting(self, what: str, total: int, done: int = 0) -> AbstractContextManager[Callable[[], None]]:
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
    def counting(self, what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        yield lambda: None

    def say(self, text: str) -> None:
        pass


SILENT: Progress = _Silent()
