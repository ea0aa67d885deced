"""`RESULTS.turns.jsonl`, the finished turns of the conversation that is being answered."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from pydantic import TypeAdapter

from specctl.errors import UsageError
from specctl.files import lines_of, parse_line, write_line
from specctl.jsonl import Record
from specctl.outputs import OutputFile, Outputs
from specctl.records import CompletionSummary
from specctl.resuming.identities import content_of

SUFFIX = ".turns.jsonl"
_START = b'{"kind": "turn", '


@dataclass(frozen=True, slots=True)
class _TurnLine:
    """A finished turn: `Record.key` and `content_of` its record, its number from 0, and its answer."""

    kind: str
    record: str
    content: int
    turn: int
    completion: CompletionSummary


class TurnsFile:
    """Keeps the finished turns of one record at a time, so that an interrupt loses no more than a turn.

    It exists only while there is such a record, or when an interrupt has left one.

    Args:
        outputs: of the command; they hold and lock the file.
        results: the results, a regular file.
        force: whether another file of this name may be replaced.

    Raises:
        UsageError: there is another file of this name.
    """

    def __init__(self, outputs: Outputs, results: OutputFile, *, force: bool = False) -> None:
        path = results.path.resolve()
        self._outputs, self._path = outputs, path.with_name(path.name + SUFFIX)
        self._file: OutputFile | None = None
        self._kept: tuple[str, list[CompletionSummary]] = "", []
        if self._path.exists() and not force:
            with self._path.open("rb") as file:
                start = file.read(len(_START))
            if not _START.startswith(start):
                raise UsageError(f"{self._path} was not written by this command", "remove it, or choose another name")

    @property
    def kept(self) -> tuple[str, int]:
        """The `Record.key` whose turns an interrupted run left, and how many of them."""
        return self._kept[0], len(self._kept[1])

    def find(self, record: Record) -> None:
        """Look for turns of a record that an interrupted run left; what is damaged or of another record is left out."""
        found: list[CompletionSummary] = []
        with suppress(UsageError):
            for number, line in lines_of(self._path) if self._path.exists() else ():
                each = parse_line(_lines(), self._path, number, line)
                if (each.record, each.content, each.turn) != (record.key, content_of(record.data), len(found)):
                    break
                found.append(each.completion)
        self._kept = record.key, found[: len(record.data.get("turns", ())) - 1]

    def begin(self) -> None:
        """Drop what is not `kept`."""
        if self._path.exists():
            size = sum(len(line) for _, (_, line) in zip(range(self.kept[1]), lines_of(self._path), strict=False))
            self._opened().begin(size)

    def of(self, record: Record) -> Sequence[CompletionSummary]:
        """The finished turns of a record."""
        key, turns = self._kept
        return turns if turns and key == record.key else ()

    def add(self, record: Record, turn: int, completion: CompletionSummary) -> None:
        """Keep a finished turn of the record that is being answered."""
        line = _TurnLine("turn", record.key, content_of(record.data), turn, completion)
        write_line(self._opened(), _lines().dump_python(line, mode="json"))

    def clear(self) -> None:
        """Forget the turns: their record is finished."""
        self._kept = "", []
        if self._file is not None:
            self._file.begin(0)

    def close(self) -> None:
        """Remove the file unless it holds turns."""
        with suppress(OSError):
            if self._file is not None and self._path.stat().st_size == 0:
                self._path.unlink()

    def _opened(self) -> OutputFile:
        if self._file is None:
            self._file = self._outputs.file("turns", self._path, resumed=True)
        return self._file


@cache  # made when first needed, since every start of the program imports this module
def _lines() -> TypeAdapter[_TurnLine]:
    return TypeAdapter(_TurnLine)
