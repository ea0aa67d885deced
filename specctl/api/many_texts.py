"""Texts of several prompts, written at once where that is faster."""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

from specctl.batching.pair_rows import why_alone
from specctl.batching.row_count import MOST, Batch, chosen_passes
from specctl.batching.row_replicas import RowReplicas
from specctl.decoding.answers import failures_of_a_text
from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.errors import RecordError
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.profile import Profile
from specctl.profile.schema import SamplingTable
from specctl.records import Completion
from specctl.replicas.replica import Answered
from specctl.replicas.window import Task, in_order

Asked = tuple[list[int], SamplingTable, int]
"""Ids of a prompt, its settings, and what is added to their seed."""
AHEAD = 2
"""Prompts for each row that may be taken before the oldest of them is written."""


class SeveralTexts:
    """What writes several texts with a pair; passes that were made for some stay for the next ones.

    Args:
        pair: loaded.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._kept: tuple[Batch, list[Passes]] | None = None
        self._used = False

    def write(
        self,
        prompts: Iterable[Any],
        prepared: Callable[[int, Any], Asked],
        alone: Session,
        profile: Profile,
        batch: Batch,
        *,
        ordered: bool,
        warn: Callable[[str], None],
    ) -> Iterator[tuple[int, Completion | RecordError]]:
        """The number of each prompt, with its text or the reason why there is none.

        Args:
            prompts: taken as they are needed.
            prepared: makes of a prompt and its number what is asked.
            alone: writes one text at a time.
            profile: says which drafts are at work.
            batch: how many texts are written at once.
            ordered: whether the texts come in the order of the prompts, or as they are finished.
            warn: told why so many cannot be.
        """

        def asked() -> Iterator[tuple[int, Asked | RecordError]]:
            for number, prompt in enumerate(prompts):
                try:
                    yield number, prepared(number, prompt)
                except RecordError as error:
                    yield number, error

        texts = len(prompts) if isinstance(prompts, Sized) else MOST
        settings, used = [] if profile.draft is None else [profile.draft.setting], self._used
        passes = None if self._kept is None or self._kept[0] != batch or used else self._kept[1]
        if passes is None or passes[-1].slots > texts or why_alone(self._pair, *settings) is not None:
            passes = chosen_passes(self._pair, batch, texts, profile.sampling.max_new_tokens, settings, warn)
        if passes is None:
            for number, one in asked():
                yield number, one if isinstance(one, RecordError) else _text(alone, one)
            return
        if not used:
            self._kept, self._used = (batch, passes), True

        def answer(row: Pair) -> Callable[[Asked], Completion | RecordError]:
            session = Session(row, None if profile.draft is None else build_drafter(row, profile.draft.setting))
            return lambda one: _text(session, one)

        try:
            with RowReplicas.over(self._pair, passes, answer) as rows:
                if ordered:
                    tasks = (Task(one, None if isinstance(one[1], RecordError) else one[1]) for one in asked())
                    for (number, one), found in in_order(rows, tasks, AHEAD * rows.count):
                        yield number, found or cast("RecordError", one)
                else:
                    yield from _as_finished(rows, asked())
        finally:
            self._used = used  # by another call


def _as_finished(
    rows: RowReplicas, asked: Iterator[tuple[int, Asked | RecordError]]
) -> Iterator[tuple[int, Completion | RecordError]]:
    numbers: dict[int, int] = {}
    while True:
        for row in rows.idle():
            for number, one in asked:
                if not isinstance(one, RecordError):
                    numbers[row] = number
                    rows.ask(row, one)
                    break
                yield number, one
        if not numbers:
            return
        for event in rows.wait():
            assert isinstance(event, Answered), "rows end with this process"
            yield numbers.pop(event.replica), event.answer


def _text(session: Session, asked: Asked) -> Completion | RecordError:
    ids, settings, offset = asked
    try:
        with failures_of_a_text():
            return session.generate(ids, settings, seed_offset=offset)
    except RecordError as error:
        return error
