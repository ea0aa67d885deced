"""Engines for a `TextThread` that are not processes."""

from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from specctl.text_engine.child import Host
from specctl.text_engine.engine import Answered, Event, Part, Restarted
from specctl.text_engine.here import HereEngine


class Scripted:
    """Stands for `ProcessEngine`: what happens is what a test says.

    Args:
        places: how many questions each process takes.
        count: how many processes there are.
    """

    def __init__(self, places: int = 1, count: int = 2) -> None:
        self.places, self.processes = places, count
        self.count, self.ready = places * count, count
        self.asked: dict[int, Any] = {}
        self.cancelled: list[int] = []
        self.events: SimpleQueue[Event | Exception | None] = SimpleQueue()

    def free(self) -> list[int]:
        def busy(number: int) -> int:
            return sum(one // self.places == number // self.places for one in self.asked)

        return sorted((one for one in range(self.count) if one not in self.asked), key=busy)

    def submit(self, place: int, question: Any) -> None:
        self.asked[place] = question

    def cancel(self, place: int) -> None:
        self.cancelled.append(place)

    def wake(self) -> None:
        self.events.put(None)

    def close(self) -> None:
        """Nothing is to be ended."""

    def step(self, seconds: float | None = None) -> list[Event]:
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return []
        if isinstance(event, Exception):
            raise event
        if event is None:
            return []
        if isinstance(event, Part | Restarted):
            return [event]
        self.asked.pop(event.place, None)
        if event.place in self.cancelled and isinstance(event, Answered):
            return []
        return [event]


class Attended(Scripted):
    """`Scripted`, whose processes are engines that answer, each in a thread of its own.

    Args:
        engines: all have as many places.
    """

    def __init__(self, *engines: HereEngine) -> None:
        super().__init__(engines[0].count, len(engines))
        self.about = engines[0].about
        self._hosts: list[Host] = []
        for number, engine in enumerate(engines):
            self._hosts.append(Host(engine, self._sends(number)))
            Thread(target=self._hosts[-1].run, daemon=True).start()

    def _sends(self, number: int) -> Any:
        def send(kind: str, value: tuple[int, Any]) -> None:
            place, found = number * self.places + value[0], value[1]
            self.events.put(
                Answered(place, found)
                if kind == "answer"
                else Part(place, found)
                if kind == "part"
                else Restarted(place)
            )

        return send

    def submit(self, place: int, question: Any) -> None:
        super().submit(place, question)
        number, its_place = divmod(place, self.places)
        self._hosts[number].put(its_place, question)

    def cancel(self, place: int) -> None:
        super().cancel(place)
        number, its_place = divmod(place, self.places)
        self._hosts[number].put(its_place, None)
