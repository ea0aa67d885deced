"""A replica as Ray runs it; Ray is imported in the actor's own process."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any
from uuid import uuid4

from specctl.replicas.job import Answer, Job, portable
from specctl.replicas.places import Attendant, SeveralAnswers

GONE = "gone"
"""What a call says that was meant for an earlier process of the actor."""
STALE = "stale"
"""What an actor says that has loaded what is no longer in the models' files."""


class Actor:
    """One replica. Ray makes its process anew after a death, and repeats there what the dead one had been asked.

    So every call but the first names the life, which is the process, that it is meant for, and comes back with what
    became of it: ``done``, ``failed``, `GONE` or `STALE`.
    """

    def __init__(self, job: Job, number: int, warm_seconds: float) -> None:
        self._job, self._number, self._warm = job, number, warm_seconds
        self._life = uuid4().hex
        self._answer: Answer | None = None
        self._state: list[Any] = []
        self._lock, self._busy = threading.Lock(), 0  # calls under way
        self._released = threading.Event()
        self._used = monotonic()
        if warm_seconds:
            threading.Thread(target=self._end_after_rest, name="rest", daemon=True).start()

    def life(self) -> tuple[str, Any]:
        """Which process this is."""
        return "done", self._life

    def begin(self, life: str) -> tuple[str, Any]:
        """Load, unless that was done and the files are still those that were loaded."""

        def load() -> bool:
            if self._answer is None:
                answer = self._job.begin(self._number)
                assert not isinstance(answer, Attendant), "calls of an actor have one answer each"
                self._answer = answer if callable(answer) else SeveralAnswers(answer)
                self._state = self._job.state()
                return True
            return self._job.state() == self._state

        how, value = self._in(life, load)
        return (how, value) if value is not False else (STALE, None)

    def answer(self, life: str, question: Any) -> tuple[str, Any]:
        """The answer to a question."""
        assert self._answer is not None or life != self._life, "a replica is asked before it is ready"
        answer = self._answer
        return self._in(life, lambda: answer(question) if answer is not None else None)

    def watch(self, life: str) -> tuple[str, Any]:
        """Come back only once that process has ended, so that its end is known also where it had no question."""
        if life == self._life:
            self._released.wait()
        return GONE, None

    def release(self) -> None:
        """End `watch`: Ray would complain of a call that it cannot repeat when it kills the actor."""
        self._released.set()

    def retire(self) -> None:
        """End for good, unless a command is being answered."""
        import ray

        with self._lock:
            if not self._busy:
                ray.kill(ray.get_runtime_context().current_actor)  # Ray is not to start it again

    def _in(self, life: str, work: Callable[[], Any]) -> tuple[str, Any]:
        if life != self._life:
            return GONE, None
        with self._lock:
            self._busy += 1
        try:
            return "done", work()
        except Exception as error:  # raised again where the replica was asked
            return "failed", portable(error)
        finally:
            with self._lock:
                self._busy -= 1
                self._used = monotonic()

    def _end_after_rest(self) -> None:
        """End once there was nothing to do for long enough."""
        while True:
            rest = self._used + self._warm - monotonic()
            if rest > 0:
                threading.Event().wait(rest)
            else:
                self.retire()
                threading.Event().wait(min(1.0, self._warm))


def described(ray: Any) -> type[Actor]:
    """`Actor` with what Ray has to know of its methods: one that watches holds up nothing, and nothing its release."""

    class Replica(Actor):
        """An `Actor` with threads for `watch`, `release` and `retire`, and for answers, of which each is waited for."""

        @ray.method(concurrency_group="answers")  # type: ignore[untyped-decorator]
        def answer(self, life: str, question: Any) -> tuple[str, Any]:
            return super().answer(life, question)

        @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
        def watch(self, life: str) -> tuple[str, Any]:
            return super().watch(life)

        @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
        def release(self) -> None:
            super().release()

        @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
        def retire(self) -> None:
            super().retire()

    return Replica
