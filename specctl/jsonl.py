"""Streaming JSONL: reading records and writing results line by line, and resuming an interrupted output file."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from specctl.errors import RecordError, UsageError
from specctl.metrics import Metrics
from specctl.nesting import too_deep
from specctl.records import Completion, RoundSummary

InputFormat = Literal["jsonl", "text"]
ID_KEYS = ("id", "question_id", "task_id")
PROMPT_KEYS = ("prompt", "messages", "turns")
RESULT_KEYS = frozenset({"completion", "finish_reason", "metrics", "rounds", "completion_ids", "error"})


@dataclass(frozen=True, slots=True)
class Record:
    """One input line, valid or not.

    Attributes:
        line: line number, from 1.
        id: the record's id, or its line number if it has no id.
        data: the parsed object; empty if the line could not be parsed.
        error: why the record cannot be used, or None.
    """

    line: int
    id: Any
    data: dict[str, Any] = field(default_factory=dict)
    error: RecordError | None = None


def read_records(stream: IO[bytes], input_format: InputFormat = "jsonl") -> Iterator[Record]:
    """One record for each line that is not blank; a bad line becomes a record with an error, and reading continues."""
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8").lstrip("\ufeff")
        except UnicodeDecodeError as error:
            yield Record(number, None, error=RecordError("invalid_utf8", f"the line is not UTF-8 ({error.reason})"))
            continue
        if not text.strip():
            continue
        if input_format == "text":
            yield Record(number, number, {"prompt": text.rstrip("\r\n")})
        else:
            yield _parse(number, text)


def _parse(number: int, text: str) -> Record:
    hint = "" if text.lstrip().startswith("{") else "; for plain lines of text use --input-format text"
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if too_deep(data):
            raise RecursionError
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        return Record(number, None, error=RecordError("invalid_json", f"the line is not JSON ({what}){hint}"))
    if not isinstance(data, dict):
        return Record(number, None, error=RecordError("invalid_record", f"the line is JSON, but not an object{hint}"))
    identity = next((data[key] for key in ID_KEYS if data.get(key) is not None), number)
    return Record(number, identity, data, _fault(data))


def _finite(text: str) -> float:
    """A finite number; raises ValueError for NaN and infinity, which Python reads and writes but JSON does not have."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is no number that JSON can hold")
    return number


def _fault(data: Mapping[str, Any]) -> RecordError | None:
    given = [key for key in PROMPT_KEYS if key in data]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no prompt"
        return RecordError("invalid_record", f"the record {what}; it needs exactly one of {', '.join(PROMPT_KEYS)}")
    value = data[given[0]]
    if given[0] == "prompt" and not isinstance(value, str):
        return RecordError("invalid_record", "prompt must be a string")
    if given[0] == "turns" and not (value and isinstance(value, list) and all(isinstance(t, str) for t in value)):
        return RecordError("invalid_record", "turns must be a list of strings")
    if given[0] == "messages" and not (value and isinstance(value, list) and all(map(_is_message, value))):
        return RecordError("invalid_record", "messages must be a list of objects with a string role and content")
    if not isinstance(data.get("sampling", {}), dict):
        return RecordError("invalid_record", "sampling must be an object")
    return None


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def error_line(record: Record, error: RecordError) -> dict[str, Any]:
    return {"id": record.id, "line": record.line, "error": {"type": error.kind, "message": error.message}}


class Finished:
    """The records that an output file already contains; ``--resume`` skips them. The file is only read.

    Attributes:
        failed: whether the file contains records that could not be answered.

    Raises:
        UsageError: the file contains a line that is not an output record.
    """

    def __init__(self, path: Path) -> None:
        self.failed = False
        self._ids: Counter[str] = Counter()
        for _, line, identity in _written(path, "completion", "error"):
            self._ids[_key(*identity)] += 1
            self.failed |= "error" in json.loads(line)

    def __len__(self) -> int:
        return self._ids.total()

    def counts(self) -> Counter[str]:
        return self._ids.copy()

    def take(self, record: Record) -> bool:
        """Whether the file contains this record; each line of the file matches one record only."""
        return _taken(self._ids, _key(record.id, record.line))

    def first_missing(self, records: Iterable[Record]) -> list[Record]:
        """The first record that the file does not contain, if there is one; nothing is taken."""
        ids = self.counts()
        return list(islice((record for record in records if not _taken(ids, _key(record.id, record.line))), 1))


