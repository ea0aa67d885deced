"""Answers a stream of records by several replicas, and writes what one process would write. No torch here."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Record, error_line
from specctl.observing.progress import Advance, Tally, ignored
from specctl.outputs import Sink
from specctl.replicas.replica import Replicas
from specctl.replicas.window import GivenUp, Task, in_order
from specctl.resuming.finished import Finished


@dataclass(slots=True)
class ReplicatedRecords:
    """Answers records in order, as `RecordStream` does.

    What goes to a replica is a record's line number, id and data, and what comes back are lines: a record's rounds,
    written together, then its result or error. A record that no replica survives is answered with the error
    ``worker_died``.

    Attributes:
        replicas: each a `specctl.commands.tasks.record_answerer.replica`.
        sink, traced, finished, rounds, token_ids: as in `RecordStream`.
        tally: as in `RecordStream`.
        run_id: differs from run to run; policies of replicas that served another run start from nothing again.
    """

    replicas: Replicas
    sink: Sink
    traced: Sink | None = None
    finished: Finished | None = None
    rounds: bool = False
    token_ids: bool = False
    tally: Tally = field(default_factory=Tally)
    run_id: str = field(default_factory=lambda: uuid4().hex)

    def run(self, records: Iterable[Record | None], advance: Advance = ignored) -> bool:
        """Answer all records; returns whether every record could be answered, in this run and in an earlier one.

        Args:
            records: in order; None where the next one is not there yet.
            advance: called after each record.
        """
        for record, answer in in_order(self.replicas, self._tasks(records)):
            if record is None:  # an earlier run has answered it
                self.tally.kept += 1
                advance()
                continue
            reply = self._reply(record, answer)
            for line in reply["trace"]:
                assert self.traced is not None
                write_line(self.traced, line)
            write_line(self.sink, reply["line"])
            self.tally.add(fine=reply["fine"])
            advance(reply["tokens"])
        return not (self.tally.failed or (self.finished is not None and self.finished.failed))

    def _tasks(self, records: Iterable[Record | None]) -> Iterator[Task[Record | None] | None]:
        for record in records:
            if record is None:
                yield None
            elif self.finished is not None and self.finished.take(record):
                yield Task(None)
            elif record.error is not None:
                yield Task(record)
            else:
                yield Task(record, self._question(record))

    def _question(self, record: Record) -> dict[str, Any]:
        shown = {"rounds": self.rounds, "token_ids": self.token_ids}
        return {"run": self.run_id, "line": record.line, "id": record.id, "data": record.data, **shown}

    def _reply(self, record: Record, answer: Any) -> dict[str, Any]:
        error = record.error
        if isinstance(answer, GivenUp):
            error = RecordError("worker_died", f"no replica survived this record; {answer.why}")
        if error is not None:
            return {"trace": [], "line": error_line(record, error), "fine": False, "tokens": 0}
        return dict(answer)
