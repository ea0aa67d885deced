"""The rows of a batch as replicas: one pair answers as many questions at once as it has rows."""

import sys
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any, Self

from specctl.batching.hub import Hub
from specctl.batching.pair_rows import split
from specctl.batching.row_count import Batch, chosen_passes
from specctl.models.running.pair import Pair
from specctl.models.running.runner import RowPasses
from specctl.policies import Setting
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

    @classmethod
    def of(
        cls,
        pair: Pair,
        answer: Callable[[Pair], Answer],
        asked: Batch,
        texts: int,
        limit: int,
        *,
        settings: Sequence[Setting] = (),
        warn: Callable[[str], None] = lambda _: None,
    ) -> Self | None:
        """Rows of a pair; None where it writes one text at a time.

        Args:
            pair: loaded.
            answer: makes what answers over a row's pair.
            asked, texts, limit, settings, warn: as of `chosen_passes`.
        """
        passes = chosen_passes(pair, asked, texts, limit, settings, warn)
        return None if passes is None else cls.over(pair, passes, answer)

    @classmethod
    def over(cls, pair: Pair, passes: Sequence[RowPasses], answer: Callable[[Pair], Answer]) -> Self:
        """Rows over passes of a pair, `passes_of`; others may be over the same ones in turn."""
        hub, pairs = split(pair, passes)
        return cls(hub, [answer(row) for row in pairs])

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
        if not sys.is_finalizing():  # then nothing can be switched to any more
            self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
