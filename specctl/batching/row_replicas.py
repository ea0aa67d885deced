"""The rows of a batch as replicas: one pair answers as many questions at once as it has rows."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any, Self

from specctl.batching.hub import CrowdedError, Hub
from specctl.batching.pair_rows import split
from specctl.batching.row_count import Batch, chosen_passes
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.policies import Setting
from specctl.replicas.job import Answer
from specctl.replicas.replica import Answered, Event


class RowReplicas:
    """`Replicas` of this process. A row whose question ended takes the next one at once, its prompt in others' passes.

    Args:
        hub: makes the passes.
        answers: for each row, what answers its questions over the hub.
        warn: told that memory ran out.
    """

    def __init__(self, hub: Hub[Any], answers: Sequence[Answer], warn: Callable[[str], None] = lambda _: None) -> None:
        self._hub, self._answers, self._warn = hub, answers, warn
        self._asked: dict[int, Any] = {}  # by row, the oldest question first
        self._again: deque[int] = deque()  # rows whose questions made room for others
        self._most = len(answers)
        self._rested = list(range(self._most))  # whose last text ended first, and may be overwritten first

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
        kept: bool = False,
    ) -> Self | None:
        """Rows of a pair; None where it writes one text at a time.

        Args:
            pair: loaded.
            answer: makes what answers over a row's pair.
            asked, texts, limit, settings, warn: as of `chosen_passes`.
            kept: as of `split`.
        """
        passes = chosen_passes(pair, asked, texts, limit, settings, warn)
        return None if passes is None else cls.over(pair, passes, answer, warn, kept=kept)

    @classmethod
    def over(
        cls,
        pair: Pair,
        passes: Sequence[Passes],
        answer: Callable[[Pair], Answer],
        warn: Callable[[str], None] = lambda _: None,
        *,
        kept: bool = False,
    ) -> Self:
        """Rows over passes of a pair, `passes_of`; others may be over the same ones in turn, if nothing is ``kept``."""
        hub, pairs = split(pair, passes, kept=kept)
        return cls(hub, [answer(row) for row in pairs], warn)

    @property
    def count(self) -> int:
        return len(self._answers)

    def idle(self) -> list[int]:
        free = [row for row in self._rested if row not in self._asked]
        return free[: max(0, self._most - len(self._asked))]

    def ask(self, replica: int, question: Any) -> None:
        self._asked[replica] = question
        self._begin(replica)

    def wait(self, seconds: float | None = None) -> list[Event]:
        """As in `Replicas`; returns after one pass of the hub.

        Where memory runs out, half of the texts, those begun last, make room, and begin again when others have ended.
        """
        if seconds is not None and not self._asked:
            sleep(seconds)
        while self._again and len(self._hub.busy) < self._most:
            self._begin(self._again.popleft())
        try:
            return [self._ended(row, answer) for row, answer in self._hub.advance()]
        except CrowdedError:
            written = [row for row in self._asked if row in self._hub.busy]
            self._most = max(1, len(written) // 2)
            for row in written[self._most :]:
                self._hub.give_up(row)
            self._again = deque(row for row in self._asked if row in {*written[self._most :], *self._again})
            self._warn(f"memory ran out with {len(written)} texts at once; from here on it is {self._most}")
            return []

    def give_up(self, replica: int) -> None:
        """Forget the question of a row, which is idle then."""
        del self._asked[replica]
        self._again = deque(row for row in self._again if row != replica)
        self._hub.give_up(replica)

    def _begin(self, row: int) -> None:
        answer, question = self._answers[row], self._asked[row]
        self._hub.begin(row, lambda: answer(question))

    def _ended(self, row: int, answer: Any) -> Answered:
        del self._asked[row]
        self._rested.append(self._rested.pop(self._rested.index(row)))
        return Answered(row, answer)

    def close(self) -> None:
        if not sys.is_finalizing():  # then nothing can be switched to any more
            self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
