"""Who writes the texts that a server is asked for."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from specctl.serving.order import Ticket, Told
from specctl.serving.waiting_line import CLOSING, ClosedError, WaitingLine


class Writers(ABC):
    """A thread with the pair itself, or one that hands orders to replicas of it. Orders wait in one queue.

    Args:
        name: of the thread.
        most_waiting: orders that may wait.
        tell: called in the thread with what happened.
    """

    def __init__(self, name: str, most_waiting: int, tell: Callable[[Told], None]) -> None:
        self._tell = tell
        self._line = WaitingLine(most_waiting)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    @abstractmethod
    def rows(self) -> int:
        """Texts that may be written at once."""

    @property
    @abstractmethod
    def ready(self) -> int:
        """Pairs that are loaded and can write."""

    @property
    @abstractmethod
    def running(self) -> int:
        """Texts that are being written."""

    @property
    def waiting(self) -> int:
        """Orders that wait."""
        return len(self._line)

    @property
    def closing(self) -> bool:
        """Whether no more orders are taken."""
        return self._line.closing

    @property
    def died(self) -> Exception | None:
        """What ended the thread, if an error did."""
        return self._line.died

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Take an order; raises as `WaitingLine.submit` does."""
        self._line.submit(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """End a text before its end, within a round; nothing more is told of it."""
        self._line.remove(ticket)

    def close(self) -> None:
        """Take no more orders and tell those that wait so; what is being written is finished."""
        self._tell([(ticket, ClosedError(CLOSING)) for ticket in self._line.close()])

    def give_up(self) -> None:
        """`close`, and end what is being written, whose clients are told so."""
        self.close()
        written = self._begun()
        for ticket in written:
            ticket.cancelled = True
        self._tell([(ticket, ClosedError(CLOSING)) for ticket in written])

    def join(self, seconds: float) -> None:
        """Wait until what is being written is finished."""
        self._thread.join(seconds)

    @abstractmethod
    def _begun(self) -> list[Ticket]:
        """Those whose texts are being written; any thread may ask."""

    @abstractmethod
    def _work(self) -> None:
        """What the thread does."""
