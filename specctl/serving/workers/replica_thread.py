"""The one thread that hands orders to replicas of a pair, and tells what they write."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specctl.errors import RecordError
from specctl.replicas.local import LocalReplicas
from specctl.replicas.replica import Event as Happened
from specctl.replicas.replica import Lost, Part
from specctl.replicas.window import DEATHS
from specctl.serving.order import Ended, Event, Ticket, Told, Wrote
from specctl.serving.waiting_line import FAILED, ClosedError
from specctl.serving.workers.affinity import Affinity
from specctl.serving.writers import Writers


@dataclass(slots=True)
class _Asked:
    """A text that a replica was asked for.

    Attributes:
        ticket: who is told.
        deaths: how many replicas ended while they wrote it alone.
        heard: how many of its tokens the replica told that writes it.
        withdrawn: whether that replica was told that nobody wants it.
    """

    ticket: Ticket
    deaths: int = 0
    heard: int = 0
    withdrawn: bool = False


class ReplicaThread(Writers):
    """Writes by replicas: that which writes the fewest texts, or has read an order's beginning, gets it.

    A text whose replica ends is begun again by another one. What was told of it stays told: a text that then goes on
    otherwise, as a sampled one may whose policy reads clocks, is an error.

    Args:
        replicas: each a `ReplicaWriter`; the thread alone uses them until it has ended.
        rows: how many texts they write at once in all.
        most_waiting, tell: as of `Writers`.
    """

    def __init__(self, replicas: LocalReplicas, rows: int, most_waiting: int, tell: Callable[[Told], None]) -> None:
        super().__init__("replicas", most_waiting, tell)
        self._replicas, self._rows = replicas, rows
        self._affinity = Affinity(replicas.places)
        self._again: deque[_Asked] = deque()  # whose replica ended, before all others
        self._asked: dict[int, _Asked] = {}  # by the number that replicas know it by

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def ready(self) -> int:
        return self._replicas.ready

    @property
    def running(self) -> int:
        return len(self._asked)

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._again)

    def submit(self, ticket: Ticket) -> None:
        super().submit(ticket)
        self._replicas.wake()

    def cancel(self, ticket: Ticket) -> None:
        super().cancel(ticket)
        if any(one.ticket is ticket for one in list(self._asked.values())):
            self._replicas.wake()

    def close(self) -> None:
        super().close()
        self._replicas.wake()

    def give_up(self) -> None:
        super().give_up()
        self._replicas.wake()

    def _begun(self) -> list[Ticket]:
        return [one.ticket for one in (*self._again, *list(self._asked.values()))]

    def _work(self) -> None:
        try:
            while True:
                self._withdraw()
                self._hand_out()
                if self._line.closing and not any(self._unwritten()):
                    return
                happened: list[tuple[Ticket, Event]] = []
                for event in self._replicas.wait():
                    happened += self._heard(event)
                if happened:
                    self._tell(happened)
        except Exception as error:
            ended = [*self._unwritten(), *self._line.close(error)]
            self._tell([(ticket, ClosedError(FAILED)) for ticket in ended])

    def _unwritten(self) -> list[Ticket]:
        """Those that were begun, and are wanted."""
        return [ticket for ticket in self._begun() if not ticket.cancelled]

    def _withdraw(self) -> None:
        for number, one in self._asked.items():
            if one.ticket.cancelled and not one.withdrawn:
                one.withdrawn = True
                self._replicas.withdraw(number)

    def _hand_out(self) -> None:
        """Give replicas what waits, as long as they have room."""
        while (self._again or len(self._line)) and (idle := self._replicas.idle()):
            if self._again:
                one = self._again.popleft()
            elif (ticket := self._line.next()) is not None:
                one = _Asked(ticket)
            else:
                return  # it went away in this moment
            if not one.ticket.cancelled:
                order = one.ticket.order
                place = self._affinity.place(order.prompt, idle, self._asked)
                self._affinity.holds(place, order.prompt)
                self._asked[place] = one
                self._replicas.ask(place, (order, one.ticket.every))

    def _heard(self, event: Happened) -> Told:
        """What a ticket hears of an event, if anything."""
        if isinstance(event, Part):
            return self._wrote(self._asked[event.replica], event.value)
        one = self._asked.pop(event.replica)
        if isinstance(event, Lost):
            self._affinity.lost(event.replica)
        elif isinstance(event.answer, Ended):
            done = event.answer.completion
            self._affinity.holds(event.replica, done.prompt + done.tokens)
        if one.ticket.cancelled:
            return []
        if not isinstance(event, Lost):
            return [(one.ticket, event.answer)]
        deaths = one.deaths + event.alone
        if deaths >= DEATHS:
            return [(one.ticket, RecordError("worker_died", f"no worker survived this text; {event.why}"))]
        self._again.appendleft(_Asked(one.ticket, deaths))
        return []

    def _wrote(self, one: _Asked, wrote: Wrote) -> Told:
        if one.ticket.cancelled:
            return []
        new = one.ticket.wrote(one.heard - wrote.known, wrote.round)
        one.heard += len(wrote.tokens)
        if new is None:
            one.ticket.cancelled = True
            what = "the worker that wrote this text ended, and another one wrote it otherwise"
            return [(one.ticket, RecordError("worker_died", what))]
        return [(one.ticket, new)] if new.tokens else []
