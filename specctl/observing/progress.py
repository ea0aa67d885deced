"""How long work reports what it is doing, whoever watches."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives progress; `specctl.terminal.loading.TerminalProgress` draws it, `SILENT` drops it."""

    def doing(self, what: str) -> AbstractContextManager[Callable[[str], None]]:
        """While the block runs, ``what`` is being done; yields a function that replaces that description."""

    def counting(self, what: str, total: int, done: int = 0) -> AbstractContextManager[Callable[[], None]]:
        """While the block runs, ``what`` is being counted up to ``total``; yields a function that counts one more.

        Args:
            what: plural of what is counted, such as ``prompts``.
            total: how many there are.
            done: how many of them an earlier run finished.
        """

    def say(self, text: str) -> None:
        """One line that stays: something is finished, or the user may want to know it."""


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
