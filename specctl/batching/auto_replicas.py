"""A pair that answers one question at a time, and several at once when so many are there and that pays."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any, Self

from specctl.batching.row_replicas import RowReplicas
from specctl.replicas.job import Answer
from specctl.replicas.replica import Answered, Event


class AutoReplicas:
    """`Replicas` of this process for questions that come when they come, as from a pipe.

    A question that is there alone is answered as if there were no others. Rows are made when several are there; a
    question that comes then takes a free row at once.

    Args:
        alone: answers one question at a time.
        rows: makes the rows for so many questions that are there; None where that does not pay yet. Making and timing
            passes takes long, so it is asked again only when twice as many are there.
        places: how many questions may be taken at once.
    """

    def __init__(self, alone: Answer, rows: Callable[[int], RowReplicas | None], places: int) -> None:
        self._alone, self._make, self._places = alone, rows, places
        self._rows: RowReplicas | None = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._answered: dict[int, int] = {}  # the place whose question a row has
        self._tried = 1  # as many that were there were not enough for rows

    @property
    def count(self) -> int:
        return self._places

    def idle(self) -> list[int]:
        taken = {place for place, _ in self._waiting} | {*self._answered.values()}
        return [place for place in range(self._places) if place not in taken]

    def ask(self, replica: int, question: Any) -> None:
        self._waiting.append((replica, question))

    def wait(self, seconds: float | None = None) -> list[Event]:
        """As in `Replicas`; returns after one pass of the rows, or one question that was alone."""
        if self._rows is None and len(self._waiting) >= 2 * self._tried:
            self._tried = len(self._waiting)
            self._rows = self._make(self._tried)
        if self._waiting and (self._rows is None or (len(self._waiting) == 1 and not self._answered)):
            place, question = self._waiting.popleft()
            return [Answered(place, self._alone(question))]
        if self._rows is None or not (self._waiting or self._answered):
            sleep(seconds or 0.0)
            return []
        for row in self._rows.idle():
            if self._waiting:
                self._answered[row], question = self._waiting.popleft()
                self._rows.ask(row, question)
        events = self._rows.wait(seconds)
        return [replace(event, replica=self._answered.pop(event.replica)) for event in events]

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
