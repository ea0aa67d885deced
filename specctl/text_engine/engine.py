"""The seam between what asks for texts and what writes them: questions go to places, events come back."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

MOST_FAILURES = 3  # How often a process is started again without having answered a question in between

Answer = Callable[[Any], Any]
"""Answers a question. In another process both are plain values: dictionaries, lists, text, bytes, numbers."""
Writer = Callable[[Any], Generator[Any, None, Any]]
"""Answers a question in parts: yields each part, or None for one that is not asked for, and returns the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The question of a place has its answer; the place is free."""

    place: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """What answered the question of a place has ended; the place is free, and the question has no answer."""

    place: int
    why: str  # how it ended
    alone: bool = True  # whether no other question was lost with it; else any of them may be the reason


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the answer to a place's question; the answer comes after all of them."""

    place: int
    value: Any


@dataclass(frozen=True, slots=True)
class Restarted:
    """The question of a place is answered from the beginning again: its parts so far count no more."""

    place: int
    lost: bool = False  # whether what answered it has ended; else its memory ran out


Event = Answered | Lost | Part | Restarted


class TextEngine(Protocol):
    """Answers questions, such as requests for texts, as many at once as it has places.

    What ends unexpectedly is started again by the engine until it has failed `MOST_FAILURES` times in a row; its
    questions come back as `Lost`. `specctl.text_engine.dispatch` submits them again.
    """

    @property
    def count(self) -> int:
        """Questions that are answered at once, whether or not all of the engine is ready."""

    @property
    def ready(self) -> int:
        """Pairs of models that are loaded and can answer."""

    def free(self) -> Sequence[int]:
        """Places that can take a question now, the best first."""

    def submit(self, place: int, question: Any) -> None:
        """Put a question to a free place."""

    def cancel(self, place: int) -> None:
        """Drop the question of a place: no event follows. The place is free now or once its writer has noticed."""

    def step(self, seconds: float | None = None) -> list[Event]:
        """Go on until something has happened, perhaps only that a place became free.

        Args:
            seconds: the longest wait where nothing is being answered; None waits for `wake`.

        Raises:
            TextEngineError: nothing is left that could answer.
            SpecctlError: what a writer raised instead of loading or answering.
        """

    def wake(self) -> None:
        """Let `step` return; may be called by any thread."""

    def close(self) -> None:
        """End what answers, unless it is to stay."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def wait_until_ready(engine: TextEngine) -> None:
    """Wait until a place is free; raises as `TextEngine.step` does."""
    while not engine.free():
        engine.step()


def whole(answer: Answer) -> Writer:
    """A function that answers a question at once, as a writer without parts."""

    def write(question: Any) -> Generator[Any, None, Any]:
        yield from ()
        return answer(question)

    return write


@dataclass(slots=True)
class Places:
    """The places of one process or actor."""

    count: int = 1  # how many
    asked: set[int] = field(default_factory=set)  # those with a question
    cancelled: set[int] = field(default_factory=set)  # those of them whose answer is not wanted
    failures: int = 0  # how often the process ended since it last answered a question
    # answers to go during which it gets one question at a time, because one of several ended the last process
    careful: int = 0

    def free(self) -> list[int]:
        """Those that a question may be put to."""
        left = [place for place in range(self.count) if place not in self.asked]
        return (left[:1] if not self.asked else []) if self.careful else left

    def answered(self, place: int) -> bool:
        """A question has its answer; returns whether that is wanted."""
        self.asked.discard(place)
        self.failures, self.careful = 0, max(0, self.careful - 1)
        wanted = place not in self.cancelled
        self.cancelled.discard(place)
        return wanted

    def lost(self) -> list[int]:
        """The process ended: the places whose questions have no answer, each to be put before those ahead of it."""
        lost = sorted(self.asked, reverse=True)
        self.failures, self.careful = self.failures + 1, len(lost) if len(lost) > 1 else self.careful
        wanted = [place for place in lost if place not in self.cancelled]
        self.asked.clear()
        self.cancelled.clear()
        return wanted
