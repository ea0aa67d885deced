"""Questions answered by several replicas, in the order in which they were put."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

from specctl.replicas.replica import Answered, Lost, Replicas

T = TypeVar("T")

WINDOW = 8
"""Questions for each replica that may be under way or wait behind the oldest one without an answer."""
DEATHS = 2
"""So many ready replicas must have ended over a question alone before it is given up."""
PAUSE = 0.05
"""Seconds until a source that had nothing is asked again."""


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """Something to do, in its place in the order.

    Attributes:
        of: what it belongs to; stays here.
        question: goes to a replica; None where there is nothing to ask.
    """

    of: T
    question: Any = None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Stands for an answer: the question ended `DEATHS` replicas, the last one as ``why`` says."""

    why: str


@dataclass(slots=True, eq=False)
class _Place(Generic[T]):
    """A task's place in the window."""

    task: Task[T]
    done: bool
    answer: Any = None
    deaths: int = 0


def in_order(replicas: Replicas, tasks: Iterable[Task[T] | None], window: int | None = None) -> Iterator[tuple[T, Any]]:
    """What each task belongs to with its answer, in the order of the tasks, each once.

    Tasks are taken only as far as the window reaches, so a slow answer holds up no more than that in memory. A question
    whose replica ended goes to the next one that is idle, before all others.

    Args:
        replicas: answer the questions.
        tasks: in order; None where the next one is not there yet, see `arriving`.
        window: how many tasks may be taken and not handed out; `WINDOW` for each replica by default.

    Yields:
        The answer is None for a task without a question, and `GivenUp` for one that ended too many replicas.

    Raises:
        SpecctlError: as `Replicas.wait`.
    """
    most = WINDOW * replicas.count if window is None else window
    source, ended = iter(tasks), False
    places: deque[_Place[T]] = deque()
    waiting: deque[_Place[T]] = deque()
    asked: dict[int, _Place[T]] = {}
    while True:
        late = False
        while not ended and not late and len(places) < most:
            try:
                task = next(source)
            except StopIteration:
                ended = True
                break
            late = task is None
            if task is not None:
                place = _Place(task, done=task.question is None)
                places.append(place)
                if not place.done:
                    waiting.append(place)
        for replica in replicas.idle():
            if waiting:
                asked[replica] = waiting.popleft()
                replicas.ask(replica, asked[replica].task.question)
        if places and places[0].done:
            place = places.popleft()
            yield place.task.of, place.answer
            continue
        if ended and not places:
            return
        for event in replicas.wait(PAUSE if late else None):
            held = asked.pop(event.replica, None)
            if held is None:
                continue
            if isinstance(event, Answered):
                held.done, held.answer = True, event.answer
                continue
            assert isinstance(event, Lost), "records are answered whole"
            held.deaths += event.alone
            if held.deaths < DEATHS:
                waiting.appendleft(held)
            else:
                held.done, held.answer = True, GivenUp(event.why)


def arriving(source: Iterable[T], ahead: int = 64) -> Iterator[T | None]:
    """What a source gives, with None whenever it has nothing yet: for pipes, whose next line may be long in coming.

    Args:
        source: is read by a thread of its own.
        ahead: how many items it may be ahead.
    """
    items: Queue[list[T] | BaseException | None] = Queue(ahead)
    closed = Event()

    def put(item: list[T] | BaseException | None) -> None:
        while not closed.is_set():
            with suppress(Full):
                items.put(item, timeout=1.0)
                return

    def read() -> None:
        try:
            for item in source:
                put([item])
                if closed.is_set():
                    return
        except BaseException as error:  # raised again by who takes the items
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
