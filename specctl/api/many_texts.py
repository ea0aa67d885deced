"""Texts of several prompts, written at once where that is faster."""

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from specctl.batching.pair_rows import why_alone
from specctl.decoding.answers import failures_of_a_text
from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session, TextRequest
from specctl.errors import RecordError
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.profile import Profile
from specctl.records import Completion
from specctl.text_engine.dispatch import as_finished, in_order
from specctl.text_engine.engine import Writer, whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.row_count import MOST, Batch, chosen_passes

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
        prepared: Callable[[int, Any], TextRequest],
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
            warn: receives the reason why that number cannot be.
        """

        def asked() -> Iterator[tuple[tuple[int, RecordError | None], TextRequest | None]]:
            for number, prompt in enumerate(prompts):
                try:
                    yield (number, None), prepared(number, prompt)
                except RecordError as error:
                    yield (number, error), None

        def in_row(row: Pair, _: Callable[[], int]) -> Writer:
            return _writer(Session(row, None if profile.draft is None else build_drafter(row, profile.draft.setting)))

        texts = len(prompts) if isinstance(prompts, Sized) else MOST
        settings, used = [] if profile.draft is None else [profile.draft.setting], self._used
        passes = None if self._kept is None or self._kept[0] != batch or used else self._kept[1]
        if passes is None or passes[-1].slots > texts or why_alone(self._pair, *settings) is not None:
            passes = chosen_passes(self._pair, batch, texts, profile.sampling.max_new_tokens, settings, warn)
        if passes is None:
            engine, ahead = HereEngine(_writer(alone)), 1
        else:
            engine, ahead = HereEngine(None, Rows.over(self._pair, passes, in_row)), AHEAD
            if not used:
                self._kept, self._used = (batch, passes), True
        try:
            with engine:
                written = in_order(engine, asked(), ahead * engine.count) if ordered else as_finished(engine, asked())
                for (number, error), found in written:
                    yield number, error or found
        finally:
            self._used = used  # by another call


def _writer(session: Session) -> Writer:
    def write(request: TextRequest) -> Completion | RecordError:
        try:
            with failures_of_a_text():
                return session.generate(request.prompt, request.settings, seed_offset=request.seed_offset)
        except RecordError as error:
            return error

    return whole(write)
