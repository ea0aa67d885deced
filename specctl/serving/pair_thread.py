"""The one thread that runs the models: it takes orders as they come and writes as many texts at once as it has rows."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from specctl.batching.pair_rows import keeping
from specctl.batching.row_replicas import RowReplicas
from specctl.batching.shared_beginnings import SharedBeginnings
from specctl.decoding.answers import failures_of_a_text
from specctl.errors import RecordError, SpecctlError
from specctl.models.running.pair import Pair
from specctl.models.running.runner import RowPasses
from specctl.profile import Profile
from specctl.records import Completion, Round
from specctl.replicas.replica import Answered
from specctl.serving.order import Event, Ticket
from specctl.serving.text_writer import TextWriter

Told = Sequence[tuple[Ticket, Event]]
"""What happened in a round, in order."""


ROUND = 16
"""Passes after which rows have ended a round, or read long prompts: then a text that is alone has its next one."""
CLOSING, FAILED = "the server is shutting down", "the models have failed"


class BusyError(SpecctlError):
    """As many orders wait as may."""


class ClosedError(SpecctlError):
    """No more orders are taken, and those that wait are not begun."""


class PairThread:
    """Owns a loaded pair. Orders wait in a queue until a row is free; what is written is told after every round.

    Caches are kept from text to text: a prompt that begins like one that they hold is read from where they differ.
    A text that is alone is written by the pair itself, as `generate` writes one; others take rows of a batch.

    Args:
        pair: loaded; nobody else uses it.
        profile: how it is used.
        passes: for the rows, `specctl.batching.pair_rows.passes_of`; None to write one text at a time.
        most_waiting: orders that may wait.
        tell: called in the thread with what happened.
        warn: told that memory ran out.
    """

    def __init__(
        self,
        pair: Pair,
        profile: Profile,
        passes: Sequence[RowPasses] | None,
        most_waiting: int,
        tell: Callable[[Told], None],
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._pair, self._profile, self._warn = pair, profile, warn
        self._passes = None if passes is None else keeping(pair, passes)
        self._own_kept = 0  # what a row or the pair had of its own last text
        self._most_waiting, self._tell = most_waiting, tell
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._closing = False
        self._happened: list[tuple[Ticket, Event]] = []
        self._running: dict[int, Ticket] = {}  # by row
        self._rounds = 0  # that have ended
        self._alone: tuple[Ticket, Generator[Round, bool | None, Completion]] | None = None
        self._thread = threading.Thread(target=self._work, name="models", daemon=True)
        self.prompt_tokens = 0
        """Of all prompts that were read."""
        self.died: Exception | None = None
        """What ended the thread, if an error did."""

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Texts that are being written."""
        return len(self._running) + (self._alone is not None)

    @property
    def waiting(self) -> int:
        """Orders that wait."""
        return len(self._waiting)

    @property
    def kept_tokens(self) -> int:
        """Of the prompts' tokens, those that the target did not read, because they were in its caches."""
        shared = self._passes[-1] if self._passes is not None else None
        return self._own_kept + (shared.kept if isinstance(shared, SharedBeginnings) else 0)

    @property
    def closing(self) -> bool:
        """Whether no more orders are taken."""
        return self._closing or self.died is not None

    def submit(self, ticket: Ticket) -> None:
        """Take an order.

        Raises:
            BusyError: too many wait.
            ClosedError: it is closing, or its models have failed.
        """
        with self._changed:
            if self.closing:
                raise ClosedError(CLOSING if self.died is None else FAILED)
            if len(self._waiting) >= self._most_waiting:
                raise BusyError(f"{len(self._waiting)} requests wait already")
            self._waiting.append(ticket)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """End a text before its end, within a round; nothing more is told of it."""
        ticket.cancelled = True
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    def close(self) -> None:
        """Take no more orders and tell those that wait so; what is being written is finished."""
        with self._changed:
            self._closing = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify()
        self._tell([(ticket, ClosedError(CLOSING)) for ticket in waiting])

    def give_up(self) -> None:
        """`close`, and end what is being written."""
        self.close()
        for ticket in [*self._running.values(), *([self._alone[0]] if self._alone is not None else [])]:
            ticket.cancelled = True

    def join(self, seconds: float) -> None:
        """Wait until what is being written is finished."""
        self._thread.join(seconds)

    def _work(self) -> None:
        rows: RowReplicas | None = None
        try:
            if self._passes is not None:
                rows = RowReplicas.over(self._pair, self._passes, self._row, self._warn)
            writer = TextWriter(self._pair, self._profile)
            while self._wait_for_work():
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

    def _wait_for_work(self) -> bool:
        if self._running or self._alone is not None:
            return True
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return False
                self._changed.wait()
        return True

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
        while self._waiting:
            idle = rows.idle() if rows is not None else []
            with self._changed:
                alone = self._alone is None and (rows is None or (not self._running and len(self._waiting) == 1))
                if not self._waiting or not (alone or idle):
                    return
                ticket = self._waiting.popleft()
            if ticket.cancelled:
                continue
            if alone:
                self._begin_alone(ticket, writer)
            else:
                assert rows is not None
                self._running[idle[0]] = ticket
                rows.ask(idle[0], ticket)

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
                if not ticket.heard:
                    self._count(ticket, writer)
            except SpecctlError as error:
                self._happened.append((ticket, error))
                self._alone = None
            else:
                if isinstance(found, Completion):
                    self._happened.append((ticket, found))
                    self._alone = None
                else:
                    self._wrote(ticket, ticket.heard, found)
        before = self._rounds
        while rows is not None and self._running and passes and self._rounds == before:
            passes -= 1
            for event in rows.wait():
                assert isinstance(event, Answered), "rows end with this process"
                self._happened.append((self._running.pop(event.replica), event.answer))

    def _row(self, pair: Pair) -> Callable[[Ticket], Completion | SpecctlError]:
        """What writes texts in a row."""
        writer = TextWriter(pair, self._profile)

        def write(ticket: Ticket) -> Completion | SpecctlError:
            seen = 0
            try:
                with failures_of_a_text(), closing(writer.play(ticket.order)) as playing:
                    while not isinstance(found := _next(playing), Completion):
                        if not seen:
                            self._count(ticket, writer)
                        self._wrote(ticket, seen, found)
                        seen += len(found.emitted)
                    return found
            except SpecctlError as error:
                return error

        return write

    def _count(self, ticket: Ticket, writer: TextWriter) -> None:
        """A prompt has been read."""
        self.prompt_tokens += len(ticket.order.prompt)
        self._own_kept += writer.kept

    def _wrote(self, ticket: Ticket, seen: int, round_: Round) -> None:
        new = ticket.hear(seen, round_)
        if new is None:
            raise RecordError("out_of_memory", "memory ran out, and the text went on otherwise when it was begun again")
        self._rounds += 1
        if new.tokens and (ticket.every or ticket.heard == len(new.tokens)):
            self._happened.append((ticket, new))

    def _die(self, error: Exception) -> None:
        with self._changed:
            self.died = error
            waiting, self._waiting = [*self._waiting], deque()
        ended: list[Any] = [*self._running.values(), *waiting]
        if self._alone is not None:
            ended.append(self._alone[0])
        self._tell([*self._happened, *((ticket, ClosedError(FAILED)) for ticket in ended)])


def _next(playing: Generator[Round, bool | None, Completion]) -> Round | Completion:
    """The next round of a text, or the text."""
    try:
        return next(playing)
    except StopIteration as end:
        completion: Completion = end.value
        return completion
