"""The engine of this process: one text inline, or several in the rows of a batch whose passes are shared."""

import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing
from threading import Event as Signal
from typing import Any, Self

from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.policies import Setting
from specctl.text_engine.engine import Answered, Event, Part, Restarted, Writer
from specctl.text_engine.hub import CrowdedError, Hub
from specctl.text_engine.pair_rows import SharedBeginnings, keeping, split
from specctl.text_engine.row_count import Batch, chosen_passes

ROUND = 16
"""Batch passes between two rounds of the inline text: about one round of a row."""
RowWriter = Callable[[Pair, Callable[[], int]], Writer]
"""Makes a row's writer from its pair and a function that counts the prompt tokens copied from other rows."""


class Rows:
    """Texts that share passes. A row whose text has ended takes the next one at once; its prompt joins the shared
    passes.

    Args:
        hub: makes the passes.
        writers: one for each row.
        warn: receives a message when memory runs out.

    Attributes:
        rounds: the number of parts so far, over all texts.
    """

    def __init__(self, hub: Hub[Any], writers: Sequence[Writer], warn: Callable[[str], None] = lambda _: None) -> None:
        self._hub, self._writers, self._warn = hub, writers, warn
        self._asked: dict[int, tuple[int, Any]] = {}  # by row, its place and question; oldest first
        self._again: deque[int] = deque()  # rows whose texts were stopped to free memory
        self._most = len(writers)
        self._rested = list(range(self._most))  # idle rows, to be overwritten in this order
        self._happened: list[Event] = []
        self.rounds = 0

    @classmethod
    def over(
        cls,
        pair: Pair,
        passes: Sequence[Passes],
        writer: RowWriter,
        warn: Callable[[str], None] = lambda _: None,
        *,
        kept: bool = False,
    ) -> Self:
        """Rows over passes of a pair (`passes_of`).

        Args:
            pair: loaded.
            passes: the shared ones; unless ``kept``, other rows may use them at another time.
            writer: makes a row's writer.
            warn: receives a message when memory runs out.
            kept: whether prefixes cached by another row are copied instead of read, see `keeping`.
        """
        passes = keeping(pair, passes) if kept else passes
        hub, pairs = split(pair, passes)
        target = passes[-1]

        def saved(row: int) -> Callable[[], int]:
            return lambda: target.kept[row] if isinstance(target, SharedBeginnings) else 0

        return cls(hub, [writer(one, saved(row)) for row, one in enumerate(pairs)], warn)

    @property
    def count(self) -> int:
        return len(self._writers)

    @property
    def places(self) -> list[int]:
        """Places whose texts are being written."""
        return [place for place, _ in self._asked.values()]

    @property
    def busy(self) -> bool:
        """Whether any text is being written."""
        return bool(self._asked)

    def idle(self) -> list[int]:
        """Rows that can take a text now, the best first."""
        free = [row for row in self._rested if row not in self._asked]
        return free[: max(0, self._most - len(self._asked))]

    def begin(self, row: int, place: int, question: Any) -> None:
        """Begin the text of a place in an idle row."""
        self._asked[row] = place, question
        self._begin(row)

    def advance(self) -> list[Event]:
        """Make one pass of the hub.

        If memory runs out, the newest half of the texts is stopped and starts over when other texts have ended.
        """
        while self._again and len(self._hub.busy) < self._most:
            self._begin(self._again.popleft())
        try:
            for row, answer in self._hub.advance():
                place, _ = self._asked.pop(row)
                self._rested.append(self._rested.pop(self._rested.index(row)))
                self._happened.append(Answered(place, answer))
        except CrowdedError:
            written = [row for row in self._asked if row in self._hub.busy]
            self._most = max(1, len(written) // 2)
            for row in written[self._most :]:
                self._hub.give_up(row)
                self._happened.append(Restarted(self._asked[row][0]))
            self._again = deque(row for row in self._asked if row in {*written[self._most :], *self._again})
            self._warn(f"memory ran out with {len(written)} texts at once; the limit is {self._most} from now on")
        happened, self._happened = self._happened, []
        return happened

    def cancel(self, place: int) -> None:
        """Drop the text of a place; its row is idle then."""
        for row in [row for row, (its_place, _) in self._asked.items() if its_place == place]:
            del self._asked[row]
            self._again = deque(one for one in self._again if one != row)
            self._hub.give_up(row)
        self._happened = [event for event in self._happened if event.place != place]

    def close(self) -> None:
        if not sys.is_finalizing():  # then nothing can be switched to any more
            self._hub.close()

    def _begin(self, row: int) -> None:
        writer, (place, question) = self._writers[row], self._asked[row]

        def write() -> Any:
            with closing(writer(question)) as playing:
                while True:
                    try:
                        part = next(playing)
                    except StopIteration as end:
                        return end.value
                    self.rounds += 1
                    if part is not None:
                        self._happened.append(Part(place, part))

        self._hub.begin(row, write)


class HereEngine:
    """The `TextEngine` of this process.

    A single text is written inline, round by round, without a batch; texts that arrive meanwhile take rows. Without
    ``alone`` every text takes a row, so its passes have one shape whatever else is written.

    Args:
        alone: writes a single text inline; None if all texts take rows.
        rows: of several texts at once; None for one text at a time.
        make: in place of ``rows``, makes them for that number of questions; returns None if batching does not pay.
            Making and timing passes is slow, so the next call comes only once the number has doubled.
        prepare: called with each question before it begins. A question that waits for the future does not block others;
            an error of the future becomes the answer.
        places: the number of questions taken at once if ``make`` is given.
        about: sent to the parent process, pickled.
    """

    def __init__(
        self,
        alone: Writer | None,
        rows: Rows | None = None,
        *,
        make: Callable[[int], Rows | None] | None = None,
        prepare: Callable[[Any], "Future[Any] | None"] = lambda _: None,
        places: int = 1,
        about: Any = None,
    ) -> None:
        self._alone, self._rows, self._make, self._prepare, self.about = alone, rows, make, prepare, about
        self.count = rows.count if rows is not None else places
        self.ready = 1
        self._preparing: dict[int, tuple[Any, Future[Any]]] = {}  # by place
        self._prepared: dict[int, Any] = {}  # by place, the result of `prepare` for its last question
        self._waiting: dict[int, Any] = {}  # by place, the oldest first
        self._playing: tuple[int, Generator[Any, None, Any]] | None = None  # the text that is alone
        self._tried = 1  # the largest number of questions for which rows did not pay
        self._woken = Signal()

    @classmethod
    def of(
        cls,
        pair: Pair,
        writer: Callable[[Pair], Writer],
        batch: Batch = 1,
        texts: int = 1,
        limit: int = 0,
        settings: Sequence[Setting] = (),
        warn: Callable[[str], None] = lambda _: None,
        *,
        kept: bool = False,
    ) -> Self:
        """An engine over a pair: rows for all texts, or one text at a time.

        Args:
            pair: loaded.
            writer: makes what writes with the pair, or with a row's.
            batch, texts, limit, settings, warn: see `chosen_passes`.
            kept: see `Rows.over`.
        """
        passes = chosen_passes(pair, batch, texts, limit, settings, warn)
        if passes is None:
            return cls(writer(pair))
        return cls(None, Rows.over(pair, passes, lambda row, _: writer(row), warn, kept=kept))

    def free(self) -> list[int]:
        taken = {*self._preparing, *self._waiting}
        if self._playing is not None:
            taken.add(self._playing[0])
        if self._rows is not None:
            taken.update(self._rows.places)
        if self._make is None and self._rows is not None:
            room = len(self._rows.idle()) - len(self._preparing) - len(self._waiting)  # a single text takes no row
        else:
            room = self.count - len(taken)
        return [place for place in range(self.count + 1) if place not in taken][: max(0, room)]

    def submit(self, place: int, question: Any) -> None:
        self._prepared.pop(place, None)
        try:
            preparing = self._prepare(question)
        except Exception as error:
            preparing = Future()
            preparing.set_exception(error)
        if preparing is None:
            self._waiting[place] = question
        else:
            self._preparing[place] = question, preparing
            preparing.add_done_callback(lambda _: self.wake())

    def cancel(self, place: int) -> None:
        self._waiting.pop(place, None)
        if place in self._preparing:
            self._preparing.pop(place)[1].cancel()
        if self._playing is not None and self._playing[0] == place:
            self._playing[1].close()
            self._playing = None
        if self._rows is not None:
            self._rows.cancel(place)

    def step(self, seconds: float | None = None) -> list[Event]:
        """See `TextEngine`; writes a round of the inline text and about one of the rows, or one pass of the rows."""
        happened = self._take_prepared() if self._preparing else []
        if self._waiting:
            self._begin()
        rows = self._rows if self._rows is not None and self._rows.busy else None
        if not happened and self._playing is None and rows is None:
            self._woken.wait(seconds)
            self._woken.clear()
            return []
        passes = 1
        if self._playing is not None:
            passes = ROUND
            happened += self._play_on(*self._playing)
        if rows is not None:
            before = rows.rounds
            while passes and rows.busy and rows.rounds == before:
                passes -= 1
                happened += rows.advance()
        return happened

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._playing is not None:
            self._playing[1].close()
            self._playing = None
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_prepared(self) -> list[Event]:
        """Queue the questions that are prepared; answer those whose preparation failed."""
        happened: list[Event] = []
        for place, (question, preparing) in [*self._preparing.items()]:
            if preparing.done():
                del self._preparing[place]
                try:
                    self._prepared[place] = preparing.result()
                    self._waiting[place] = question
                except Exception as error:
                    happened.append(Answered(place, error))
        return happened

    def _begin(self) -> None:
        """Begin waiting questions: inline if there is only one and no other text, else in free rows."""
        if self._make is not None and self._rows is None and len(self._waiting) >= 2 * self._tried:
            self._tried = len(self._waiting)
            self._rows = self._make(self._tried)
        while self._waiting:
            nothing_else = self._playing is None and not (self._rows is not None and self._rows.busy)
            if self._alone is not None and nothing_else and (len(self._waiting) == 1 or self._rows is None):
                place = next(iter(self._waiting))
                self._playing = place, self._alone(self._waiting.pop(place))
            elif self._rows is not None and (idle := self._rows.idle()):
                place = next(iter(self._waiting))
                self._rows.begin(idle[0], place, self._waiting.pop(place))
            else:
                return

    def _play_on(self, place: int, playing: Generator[Any, None, Any]) -> list[Event]:
        try:
            part = next(playing)
        except StopIteration as end:
            self._playing = None
            return [Answered(place, end.value)]
        except BaseException:
            self._playing = None
            raise
        return [] if part is None else [Part(place, part)]
