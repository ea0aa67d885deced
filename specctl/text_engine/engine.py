"""The interface between callers that need texts and engines that write them: questions go in, events come out."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

MOST_FAILURES = 3  # The number of restarts of a process without an answer in between

Answer = Callable[[Any], Any]
"""Answers a question. Between processes, both are plain values: dictionaries, lists, text, bytes, numbers."""
Writer = Callable[[Any], Generator[Any, None, Any]]
"""Answers a question in parts: yields each part, or None for an unwanted one, and returns the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The question of a place has its answer; the place is free."""

    place: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """The process that answered a place's question has ended. The place is free; the question has no answer."""

    place: int
    why: str  # how it ended
    alone: bool = True  # whether it was the only question lost; else any of them may be the cause


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the answer to a place's question; the answer comes after all of them."""

    place: int
    value: Any


@dataclass(frozen=True, slots=True)
class Restarted:
    """The answer to a place's question starts over: discard its earlier parts."""

    place: int
    lost: bool = False  # whether the process ended; else memory ran out


Event = Answered | Lost | Part | Restarted


class TextEngine(Protocol):
    """Answers questions, such as requests for texts: one for each of its places at a time.

    The engine restarts a process that ends unexpectedly, until it has failed `MOST_FAILURES` times in a row. The
    questions of such a process come back as `Lost`. `specctl.text_engine.dispatch` submits them again.
    """

    @property
    def count(self) -> int:
        """The number of places, including those of processes that are not ready yet."""

    @property
    def ready(self) -> int:
        """Pairs of models that are loaded and can answer."""

    def free(self) -> Sequence[int]:
        """Places that can take a question now, the best first."""

    def submit(self, place: int, question: Any) -> None:
        """Submit a question to a free place."""

    def cancel(self, place: int) -> None:
        """Drop a place's question: no event follows. The place becomes free now, or once the writer has noticed."""

    def step(self, seconds: float | None = None) -> list[Event]:
        """Work until an event has happened, or a place has become free.

        Args:
            seconds: the longest wait while no question is running; None waits for `wake`.

        Raises:
            TextEngineError: no process is left to answer.
            SpecctlError: a writer raised it while loading or answering.
        """

    def wake(self) -> None:
        """Let `step` return; may be called by any thread."""

    def close(self) -> None:
        """End the processes, except those kept warm."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def wait_until_ready(engine: TextEngine) -> None:
    """Wait until a place is free; raises as `TextEngine.step` does."""
    while not engine.free():
        engine.step()


def whole(answer: Answer) -> Writer:
    """Turn a function that answers a question into a writer without parts."""

    def write(question: Any) -> Generator[Any, None, Any]:
        yield from ()
        return answer(question)

    return write


@dataclass(slots=True)
class Places:
    """The places of one process or actor."""

    count: int = 1  # how many
    asked: set[int] = field(default_factory=set)  # those with a question
    cancelled: set[int] = field(default_factory=set)  # those of them that were cancelled
    failures: int = 0  # how often the process ended since it last answered a question
    # answers to go during which it gets one question at a time, because one of several ended the last process
    careful: int = 0

    def free(self) -> list[int]:
        """Places that can take a question."""
        left = [place for place in range(self.count) if place not in self.asked]
        return (left[:1] if not self.asked else []) if self.careful else left

    def answered(self, place: int) -> bool:
        """Note an answer, and return whether it is wanted."""
        self.asked.discard(place)
        self.failures, self.careful = 0, max(0, self.careful - 1)
        wanted = place not in self.cancelled
        self.cancelled.discard(place)
        return wanted

    def lost(self, *, counts: bool = True) -> list[int]:
        """Note the process's end, and return the places of its questions in the order to requeue them at the front.

        ``counts`` is whether this is one of its `failures`.
        """
        lost = sorted(self.asked, reverse=True)
        self.failures, self.careful = self.failures + counts, len(lost) if len(lost) > 1 else self.careful
        wanted = [place for place in lost if place not in self.cancelled]
        self.asked.clear()
        self.cancelled.clear()
        return wanted
