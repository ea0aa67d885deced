"""The rows of a batch as replicas: one pair answers as many questions at once as it has rows."""

from collections.abc import Sequence
from time import sleep
from typing import Any, Self

from specctl.batching.hub import Hub
from specctl.replicas.job import Answer
from specctl.replicas.replica import Answered, Event


class RowReplicas:
    """`Replicas` of this process. A row whose question ended takes the next one at once, its prompt in others' passes.

    Args:
        hub: makes the passes.
        answers: for each row, what answers its questions over the hub.
    """

    def __init__(self, hub: Hub[Any], answers: Sequence[Answer]) -> None:
        self._hub, self._answers = hub, answers

    @property
    def count(self) -> int:
        return len(self._answers)

    def idle(self) -> list[int]:
        busy = self._hub.busy
        return [row for row in range(self.count) if row not in busy]

    def ask(self, replica: int, question: Any) -> None:
        answer = self._answers[replica]
        self._hub.begin(replica, lambda: answer(question))

    def wait(self, seconds: float | None = None) -> list[Event]:
        """As in `Replicas`; returns after one pass of the hub."""
        if seconds is not None and not self._hub.busy:
            sleep(seconds)
        return [Answered(row, answer) for row, answer in self._hub.advance()]

    def close(self) -> None:
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
