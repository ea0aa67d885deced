"""Orders that wait for a place."""

import threading
from collections import deque

from specctl.errors import SpecctlError
from specctl.serving.order import Ticket

CLOSING, FAILED = "the server is shutting down", "the models have failed"


class BusyError(SpecctlError):
    """As many orders wait as may."""


class ClosedError(SpecctlError):
    """No more orders are taken, and those that wait are not begun."""


class WaitingLine:
    """Tickets in the order in which they came; used by several threads.

    Args:
        most: that may wait.

    Attributes:
        died: what ended those who write, if an error did.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self._closing = False
        self.died: Exception | None = None

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def closing(self) -> bool:
        """Whether no more orders are taken."""
        return self._closing or self.died is not None

    def submit(self, ticket: Ticket) -> None:
        """Take an order.

        Raises:
            BusyError: too many wait.
            ClosedError: it is closing, or the models have failed.
        """
        with self._changed:
            if self.closing:
                raise ClosedError(CLOSING if self.died is None else FAILED)
            if len(self._tickets) >= self._most:
                raise BusyError(f"{self._most} request{'s'[: self._most != 1]} wait already")
            self._tickets.append(ticket)
            self._changed.notify()

    def remove(self, ticket: Ticket) -> None:
        """Let an order go, if it waits; the text of one that does not is nobody's any more."""
        ticket.cancelled = True
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)

    def next(self, *, alone: bool = False) -> Ticket | None:
        """The one that came first, or None.

        Args:
            alone: only where no other one waits.
        """
        with self._changed:
            return self._tickets.popleft() if self._tickets and (len(self._tickets) == 1 or not alone) else None

    def wait(self) -> bool:
        """Wait for an order; False where none will come."""
        with self._changed:
            while not self._tickets:
                if self._closing:
                    return False
                self._changed.wait()
        return True

    def close(self, died: Exception | None = None) -> list[Ticket]:
        """Take no more orders, and give those that waited."""
        with self._changed:
            self._closing, self.died = True, died or self.died
            waiting, self._tickets = [*self._tickets], deque()
            self._changed.notify()
        return waiting