def finished_rounds(trace: Path, finished: Finished, coming: Sequence[Record] | None = None) -> int:
    """The size in bytes of a trace up to the last finished record; a resumed run writes the rounds after it again.

    Args:
        trace: the file; it is only read.
        finished: the records that the results contain.
        coming: the record that is answered next, if there is one; None where it is not known. The trace may hold rounds
            of no other unfinished record.

    Raises:
        UsageError: the file contains a line that is not a round, or the trace of another run.
    """
    left = finished.counts()
    size, unfinished = 0, False
    for number, line, (identity, _) in _written(trace, "round"):
        round_ = json.loads(line)
        if not round_["round"] and not round_.get("turn"):
            known = _taken(left, _key(identity, None))
            expected = known or coming is None or _key(identity, None) in {_key(each.id, None) for each in coming}
            if unfinished or not expected:
                raise UsageError(
                    f"{trace}:{number}: the trace does not belong to these results", "name another file for --trace"
                )
            unfinished = not known
        if not unfinished:
            size += len(line) + 1
    return size


def _taken(ids: Counter[str], key: str) -> bool:
    if not ids[key]:
        return False
    ids[key] -= 1
    return True


def _key(identity: Any, line: int | None) -> str:
    return json.dumps(["line", line] if identity is None else identity, sort_keys=True)


def _written(path: Path, *marks: str) -> Iterator[tuple[int, bytes, tuple[Any, int | None]]]:
    """The lines that this command has written into a file: number, text and `_identity`.

    Text behind the last line feed is left out; it must be such a line, or the start of one that follows others.
    """
    if not path.is_file():
        return
    *lines, torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        yield number, line, _identity(path, number, line, *marks)
    if torn and not (lines and _is_torn(torn)):
        _identity(path, len(lines) + 1, torn, *marks)


def _identity(path: Path, number: int, line: bytes, *marks: str) -> tuple[Any, int | None]:
    """The id of a line that this command has written, and the number of its input line if the line contains it."""
    try:
        written = json.loads(line)
        if any(mark in written for mark in marks) and not too_deep(written["id"]):
            return written["id"], written.get("line")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path}:{number} was not written by this command", "--resume continues what an earlier run left")


def _is_torn(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(b"{")
    return False


def result_line(
    record: Record, completions: Sequence[Completion], *, rounds: bool = False, token_ids: bool = False
) -> dict[str, Any]:
    """A record with its completion; for ``turns``, completions, rounds and ids are lists with one item per turn.

    Input fields with the name of an output field are left out, because they come from another run.
    """
    metrics = Metrics.of(completions).as_record()
    listed = "turns" in record.data

    def shaped(values: list[Any]) -> Any:
        return values if listed else values[0]

    result = {
        **{key: value for key, value in record.data.items() if key not in RESULT_KEYS},
        "id": record.id,
        "completion": shaped([completion.text for completion in completions]),
        "finish_reason": shaped([completion.finish_reason.value for completion in completions]),
        "metrics": metrics,
    }
    if rounds:
        result["rounds"] = shaped(list(map(_rounds, completions)))
    if token_ids:
        result["completion_ids"] = shaped([list(completion.tokens) for completion in completions])
    return result


def _rounds(completion: Completion) -> Any:
    rounds = [round_.summary.rounded() for round_ in completion.rounds]
    return _round_writer().dump_python(rounds, mode="json", exclude_defaults=True)


@cache  # made when first needed, since every start of the program imports this module
def _round_writer() -> TypeAdapter[list[RoundSummary]]:
    return TypeAdapter(list[RoundSummary])
