"""Scheduling on top of any engine: questions are submitted in order, resubmitted after a loss, or cancelled."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event as Signal
from threading import Thread
from typing import Any, Generic, TypeVar

from specctl.text_engine.engine import Answered, Part, Restarted, TextEngine

T = TypeVar("T")

WINDOW = 8  # Per place, the number of questions that may follow the oldest unanswered one
DEATHS = 2  # A question is given up after it alone was on this many processes that ended
PAUSE = 0.05  # Seconds until a source that had nothing is asked again
Choose = Callable[[Any, Sequence[int], Iterable[int]], int]
"""Chooses one of the free places for a question, given the busy ones."""
Asked = tuple[T, Any]
"""An owner, which stays in this process, and its question; None if there is nothing to ask."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Takes the place of an answer: the question ended `DEATHS` processes, the last one for the reason ``why``."""

    why: str


@dataclass(slots=True, eq=False)
class _Held(Generic[T]):
    """A question without an answer, and the number of processes that ended with it as their only question."""

    of: T
    question: Any
    deaths: int = 0


class Dispatcher(Generic[T]):
    """Submits questions to an engine's places as they become free; lost questions come first.

    Args:
        engine: answers.
        choose: chooses a question's place; by default the engine's best.
    """

    def __init__(self, engine: TextEngine, choose: Choose | None = None) -> None:
        self._engine, self._choose = engine, choose
        self._waiting: deque[_Held[T]] = deque()
        self._asked: dict[int, _Held[T]] = {}

    @property
    def begun(self) -> list[T]:
        """Owners of questions that are running, or that wait for a resubmission after a loss."""
        return [held.of for held in (*list(self._waiting), *list(self._asked.values()))]

    @property
    def waiting(self) -> int:
        """Questions that wait for a place."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Questions that have a place."""
        return len(self._asked)

    def room(self) -> int:
        """Questions that `submit` would give a place at once."""
        return max(0, len(self._engine.free()) - len(self._waiting))

    def submit(self, of: T, question: Any) -> None:
        """Queue a question for the next step; ``of`` is its owner, which accompanies all of its events."""
        self._waiting.append(_Held(of, question))

    def cancel(self, of: T) -> None:
        """Drop a question: nothing more is reported of it."""
        self._waiting = deque(held for held in self._waiting if held.of is not of)
        for place in [place for place, held in self._asked.items() if held.of is of]:
            del self._asked[place]
            self._engine.cancel(place)

    def step(self, seconds: float | None = None) -> list[tuple[T, Part | Restarted | Answered | GivenUp]]:
        """The next events, see `TextEngine.step`; a question's last event is `Answered` or `GivenUp`."""
        self.hand_out()
        happened: list[tuple[T, Part | Restarted | Answered | GivenUp]] = []
        for event in self._engine.step(seconds):
            held = self._asked.get(event.place)
            if held is None:  # cancelled
                continue
            if isinstance(event, Part | Restarted):
                happened.append((held.of, event))
                continue
            del self._asked[event.place]
            if isinstance(event, Answered):
                happened.append((held.of, event))
                continue
            held.deaths += event.alone
            if held.deaths < DEATHS:
                self._waiting.appendleft(held)
                happened.append((held.of, Restarted(event.place, lost=True)))
            else:
                happened.append((held.of, GivenUp(event.why)))
        return happened

    def hand_out(self) -> None:
        """Submit waiting questions to the free places."""
        while self._waiting and (free := self._engine.free()):
            # Without ``choose``, a process is filled before the next one gets any question.
            for place in free if self._choose is None else free[:1]:
                if self._waiting:
                    held = self._waiting.popleft()
                    if self._choose is not None:
                        place = self._choose(held.question, free, self._asked)
                    self._asked[place] = held
                    self._engine.submit(place, held.question)


def in_order(
    engine: TextEngine,
    tasks: Iterable[Asked[T] | None],
    window: int | None = None,
    *,
    part: Callable[[T, Part | Restarted], None] = lambda *_: None,
) -> Iterator[tuple[T, Any]]:
    """Yield each question's owner and answer, in the order of the questions.

    Only ``window`` questions are taken ahead, so a slow answer keeps a bounded number of later answers in memory.

    Args:
        engine: answers the questions.
        tasks: questions in order; None where the next one is not there yet, see `arriving`.
        window: the number of questions that may be taken and not yet yielded; by default `WINDOW` per place.
        part: receives parts of answers at once, even if earlier questions are unanswered.

    Yields:
        The answer is None if the task has no question, and `GivenUp` if the question ended too many processes.

    Raises:
        SpecctlError: as `TextEngine.step`.
    """
    most = WINDOW * engine.count if window is None else window
    source, ended = iter(tasks), False
    order: deque[_Place[T]] = deque()
    dispatcher: Dispatcher[_Place[T]] = Dispatcher(engine)
    while True:
        late = False
        while not ended and not late and len(order) < most:
            try:
                task = next(source)
            except StopIteration:
                ended = True
                break
            late = task is None
            if task is not None:
                order.append(place := _Place(task[0], done=task[1] is None))
                if not place.done:
                    dispatcher.submit(place, task[1])
        dispatcher.hand_out()
        if order and order[0].done:
            place = order.popleft()
            yield place.of, place.answer
            continue
        if ended and not order:
            return
        for place, event in dispatcher.step(PAUSE if late else None):
            if isinstance(event, Part | Restarted):
                part(place.of, event)
            else:
                place.done, place.answer = True, event.answer if isinstance(event, Answered) else event


@dataclass(slots=True, eq=False)
class _Place(Generic[T]):
    """A question's place in the order."""

    of: T
    done: bool
    answer: Any = None


def as_finished(engine: TextEngine, tasks: Iterable[Asked[T]]) -> Iterator[tuple[T, Any]]:
    """Like `in_order`, but yields each answer at once; questions are taken as places become free."""
    dispatcher: Dispatcher[T] = Dispatcher(engine)
    source = iter(tasks)
    while True:
        while dispatcher.room():
            try:
                of, question = next(source)
            except StopIteration:
                source = iter(())
                break
            if question is None:
                yield of, None
            else:
                dispatcher.submit(of, question)
        if not dispatcher.begun:
            return
        for of, event in dispatcher.step():
            if isinstance(event, Answered):
                yield of, event.answer
            elif isinstance(event, GivenUp):
                yield of, event


def arriving(source: Iterable[T], wake: Callable[[], None] = lambda: None, ahead: int = 64) -> Iterator[T | None]:
    """Yield a source's items, and None whenever the next one has not arrived yet, as with slow pipes.

    Args:
        source: read by a separate thread.
        wake: called in that thread when an item has arrived, such as `TextEngine.wake`.
        ahead: the number of items that the thread may read ahead.
    """
    items: Queue[list[T] | BaseException | None] = Queue(ahead)
    closed = Signal()

    def put(item: list[T] | BaseException | None) -> None:
        while not closed.is_set():
            with suppress(Full):
                items.put(item, timeout=1.0)
                wake()
                return

    def read() -> None:
        try:
            for item in source:
                put([item])
                if closed.is_set():
                    return
        except BaseException as error:  # raised again where the items are taken
            put(error)
        put(None)

    Thread(target=read, name="input", daemon=True).start()
    try:
        while True:
            try:
                found = items.get_nowait()
            except Empty:
                yield None
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found[0]
    finally:
        closed.set()
