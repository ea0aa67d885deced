"""Answers a stream of records in order, each written as soon as it is finished."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from specctl.decoding.answers import Answerer, OnRound
from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Record, error_line, result_line
from specctl.observing.progress import Advance, Tally, ignored
from specctl.outputs import Sink
from specctl.records import Completion, CompletionSummary
from specctl.resuming.finished import Finished
from specctl.resuming.turns_file import TurnsFile
from specctl.round_trace import trace_line

Watch = Callable[[Record, OnRound | None], AbstractContextManager[OnRound | None]]
"""Makes a context manager for the time in which a record is answered. It receives the function that traces rounds, if
any, and yields the function to call with each round, which calls the tracing function too."""


def tracer(record: Record, sink: Sink | None) -> OnRound | None:
    """A function that writes every round of a record to ``sink``; None without a sink."""
    if sink is None:
        return None
    return lambda turn, _, round_: write_line(sink, trace_line(record, turn, round_))


def trace_alone(record: Record, trace: OnRound | None) -> AbstractContextManager[OnRound | None]:  # noqa: ARG001
    """A `Watch` that shows nothing and only traces."""
    return nullcontext(trace)


@dataclass(frozen=True, slots=True)
class Reply:
    """A record's line in the output.

    Attributes:
        line: the result, or the error.
        tokens: how many were generated.
        fine: whether the record could be answered.
    """

    line: dict[str, Any]
    tokens: int
    fine: bool


def reply_to(
    record: Record,
    answer: Callable[[Record], Sequence[Completion | CompletionSummary]],
    *,
    rounds: bool,
    token_ids: bool,
) -> Reply:
    """The line of a record whose completions ``answer`` gives; ``rounds`` and ``token_ids`` as in `result_line`."""
    try:
        completions = answer(record)
    except RecordError as error:
        return Reply(error_line(record, error), 0, fine=False)
    line = result_line(record, completions, rounds=rounds, token_ids=token_ids)
    return Reply(line, sum(len(completion.tokens) for completion in completions), fine=True)


@dataclass(slots=True)
class RecordStream:
    """Answers records in order.

    Attributes:
        answerer: answers one record.
        sink: receives result lines.
        traced: receives trace lines; None to write none.
        finished: records that an earlier run answered in the same output; None without an earlier run.
        rounds, token_ids: whether result lines contain them.
        watch: shows rounds while a record is answered.
        turns: keeps the finished turns of a record that has several; None to keep none.
        tally: what became of the records.
    """

    answerer: Answerer
    sink: Sink
    traced: Sink | None = None
    finished: Finished | None = None
    rounds: bool = False
    token_ids: bool = False
    watch: Watch = trace_alone
    turns: TurnsFile | None = None
    tally: Tally = field(default_factory=Tally)

    def run(self, records: Iterable[Record], advance: Advance = ignored) -> bool:
        """Answer all records; returns whether every record could be answered, in this run and in an earlier one.

        ``advance`` is called after each record.
        """
        for record in records:
            if self.finished is not None and self.finished.take(record):
                self.tally.kept += 1
                advance(0)
                continue
            reply = reply_to(record, self._answer, rounds=self.rounds, token_ids=self.token_ids)
            write_line(self.sink, reply.line)
            if self.turns is not None:
                self.turns.clear()
            self.tally.add(fine=reply.fine)
            advance(reply.tokens)
        return not (self.tally.failed or (self.finished is not None and self.finished.failed))

    def _answer(self, record: Record) -> Sequence[Completion | CompletionSummary]:
        trace = tracer(record, self.traced)
        turns, last = self.turns, len(record.data.get("turns", ("",))) - 1

        def keep(turn: int, completion: Completion) -> None:
            if turns is not None and turn < last:  # the last one comes with the result
                turns.add(record, turn, completion.summary)

        with nullcontext(trace) if record.error is not None else self.watch(record, trace) as on_round:
            done = turns.of(record) if turns is not None else ()
            return [*done, *self.answerer.answer(record, on_round, done=done, on_turn=keep)]
