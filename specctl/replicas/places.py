"""The questions that a replica holds which answers several at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from specctl.replicas.replica import Answered, Replicas

Asked = SimpleQueue[tuple[Any, Any]]
Send = Callable[[Any, Any], None]
"""Called with what a question is known by, and its answer or a part of that."""


class Attendant(ABC):
    """A replica that answers in parts, and may be told meanwhile that an answer is not wanted any more.

    Attributes:
        places: how many questions it answers at once.
        about: what those who ask have to know of it; it is pickled.
    """

    places: int
    about: Any

    @abstractmethod
    def attend(self, questions: Asked, part: Send, answer: Send) -> None:
        """Answer questions as they come; never returns.

        Args:
            questions: each with its place; None in place of a question withdraws the one that is there, which is then
                answered at once, with whatever.
            part: sends a part of an answer.
            answer: sends the end of it; another question may have the place then.
        """


@dataclass(slots=True)
class Places:
    """The places of a replica, as many as the questions that it answers at once.

    Attributes:
        count: how many.
        asked: those whose questions it has.
        failures: how often it ended since it last answered a question.
        careful: answers to go during which it gets one question at a time, for one of several ended the last process.
    """

    count: int = 1
    asked: set[int] = field(default_factory=set)
    failures: int = 0
    careful: int = 0

    def free(self) -> list[int]:
        """Those that a question may be put to."""
        left = [place for place in range(self.count) if place not in self.asked]
        return (left[:1] if not self.asked else []) if self.careful else left

    def answered(self, place: int) -> None:
        self.asked.discard(place)
        self.failures, self.careful = 0, max(0, self.careful - 1)

    def lost(self) -> list[int]:
        """Its process ended: the places whose questions have no answer, the first last, for it is put before others."""
        lost = sorted(self.asked, reverse=True)
        self.failures, self.careful = self.failures + 1, len(lost) if len(lost) > 1 else self.careful
        self.asked.clear()
        return lost


def answer_several(replicas: Replicas, questions: Asked, send: Callable[[Any, Any], None]) -> None:
    """Answer questions as they come, as many at once as there are replicas of this process; never returns.

    Args:
        replicas: they end with the process.
        questions: each with what it is known by.
        send: called with that and the answer.
    """
    waiting: list[tuple[Any, Any]] = []
    places: dict[int, Any] = {}  # by replica what its question is known by
    while True:
        while not (waiting or places) or not questions.empty():
            waiting.append(questions.get())
        for replica in replicas.idle():
            if waiting:
                places[replica], question = waiting.pop(0)
                replicas.ask(replica, question)
        for event in replicas.wait():
            assert isinstance(event, Answered), "replicas of a process end with it"
            send(places.pop(event.replica), event.answer)


class SeveralAnswers:
    """Replicas of this process as a function that several threads call at once, and that answers all of them.

    Args:
        replicas: used by one thread alone.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._questions: Asked = SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._error: Exception | None = None
        Thread(target=self._serve, args=(replicas,), name="several answers", daemon=True).start()

    def __call__(self, question: Any) -> Any:
        """The answer; raises what a question made the replicas raise, which end with it."""
        future: Future[Any] = Future()
        self._open.add(future)
        self._questions.put((future, question))
        if self._error is not None:
            raise self._error
        return future.result()

    def _serve(self, replicas: Replicas) -> None:
        def send(future: Future[Any], answer: Any) -> None:
            self._open.discard(future)
            future.set_result(answer)

        try:
            answer_several(replicas, self._questions, send)
        except Exception as error:
            self._error = error
            for future in list(self._open):
                future.set_exception(error)
