"""Answers a stream of records in order, each written as soon as it is finished."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO

from specctl.decoding.answers import Answerer, OnRound
from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Finished, Record, error_line, result_line
from specctl.metrics import Metrics
from specctl.round_trace import trace_line

Watch = Callable[[Record, OnRound | None], AbstractContextManager[OnRound | None]]
"""While a record is answered, what is called with its rounds besides the trace."""


def tracer(record: Record, sink: IO[str] | None) -> OnRound | None:
    """Writes every round of a record to ``sink``; None where there is no sink."""
    if sink is None:
        return None
    return lambda turn, _, round_: write_line(sink, trace_line(record, turn, round_))


def trace_alone(record: Record, trace: OnRound | None) -> AbstractContextManager[OnRound | None]:  # noqa: ARG001
    """A `Watch` that adds nothing to the trace."""
    return nullcontext(trace)


@dataclass(slots=True)
class RecordStream:
    """Answers records in order.

    Attributes:
        answerer: answers one record.
        sink: where result lines go.
        traced: where trace lines go; None for none.
        finished: what an earlier run left in the output, which needs no answer; None for nothing.
        rounds, token_ids: whether result lines have them.
        watch: shows rounds while a record is answered.
    """

    answerer: Answerer
    sink: IO[str]
    traced: IO[str] | None = None
    finished: Finished | None = None
    rounds: bool = False
    token_ids: bool = False
    watch: Watch = trace_alone

    def run(self, records: Iterable[Record], advance: Callable[[Metrics], None] = lambda _: None) -> bool:
        """Answer all records; whether every one could be answered, those of an earlier run included.

        ``advance`` is called after each record with the sums of this run.
        """
        metrics, fine = Metrics(), True
        for record in records:
            if self.finished is None or not self.finished.take(record):
                fine &= self._answer(record, metrics)
            advance(metrics)
        return fine and not (self.finished is not None and self.finished.failed)

    def _answer(self, record: Record, metrics: Metrics) -> bool:
        trace = tracer(record, self.traced)
        try:
            with nullcontext(trace) if record.error is not None else self.watch(record, trace) as on_round:
                completions = self.answerer.answer(record, on_round)
        except RecordError as error:
            write_line(self.sink, error_line(record, error))
            return False
        for completion in completions:
            metrics.add(completion.summary)
        write_line(self.sink, result_line(record, completions, rounds=self.rounds, token_ids=self.token_ids))
        return True
