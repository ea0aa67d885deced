"""How far long work is, a line now and then, for logs and other places that no terminal shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic

from rich.console import Console
from rich.text import Text

from specctl.printable import one_line

PATIENCE = 10.0
"""Seconds that work may take before the first line, where nobody asked for lines."""
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
        """The time left; empty where it cannot be told."""
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
