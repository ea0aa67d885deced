"""Replicas for a `ReplicaThread` that are no processes."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from specctl.replicas.places import Attendant
from specctl.replicas.replica import Answered, Event, Part


class Scripted:
    """Stands for `LocalReplicas`: what happens is what a test says.

    Args:
        places: how many questions each replica takes.
        count: how many replicas there are.
    """

    def __init__(self, places: int = 1, count: int = 2) -> None:
        self.places, self.processes = places, count
        self.count, self.ready = places * count, count
        self.asked: dict[int, Any] = {}
        self.withdrawn: list[int] = []
        self.events: SimpleQueue[Event | Exception | None] = SimpleQueue()

    def idle(self) -> list[int]:
        def busy(number: int) -> int:
            return sum(one // self.places == number // self.places for one in self.asked)

        return sorted((one for one in range(self.count) if one not in self.asked), key=busy)

    def ask(self, replica: int, question: Any) -> None:
        self.asked[replica] = question

    def withdraw(self, replica: int) -> None:
        self.withdrawn.append(replica)

    def wake(self) -> None:
        self.events.put(None)

    def wait(self, seconds: float | None = None) -> list[Event]:
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return []
        if isinstance(event, Exception):
            raise event
        if event is None:
            return []
        if not isinstance(event, Part):
            self.asked.pop(event.replica, None)
        return [event]


class Attended(Scripted):
    """`Scripted`, whose replicas answer, each in a thread of its own.

    Args:
        attendants: the replicas; all have as many places.
    """

    def __init__(self, *attendants: Attendant) -> None:
        super().__init__(attendants[0].places, len(attendants))
        self.about = attendants[0].about
        self._questions: list[SimpleQueue[Any]] = [SimpleQueue() for _ in attendants]
        for number, one in enumerate(attendants):
            part, answer = self._tells(number, Part), self._tells(number, Answered)
            Thread(target=one.attend, args=(self._questions[number], part, answer), daemon=True).start()

    def _tells(self, number: int, kind: Callable[[int, Any], Event]) -> Callable[[int, Any], None]:
        return lambda place, value: self.events.put(kind(number * self.places + place, value))

    def ask(self, replica: int, question: Any) -> None:
        super().ask(replica, question)
        number, place = divmod(replica, self.places)
        self._questions[number].put((place, question))

    def withdraw(self, replica: int) -> None:
        super().withdraw(replica)
        number, place = divmod(replica, self.places)
        self._questions[number].put((place, None))
