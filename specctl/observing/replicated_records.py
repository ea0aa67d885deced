"""Answers a stream of records by several replicas, and writes what one process would write. No torch here."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from specctl.errors import RecordError
from specctl.files import write_line
from specctl.jsonl import Record, error_line
from specctl.observing.progress import Advance, Tally, ignored
from specctl.outputs import Sink
from specctl.records import Completion, CompletionSummary
from specctl.replicas.replica import Replicas
from specctl.replicas.window import GivenUp, Task, in_order
from specctl.resuming.finished import Finished
from specctl.resuming.turns_file import TurnsFile

if TYPE_CHECKING:
    from specctl.observing.record_stream import Watch


class _Turn(NamedTuple):
    turn: int
    completion: CompletionSummary
    rounds: Sequence[dict[str, Any]]


class OldestTurns:
    """Keeps the finished turns of the oldest of several records that are being answered, each behind its rounds.

    Args:
        file: takes them.
        traced: takes the rounds' lines, which no later run would write; None where they are not wanted.

    Attributes:
        written: of the oldest record so many turns have their rounds written.
    """

    def __init__(self, file: TurnsFile, traced: Sink | None = None) -> None:
        self._file, self._traced = file, traced
        self._begun: deque[Record] = deque()
        self._later: dict[int, list[_Turn]] = {}
        self._known: dict[int, int] = {}
        self.written = 0

    def begin(self, record: Record) -> None:
        """A record is answered from now on."""
        self._begun.append(record)

    def keep(self, record: Record, turn: int, completion: Completion, rounds: Sequence[dict[str, Any]] = ()) -> None:
        """A turn has ended; the last one is not kept, for it comes with the result."""
        if turn == len(record.data["turns"]) - 1 or turn < self._known.get(record.line, 0):
            return  # a record that made room for others begins again
        self._known[record.line] = turn + 1
        ended = _Turn(turn, completion.summary, rounds)
        if record is self._begun[0]:
            self._write(ended)
        else:
            self._later.setdefault(record.line, []).append(ended)

    def end(self) -> None:
        """The oldest record has its result."""
        line = self._begun.popleft().line
        for kept in (self._later, self._known):
            kept.pop(line, None)
        self._file.clear()
        self.written = 0
        for ended in self._later.pop(self._begun[0].line, []) if self._begun else []:
            self._write(ended)

    def _write(self, ended: "_Turn") -> None:
        if self._traced is not None:
            for line in ended.rounds:
                write_line(self._traced, line)
        self._file.add(self._begun[0], ended.turn, ended.completion)
        self.written = ended.turn + 1


@dataclass(slots=True)
class ReplicatedRecords:
    """Answers records in order, as `RecordStream` does.

    What goes to a replica is a record's line number, id and data, and what comes back are lines: a record's rounds,
    written together but for those of kept turns, then its result or error. A record that no replica survives is
    answered with the error ``worker_died``.

    Attributes:
        replicas: each a `specctl.commands.loading.replica`.
        sink, traced, finished, rounds, token_ids: as in `RecordStream`.
        turns, watch: as there, where replicas are this process's own.
        tally: as in `RecordStream`.
        run_id: differs from run to run; policies of replicas that served another run start from nothing again.
    """

    replicas: Replicas
    sink: Sink
    traced: Sink | None = None
    finished: Finished | None = None
    rounds: bool = False
    token_ids: bool = False
    turns: TurnsFile | None = None
    watch: "Watch | None" = None
    tally: Tally = field(default_factory=Tally)
    run_id: str = field(default_factory=lambda: uuid4().hex)

    def run(self, records: Iterable[Record | None], advance: Advance = ignored) -> bool:
        """Answer all records; returns whether every record could be answered, in this run and in an earlier one.

        Args:
            records: in order; None where the next one is not there yet.
            advance: called after each record.
        """
        kept = None if self.turns is None else OldestTurns(self.turns, self.traced)
        for record, answer in in_order(self.replicas, self._tasks(records, kept)):
            if record is None:  # an earlier run has answered it
                self.tally.kept += 1
                advance()
                continue
            reply = self._reply(record, answer)
            for line in reply["trace"]:
                assert self.traced is not None
                if kept is None or line["turn"] >= kept.written:
                    write_line(self.traced, line)
            write_line(self.sink, reply["line"])
            if kept is not None:
                kept.end()
            self.tally.add(fine=reply["fine"])
            advance(reply["tokens"])
        return not (self.tally.failed or (self.finished is not None and self.finished.failed))

    def _tasks(
        self, records: Iterable[Record | None], kept: OldestTurns | None
    ) -> Iterator[Task[Record | None] | None]:
        for record in records:
            if record is None:
                yield None
            elif self.finished is not None and self.finished.take(record):
                yield Task(None)
            else:
                if kept is not None:
                    kept.begin(record)
                yield Task(record, None if record.error is not None else self._question(record, kept))

    def _question(self, record: Record, kept: OldestTurns | None) -> dict[str, Any]:
        shown = {"rounds": self.rounds, "token_ids": self.token_ids}
        asked = {"run": self.run_id, "line": record.line, "id": record.id, "data": record.data, **shown}
        if self.watch is not None:
            asked["watch"] = self.watch
        if self.turns is None or kept is None or "turns" not in record.data:
            return asked
        return {**asked, "done": self.turns.of(record), "on_turn": partial(kept.keep, record)}

    def _reply(self, record: Record, answer: Any) -> dict[str, Any]:
        error = record.error
        if isinstance(answer, GivenUp):
            error = RecordError("worker_died", f"no replica survived this record; {answer.why}")
        if error is not None:
            return {"trace": [], "line": error_line(record, error), "fine": False, "tokens": 0}
        return dict(answer)
