"""Answers a stream of records in order by any engine, and writes each as soon as it is finished. This module does not
import torch.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from specctl.decoding.answers import Answerer, OnRound, TurnEnd, TurnRound
from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Record, error_line, result_line
from specctl.observing.progress import Advance, Tally, ignored
from specctl.outputs import Sink
from specctl.records import CompletionSummary
from specctl.resuming import Finished, TurnsFile
from specctl.round_trace import trace_line
from specctl.text_engine.dispatch import Asked, GivenUp, in_order
from specctl.text_engine.engine import Part, Restarted, TextEngine, Writer

Watch = Callable[[Record], AbstractContextManager[OnRound | None]]
"""Makes a context manager that is open while a record is answered; it yields a callback for each round."""


def tracer(record: Record, sink: Sink | None) -> OnRound | None:
    """A function that writes every round of a record to ``sink``; None without a sink."""
    if sink is None:
        return None
    return lambda turn, _, round_: write_line(sink, trace_line(record, turn, round_))


class RecordRequest(NamedTuple):
    """A record for an engine to answer."""

    run: str  # differs between runs: policies in processes that served an earlier run start afresh
    record: Record  # without an error
    done: Sequence[CompletionSummary] = ()  # its first turns, answered in an earlier run


def record_writer(answerer: Callable[[], Answerer], *, traced: bool = False, watch: Watch | None = None) -> Writer:
    """The writer that answers a `RecordRequest` in an engine.

    Its parts are lines of the trace, if wanted, and every finished turn but the last. Its answer is a
    `CompletionSummary` for each turn, or the `RecordError`.

    Args:
        answerer: makes an answerer with fresh policies.
        traced: whether rounds are wanted.
        watch: shows rounds while a record is answered.
    """
    served: tuple[str, Answerer] | None = None

    def write(request: RecordRequest) -> Generator[Any, None, list[CompletionSummary] | RecordError]:
        nonlocal served
        if served is None or served[0] != request.run:
            served = request.run, answerer()
        record, found = request.record, [*request.done]
        turns = len(record.data.get("turns", ("",)))
        try:
            with ExitStack() as stack:
                shown = None if watch is None else stack.enter_context(watch(record))
                playing = stack.enter_context(closing(served[1].play(record, request.done)))
                for happened in playing:
                    if isinstance(happened, TurnRound):
                        if shown is not None:
                            shown(*happened)
                        yield trace_line(record, happened.turn, happened.round) if traced else None
                    else:
                        found.append(happened.completion.summary)
                        if happened.turn < turns - 1:  # the last one comes with the answer
                            yield TurnEnd(happened.turn, found[-1])
        except RecordError as error:
            return error
        return found

    return write


class _OpenRecords:
    """The running records: parts of the oldest are written, parts of others wait until it has ended.

    So an interrupt loses at most one turn of a conversation, and a trace has each record's rounds in a row.

    Args:
        traced: receives the lines of rounds.
        turns: receives finished turns.
        at_once: whether the oldest record's parts are written as they come. If another writer may start the record
            over, they must wait for the answer.
    """

    def __init__(self, traced: Sink | None, turns: TurnsFile | None, *, at_once: bool) -> None:
        self._traced, self._turns, self._at_once = traced, turns, at_once
        self._open: deque[Record] = deque()
        self._parts: dict[int, list[Any]] = {}  # by line

    def begin(self, record: Record) -> None:
        """Note that a record is begun."""
        self._open.append(record)

    def happened(self, record: Record, event: Part | Restarted) -> None:
        """Take a part of a record's answer."""
        if isinstance(event, Restarted):
            self._parts.pop(record.line, None)
        elif self._at_once and record is self._open[0]:
            self._write(event.value)
        else:
            self._parts.setdefault(record.line, []).append(event.value)

    def answered(self) -> None:
        """The oldest record is answered: write its waiting parts."""
        self._write_parts()

    def end(self) -> None:
        """The oldest record has its line."""
        if self._turns is not None:
            self._turns.clear()
        self._open.popleft()
        if self._at_once and self._open:
            self._write_parts()

    def _write_parts(self) -> None:
        for part in self._parts.pop(self._open[0].line, []):
            self._write(part)

    def _write(self, part: Any) -> None:
        if not isinstance(part, TurnEnd):
            if self._traced is not None:
                write_line(self._traced, part)
        elif self._turns is not None:
            self._turns.add(self._open[0], part.turn, part.completion.summary)


@dataclass(slots=True)
class RecordStream:
    """Answers records in order."""

    engine: TextEngine  # answers each `RecordRequest` as `record_writer` does
    sink: Sink  # receives result lines
    traced: Sink | None = None  # receives trace lines; None to write none
    # records that an earlier run answered in the same output; None without an earlier run
    finished: Finished | None = None
    # rounds, token_ids: whether result lines contain them
    rounds: bool = False
    token_ids: bool = False
    turns: TurnsFile | None = None  # receives finished turns of a record with several turns; None to store none
    at_once: bool = True  # whether rounds and turns are written as they end, see `_OpenRecords`
    tally: Tally = field(default_factory=Tally)  # counts of records
    run_id: str = field(default_factory=lambda: uuid4().hex)  # as in `RecordRequest`

    def run(self, records: Iterable[Record | None], advance: Advance = ignored) -> bool:
        """Answer all records; returns whether every record could be answered, in this run and in an earlier one.

        A record on which too many processes died is answered with the error ``worker_died``.

        Args:
            records: in order; None where the next one is not there yet.
            advance: called after each record.
        """
        records_open = _OpenRecords(self.traced, self.turns, at_once=self.at_once)

        def part(record: Record | None, event: Part | Restarted) -> None:
            assert record is not None
            records_open.happened(record, event)

        window = 1 if self.engine.count == 1 else None
        for record, answer in in_order(self.engine, self._asked(records, records_open), window, part=part):
            if record is None:  # an earlier run has answered it
                self.tally.kept += 1
                advance()
                continue
            records_open.answered()
            line, tokens = self._line(record, answer)
            write_line(self.sink, line)
            records_open.end()
            self.tally.add(fine="error" not in line)
            advance(tokens)
        return not (self.tally.failed or (self.finished is not None and self.finished.failed))

    def _asked(
        self, records: Iterable[Record | None], records_open: _OpenRecords
    ) -> Iterator[Asked[Record | None] | None]:
        for record in records:
            if record is None:
                yield None
            elif self.finished is not None and self.finished.take(record):
                yield None, None
            else:
                records_open.begin(record)
                done = self.turns.of(record) if self.turns is not None and "turns" in record.data else ()
                yield record, None if record.error is not None else RecordRequest(self.run_id, record, done)

    def _line(
        self, record: Record, answer: Sequence[CompletionSummary] | RecordError | GivenUp | None
    ) -> tuple[dict[str, Any], int]:
        """A record's line, and the number of tokens generated for it."""
        if isinstance(answer, GivenUp):
            answer = RecordError("worker_died", f"no replica survived this record; {answer.why}")
        if answer is None or isinstance(answer, RecordError):
            error = record.error or answer
            assert error is not None
            return error_line(record, error), 0
        line = result_line(record, answer, rounds=self.rounds, token_ids=self.token_ids)
        return line, sum(len(one.tokens) for one in answer)
