"""A replica as Ray runs it; Ray is imported in the actor's own process."""

import threading
from time import monotonic
from typing import Any

from specctl.replicas.job import Answer, Job, portable


class Actor:
    """One replica; the process of it that Ray starts makes it anew, and `begin` loads."""

    def __init__(self, job: Job, number: int, warm_seconds: float) -> None:
        self._job, self._number, self._warm = job, number, warm_seconds
        self._answer: Answer | None = None
        self._busy = threading.Lock()
        self._used = monotonic()
        if warm_seconds:
            threading.Thread(target=self._end_after_rest, name="rest", daemon=True).start()

    def begin(self) -> Exception | None:
        """Load, unless that was done; the error that kept it from it."""
        with self._busy:
            try:
                self._answer = self._answer or self._job.begin(self._number)
            except Exception as error:  # raised again where the replica was asked for
                return portable(error)
            finally:
                self._used = monotonic()
        return None

    def answer(self, question: Any) -> Any:
        """The answer to a question, or an exception in its place."""
        assert self._answer is not None, "a replica is asked before it is ready"
        with self._busy:
            try:
                return self._answer(question)
            except Exception as error:
                return portable(error)
            finally:
                self._used = monotonic()

    def watch(self) -> None:
        """Never answer: that this call fails tells at once that the actor has ended, also where it had no question."""
        threading.Event().wait()

    def _end_after_rest(self) -> None:
        """End once there was nothing to do for long enough."""
        import ray

        while True:
            rest = self._used + self._warm - monotonic()
            if rest > 0:
                threading.Event().wait(rest)
            elif self._busy.acquire(blocking=False):
                ray.kill(ray.get_runtime_context().current_actor)  # Ray is not to start it again
            else:
                threading.Event().wait(min(1.0, self._warm))
