"""Who writes the texts that a server is asked for."""

from typing import Protocol

from specctl.serving.order import Ticket


class Writers(Protocol):
    """A thread with the pair itself, or one that hands orders to replicas of it."""

    @property
    def rows(self) -> int:
        """Texts that may be written at once."""

    @property
    def ready(self) -> int:
        """Pairs that are loaded and can write."""

    @property
    def running(self) -> int:
        """Texts that are being written."""

    @property
    def waiting(self) -> int:
        """Orders that wait."""

    @property
    def closing(self) -> bool:
        """Whether no more orders are taken."""

    @property
    def died(self) -> Exception | None:
        """What ended it, if an error did."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""

    def start(self) -> None: ...

    def submit(self, ticket: Ticket) -> None:
        """Take an order; raises as `WaitingLine.submit` does."""

    def cancel(self, ticket: Ticket) -> None:
        """End a text before its end, within a round; nothing more is told of it."""

    def close(self) -> None:
        """Take no more orders and tell those that wait so; what is being written is finished."""

    def give_up(self) -> None:
        """`close`, and end what is being written, whose clients are told so."""

    def join(self, seconds: float) -> None:
        """Wait until what is being written is finished."""
