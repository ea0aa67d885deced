"""Answers a stream of records in order, each written as soon as it is finished."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from specctl.decoding.answers import Answerer, OnRound
from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Finished, Record, error_line, result_line
from specctl.metrics import Metrics
from specctl.outputs import Sink
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
    """

    answerer: Answerer
    sink: Sink
    traced: Sink | None = None
    finished: Finished | None = None
    rounds: bool = False
    token_ids: bool = False
    watch: Watch = trace_alone

    def run(self, records: Iterable[Record], advance: Callable[[Metrics], None] = lambda _: None) -> bool:
        """Answer all records; returns whether every record could be answered, in this run and in an earlier one.

        ``advance`` is called after each record with the metrics of this run so far.
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
