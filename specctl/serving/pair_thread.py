"""The one thread that runs the models: it takes orders as they come and writes as many texts at once as it has rows."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace

from specctl.batching.pair_rows import keeping
from specctl.batching.row_replicas import RowReplicas
from specctl.batching.shared_beginnings import SharedBeginnings
from specctl.decoding.answers import failures_of_a_text
from specctl.errors import RecordError, SpecctlError
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.profile import Profile
from specctl.records import Completion, Round
from specctl.replicas.replica import Answered
from specctl.serving.order import Ended, Event, Ticket, Told
from specctl.serving.text_writer import TextWriter
from specctl.serving.waiting_line import FAILED, ClosedError
from specctl.serving.writers import Writers

ROUND = 16
"""Passes after which rows have ended a round, or read long prompts: then a text that is alone has its next one."""


class PairThread(Writers):
    """Owns a loaded pair. Orders wait until a row is free; what is written is told after every round.

    Caches are kept from text to text: a prompt that begins like one that they hold is read from where they differ.
    A text that is alone is written by the pair itself, as `generate` writes one; others take rows of a batch.

    Args:
        pair: loaded; nobody else uses it.
        profile: how it is used.
        passes: for the rows, `specctl.batching.pair_rows.passes_of`; None to write one text at a time.
        most_waiting, tell: as of `Writers`.
        warn: told that memory ran out.
    """

    def __init__(
        self,
        pair: Pair,
        profile: Profile,
        passes: Sequence[Passes] | None,
        most_waiting: int,
        tell: Callable[[Told], None],
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("models", most_waiting, tell)
        self._pair, self._profile, self._warn = pair, profile, warn
        self._passes = None if passes is None else keeping(pair, passes)
        self._happened: list[tuple[Ticket, Event]] = []
        self._running: dict[int, Ticket] = {}  # by row
        self._kept: dict[int, int] = {}  # by row, what was kept before its text began
        self._rounds = 0  # that have ended
        self._alone: tuple[Ticket, Generator[Round, bool | None, Completion]] | None = None

    @property
    def rows(self) -> int:
        return 1 if self._passes is None else self._passes[-1].slots

    @property
    def ready(self) -> int:
        return int(self.died is None)

    @property
    def running(self) -> int:
        return len(self._running) + (self._alone is not None)

    def _begun(self) -> list[Ticket]:
        alone = self._alone  # read once: the thread may end it meanwhile
        return [*self._running.values(), *([] if alone is None else [alone[0]])]

    def _work(self) -> None:
        rows: RowReplicas | None = None
        try:
            if self._passes is not None:
                rows = RowReplicas.over(self._pair, self._passes, self._row, self._warn)
            writer = TextWriter(self._pair, self._profile)
            while self._running or self._alone is not None or self._line.wait():
                self._drop_cancelled(rows)
                self._take(rows, writer)
                self._go_on(rows, writer)
                if self._happened:
                    happened, self._happened = self._happened, []
                    self._tell(happened)
        except Exception as error:
            self._die(error)
        finally:
            if self._alone is not None:
                self._alone[1].close()
            if rows is not None:
                rows.close()

    def _drop_cancelled(self, rows: RowReplicas | None) -> None:
        if self._alone is not None and self._alone[0].cancelled:
            self._alone[1].close()
            self._alone = None
        for row in [row for row, ticket in self._running.items() if ticket.cancelled]:
            assert rows is not None
            rows.give_up(row)
            del self._running[row]

    def _take(self, rows: RowReplicas | None, writer: TextWriter) -> None:
        """Begin what waits, where there is room: alone if nothing else is written, else in a row."""
        while len(self._line):
            free = self._alone is None and not self._running
            if free and (ticket := self._line.next(alone=rows is not None)) is not None:
                if not ticket.cancelled:
                    self._begin_alone(ticket, writer)
                continue
            idle = rows.idle() if rows is not None else []
            if not idle or (ticket := self._line.next()) is None:
                return
            if not ticket.cancelled:
                assert rows is not None
                self._running[idle[0]] = ticket
                self._kept[idle[0]] = self._shared(idle[0])
                rows.ask(idle[0], ticket)

    def _shared(self, row: int) -> int:
        """Tokens that the target did not read for a row, because another one had them."""
        passes = self._passes[-1] if self._passes is not None else None
        return passes.kept[row] if isinstance(passes, SharedBeginnings) else 0

    def _begin_alone(self, ticket: Ticket, writer: TextWriter) -> None:
        try:
            self._alone = ticket, writer.play(ticket.order)
        except SpecctlError as error:
            self._happened.append((ticket, error))
        except Exception:
            self._happened.append((ticket, ClosedError(FAILED)))
            raise

    def _go_on(self, rows: RowReplicas | None, writer: TextWriter) -> None:
        """A round of the text that is alone, and for the others a pass, or as many as a round takes."""
        passes = 1 if self._alone is None else ROUND
        if self._alone is not None:
            ticket, playing = self._alone
            try:
                with failures_of_a_text():
                    found = _next(playing)
            except SpecctlError as error:
                self._happened.append((ticket, error))
                self._alone = None
            else:
                if isinstance(found, Completion):
                    self._happened.append((ticket, Ended(found, writer.kept, ticket.begun)))
                    self._alone = None
                else:
                    self._wrote(ticket, ticket.heard, found)
        before = self._rounds
        while rows is not None and self._running and passes and self._rounds == before:
            passes -= 1
            for event in rows.wait():
                assert isinstance(event, Answered), "rows end with this process"
                ticket, told = self._running.pop(event.replica), event.answer
                if isinstance(told, Ended):
                    kept = told.kept + self._shared(event.replica) - self._kept[event.replica]
                    # A text that is read anew on the other side of a rotation's border finds its prompt a second time.
                    told = replace(told, kept=min(kept, told.completion.prompt_tokens - 1))
                self._happened.append((ticket, told))

    def _row(self, pair: Pair) -> Callable[[Ticket], Ended | SpecctlError]:
        """What writes texts in a row."""
        writer = TextWriter(pair, self._profile)

        def write(ticket: Ticket) -> Ended | SpecctlError:
            seen = 0
            try:
                with failures_of_a_text(), closing(writer.play(ticket.order)) as playing:
                    while not isinstance(found := _next(playing), Completion):
                        self._wrote(ticket, seen, found)
                        seen += len(found.emitted)
                    return Ended(found, writer.kept, ticket.begun)
            except SpecctlError as error:
                return error

        return write

    def _wrote(self, ticket: Ticket, seen: int, round_: Round) -> None:
        new = ticket.wrote(seen, round_)
        if new is None:
            raise RecordError("out_of_memory", "memory ran out, and the text went on otherwise when it was begun again")
        self._rounds += 1
        if new.tokens and ticket.every:
            self._happened.append((ticket, new))

    def _die(self, error: Exception) -> None:
        ended = [*self._begun(), *self._line.close(error)]
        self._tell([*self._happened, *((ticket, ClosedError(FAILED)) for ticket in ended)])


def _next(playing: Generator[Round, bool | None, Completion]) -> Round | Completion:
    """The next round of a text, or the text."""
    try:
        return next(playing)
    except StopIteration as end:
        completion: Completion = end.value
        return completion
