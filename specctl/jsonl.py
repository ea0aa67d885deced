"""Streaming JSONL: reads records line by line, and builds the lines of results."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from math import isfinite
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from specctl.errors import RecordError, json_fault, too_deep
from specctl.messages import read_messages
from specctl.metrics import Metrics
from specctl.record_settings import SETTING_KEYS
from specctl.records import Completion, CompletionSummary, RoundSummary

InputFormat = Literal["jsonl", "text"]
ID_KEYS = ("id", "custom_id", "question_id", "task_id")
PROMPT_KEYS = ("prompt", "messages", "turns")
DUPLICATE = "duplicate_id"  # The error type of a record with the same id as an earlier one
RESULT_KEYS = frozenset(
    {"completion", "finish_reason", "metrics", "rounds", "completion_ids", "token_logprobs", "error"}
)

AS_LINES = {
    "[": "make a line of each record with: jq -c '.[]'",
    "{": "make a line of each with: jq -c .",
}
"""Hints for JSON that begins with this bracket."""
MOST_AHEAD = 64 << 20  # The most bytes to read ahead to see whether a file is JSON over several lines
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class Record:
    """One input line, valid or not."""

    line: int  # line number, from 1
    id: Any  # the record's id, or its line number if it has none
    data: dict[str, Any] = field(default_factory=dict)  # the parsed object; empty if the line could not be parsed
    error: RecordError | None = None  # why the record is unusable; None for a usable one

    @property
    def key(self) -> str:
        """The record's unique key in its input: its id, or its line if the id is not unique."""
        duplicate = self.error is not None and self.error.kind == DUPLICATE
        return key_of(None if duplicate else self.id, self.line)

    @property
    def has_id(self) -> bool:
        """Whether the record has its own id."""
        return any(self.data.get(key) is not None for key in ID_KEYS)


def key_of(identity: Any, line: int | None) -> str:
    """`Record.key` for an id, or for a line if the id is None."""
    return json.dumps(["line", line] if identity is None else identity, sort_keys=True)


def deciding(data: Mapping[str, Any]) -> dict[str, Any]:
    """The record's prompt and settings."""
    return {key: data[key] for key in (*PROMPT_KEYS, *SETTING_KEYS) if key in data}


def read_records(stream: IO[bytes], input_format: InputFormat = "jsonl") -> Iterator[Record]:
    """Yields one record per non-blank line; an invalid line becomes a record with an error.

    JSON over several lines, such as an array, becomes one record with an error.
    """
    numbered: Iterator[tuple[int, bytes]] = enumerate(stream, start=1)
    if input_format == "jsonl":
        first: list[tuple[int, bytes]] = []
        for number, raw in numbered:
            first.append((number, raw))
            if raw.removeprefix(BOM_UTF8).strip():
                break
        if first and (sign := _unfinished(first[-1][1])):
            size = 0
            for number, raw in numbered:
                first.append((number, raw))
                if (size := size + len(raw)) > MOST_AHEAD:
                    break
            if _is_json(b"".join(raw for _, raw in first)):
                what = f"the input is JSON over several lines, not an object on each; {AS_LINES[sign]}"
                yield Record(1, None, error=RecordError("invalid_json", what))
                return
        numbered = chain(first, numbered)
    for number, raw in numbered:
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


def _unfinished(line: bytes) -> str:
    """The opening bracket, if the first line may start JSON over several lines; else empty."""
    start = line.decode("utf-8", "replace").strip().lstrip("\ufeff")
    if start == "{":
        return "{"
    try:
        json.loads(start)
    except (ValueError, RecursionError):
        return "[" if start.startswith("[") else ""
    return ""


def _is_json(raw: bytes) -> bool:
    """Whether a text is one or more JSON values."""
    try:
        text = raw.decode("utf-8").lstrip("\ufeff").strip()
        place = 0
        while place < len(text):
            _, end = _DECODER.raw_decode(text, place)
            space = _SPACE.match(text, end)
            place = end if space is None else space.end()
    except (ValueError, RecursionError):
        return False
    return True


def _parse(number: int, text: str) -> Record:
    hint = "" if text.lstrip().startswith("{") else "; for plain lines of text use --input-format text"
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if too_deep(data):
            raise RecursionError
    except (ValueError, RecursionError) as error:
        why = json_fault(error)
        return Record(number, None, error=RecordError("invalid_json", f"the line is not JSON ({why}){hint}"))
    if isinstance(data, list) and data and all(isinstance(one, dict) for one in data):
        hint = f"; {AS_LINES['[']}"
    if not isinstance(data, dict):
        return Record(number, None, error=RecordError("invalid_record", f"the line is JSON, but not an object{hint}"))
    body = data.get("body")
    if isinstance(body, dict) and not any(key in data for key in PROMPT_KEYS):  # a request of OpenAI's batch format
        rest = {key: value for key, value in data.items() if key != "body"}
        twice = sorted(rest.keys() & body.keys())
        data = {**rest, **body}
        if twice:
            what = f"{', '.join(twice)} is both in the record and in its body"
            return Record(number, rest.get("custom_id"), data, RecordError("invalid_record", what))
    identity = next((data[key] for key in ID_KEYS if data.get(key) is not None), number)
    return Record(number, identity, data, _fault(data))


def _finite(text: str) -> float:
    """A finite number. Raises ValueError for NaN and infinity, which JSON does not allow."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is not a valid number in JSON")
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
    if given[0] == "messages":
        try:
            read_messages(value)
        except RecordError as error:
            return error
    if not isinstance(data.get("sampling", {}), dict):
        return RecordError("invalid_record", "sampling must be an object")
    return None


def error_line(record: Record, error: RecordError) -> dict[str, Any]:
    """The output line of a record without a completion, with the reason."""
    why = {"type": error.kind, "message": error.message}
    return {**_carried(record), "id": record.id, "line": record.line, "error": why}


def _carried(record: Record) -> dict[str, Any]:
    """The input's fields, without those that an output field would overwrite."""
    return {key: value for key, value in record.data.items() if key not in RESULT_KEYS}


def result_line(
    record: Record,
    completions: Sequence[Completion | CompletionSummary],
    *,
    rounds: bool = False,
    token_ids: bool = False,
) -> dict[str, Any]:
    """The output line of a record. For ``turns``, completions, rounds and ids are lists with one item per turn."""
    metrics = Metrics.of(completions).as_record()
    listed = "turns" in record.data

    def shaped(values: list[Any]) -> Any:
        return values if listed else values[0]

    result = {
        **_carried(record),
        "id": record.id,
        "completion": shaped([completion.text for completion in completions]),
        "finish_reason": shaped([completion.finish_reason.value for completion in completions]),
        "metrics": metrics,
    }
    if rounds:
        result["rounds"] = shaped(list(map(_rounds, completions)))
    if token_ids:
        result["completion_ids"] = shaped([list(completion.tokens) for completion in completions])
    if any(completion.logprobs for completion in completions):
        result["token_logprobs"] = shaped([list(map(asdict, completion.logprobs)) for completion in completions])
    return result


def _rounds(completion: Completion | CompletionSummary) -> Any:
    rounds = [round_.rounded() for round_ in completion.summary.rounds]
    return _round_writer().dump_python(rounds, mode="json", exclude_defaults=True)


@cache  # built on first use, since every start of the program imports this module
def _round_writer() -> TypeAdapter[list[RoundSummary]]:
    return TypeAdapter(list[RoundSummary])
