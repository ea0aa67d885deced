"""The records that an output file contains, and the part of a trace that belongs to them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import UsageError, too_deep
from specctl.jsonl import DUPLICATE, Record, key_of
from specctl.resuming.identities import Identities, content_of


@dataclass(frozen=True, slots=True)
class Survey:
    """What an input has left to do.

    Attributes:
        kept: how many of its records are finished.
        left: how many are not.
        first: the first that is not; None without one.
    """

    kept: int
    left: int
    first: Record | None


class Finished:
    """The records that an output file already contains; ``--resume`` skips them.

    The file is only read, line by line; 20 to 40 bytes of each record stay in memory.

    Args:
        path: the file.
        anyway: take a line for the record with its id even if the record is another now.

    Attributes:
        failed: how many of its records could not be answered.
        torn: whether its last line was cut short.

    Raises:
        UsageError: the file contains a line that is not an output record.
    """

    def __init__(self, path: Path, *, anyway: bool = False) -> None:
        self.failed = 0
        self.torn = False
        self._path, self._anyway = path, anyway
        self._contents = Identities()
        for written in _written(path, "completion", "error"):
            if written is None:
                self.torn = True
                continue
            self._contents.put(written.key, content_of(written.value))
            self.failed += "error" in written.value

    def __len__(self) -> int:
        return len(self._contents)

    def has(self, key: str) -> bool:
        """Whether the record with a `Record.key` is there."""
        return self._contents.get(key) is not None

    def take(self, record: Record) -> bool:
        """Whether the file contains this record.

        Raises:
            UsageError: the file contains another record with its id.
        """
        found = self._contents.get(record.key)
        if found is not None and not self._anyway and found != content_of(record.data):
            raise UsageError(
                f"{self._path}:{self._line_of(record)}: on line {record.line} of the input, the record with this id "
                "has another prompt or other settings",
                "delete that line to have the record answered again, name another file with --output, or keep what is "
                "there with --anyway",
            )
        return found is not None

    def survey(self, records: Iterable[Record]) -> Survey:
        """Compare an input with the file; raises UsageError as `take`."""
        kept = left = 0
        first = None
        for record in records:
            if self.take(record):
                kept += 1
                continue
            left += 1
            first = first or record
        return Survey(kept, left, first)

    def _line_of(self, record: Record) -> int:
        lines = (each for each in _written(self._path, "completion", "error") if each is not None)
        return next(each.number for each in lines if each.key == record.key)


def finished_rounds(
    trace: Path, finished: Finished, coming: Record | None = None, *, known: bool = True, turns: int = 0
) -> int:
    """The size in bytes of a trace up to the last finished turn; a resumed run writes the rounds after it again.

    Args:
        trace: the file; it is only read, line by line.
        finished: the records that the results contain.
        coming: the record that is answered next, if there is one. The trace may hold rounds of no other unfinished
            record.
        known: whether it is known which one that is; else the trace may hold rounds of any.
        turns: how many turns of ``coming`` are finished.

    Raises:
        UsageError: the file contains a line that is not a round, or the trace of another run.
    """
    size, unfinished = 0, False
    for written in _written(trace, "round"):
        if written is None:
            break
        if not written.value["round"] and not written.value.get("turn"):
            done = finished.has(written.key)
            expected = done or not known or (coming is not None and written.key == coming.key)
            if unfinished or not expected:
                raise UsageError(
                    f"{trace}:{written.number}: the trace does not belong to these results",
                    "name another file for --trace",
                )
            unfinished = not done
        if not unfinished or written.value.get("turn", 0) < turns:
            size += written.size
    return size


@dataclass(frozen=True, slots=True)
class _Written:
    """A line that this command has written: its number, size in bytes, value and the `Record.key` of its record."""

    number: int
    size: int
    value: dict[str, Any]
    key: str


def _written(path: Path, *marks: str) -> Iterator[_Written | None]:
    """The lines that this command has written into a file; None for the start of one behind them."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parsed(path, number, line, *marks)
            else:
                if number == 1 or not _is_torn(line):
                    _parsed(path, number, line, *marks)
                yield None


def _parsed(path: Path, number: int, line: bytes, *marks: str) -> _Written:
    try:
        value = json.loads(line)
        if any(mark in value for mark in marks) and not too_deep(value["id"]):
            duplicate = "error" in value and value["error"].get("type") == DUPLICATE
            return _Written(number, len(line), value, key_of(None if duplicate else value["id"], value.get("line")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path}:{number} was not written by this command", "--resume continues what an earlier run left")


def _is_torn(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b"{")
    return False
