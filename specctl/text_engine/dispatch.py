"""What is above an engine: questions in order, put again where they were lost, or dropped. The same for all engines."""

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

WINDOW = 8  # Questions for each place that may be under way or wait after the oldest one without an answer
DEATHS = 2  # After this many ended processes with no other question, the question is given up
PAUSE = 0.05  # Seconds until a source that had nothing is asked again
Choose = Callable[[Any, Sequence[int], Iterable[int]], int]
"""Chooses a place for a question, of those that are free, given those that are busy."""
Asked = tuple[T, Any]
"""What a question belongs to, which stays here, and the question; None where there is nothing to ask."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Stands for an answer: the question ended `DEATHS` processes, the last one as ``why`` says."""

    why: str


@dataclass(slots=True, eq=False)
class _Held(Generic[T]):
    """A question on its way, and the processes that ended over it alone."""

    of: T
    question: Any
    deaths: int = 0


class Dispatcher(Generic[T]):
    """Puts questions to an engine's places as these become free; what was lost goes before all others.

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
        """What is answered now, or waits because what answered it has ended."""
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
        """Take a question, which is put to a place in the next step; ``of`` comes back with all that happens to it."""
        self._waiting.append(_Held(of, question))

    def cancel(self, of: T) -> None:
        """Drop a question: nothing more is reported of it."""
        self._waiting = deque(held for held in self._waiting if held.of is not of)
        for place in [place for place, held in self._asked.items() if held.of is of]:
            del self._asked[place]
            self._engine.cancel(place)

    def step(self, seconds: float | None = None) -> list[tuple[T, Part | Restarted | Answered | GivenUp]]:
        """What happened next, see `TextEngine.step`; a question's last event is `Answered` or `GivenUp`."""
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
        """Put what waits to the places that are free."""
        while self._waiting and (free := self._engine.free()):
            # Without a choice a process gets as many questions as it takes before the next one gets any.
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
    """What each question belongs to with its answer, in the order of the questions, each once.

    Questions are taken only as far as the window reaches, so a slow answer holds up no more than that in memory.

    Args:
        engine: answers the questions.
        tasks: questions in order; None where the next one is not there yet, see `arriving`.
        window: how many may be taken and not handed out; `WINDOW` for each place by default.
        part: receives parts of answers as they come, whether or not earlier questions are answered.

    Yields:
        The answer is None where there was no question, and `GivenUp` for one that ended too many processes.

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
    """`in_order`, each as soon as it is answered; questions are taken as places become free."""
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
    """What a source gives, with None whenever it has nothing yet: for pipes, where the next line may come late.

    Args:
        source: is read by a thread of its own.
        wake: called in that thread when something has arrived, such as `TextEngine.wake`.
        ahead: how many items it may be ahead.
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
