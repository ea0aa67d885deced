"""Resuming interrupted runs: the records in an output, finished turns, and the provenance of both."""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from specctl import __version__
from specctl.errors import ModelError, RecordError, UsageError, too_deep
from specctl.files import lines_of, parse_line, write_line
from specctl.jsonl import DUPLICATE, Record, deciding, key_of
from specctl.models.loading.contents import Contents
from specctl.outputs import OutputFile, Outputs
from specctl.profile.schema import DraftTable, Profile
from specctl.records import CompletionSummary

_FULL = 0.6  # Load factor above which the table doubles
_MASK = (1 << 32) - 1


def hash_of(text: str) -> int:
    """The first 8 bytes of a hash, never 0. Among 10^6 texts a collision has probability 3e-8."""
    return int.from_bytes(blake2b(text.encode("ascii", "backslashreplace"), digest_size=8).digest(), "little") or 1


def content_of(data: Mapping[str, Any]) -> int:
    """A 32-bit hash of everything in a record that affects its answer."""
    return hash_of(json.dumps(deciding(data), sort_keys=True)) & _MASK


class Identities:
    """Maps texts to 32-bit numbers. It stores only `hash_of` each text, 20 to 40 bytes per text.

    A dictionary of Python objects would take five times that.
    """

    def __init__(self) -> None:
        self._count = 0
        self._keys = array("Q", bytes(8 * 1024))  # a power of 2 in size; 0 marks a free place
        self._values = array("I", bytes(4 * 1024))

    def __len__(self) -> int:
        return self._count

    def get(self, text: str) -> int | None:
        """The number of a text; None if it has none."""
        key = hash_of(text)
        place = self._place(key)
        return self._values[place] if self._keys[place] else None

    def put(self, text: str, value: int) -> None:
        """Set the number of a text; only its last 32 bits are stored."""
        if self._count > _FULL * len(self._keys):
            self._double()
        key = hash_of(text)
        place = self._place(key)
        self._count += not self._keys[place]
        self._keys[place], self._values[place] = key, value & _MASK

    def _place(self, key: int) -> int:
        """The index of a key, or of the free place for it."""
        keys, last = self._keys, len(self._keys) - 1
        place = key & last
        while keys[place] and keys[place] != key:
            place = (place + 1) & last
        return place

    def _double(self) -> None:
        keys, values = self._keys, self._values
        self._keys, self._values = array("Q", bytes(16 * len(keys))), array("I", bytes(8 * len(keys)))
        for key, value in zip(keys, values, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._values[place] = key, value & _MASK


def distinct(records: Iterable[Record]) -> Iterator[Record]:
    """The records; one with the id of an earlier record gets an error, because ids tell results apart."""
    lines = Identities()
    for record in records:
        if record.id is None:
            yield record
            continue
        if (line := lines.get(record.key)) is None:
            lines.put(record.key, record.line)
            yield record
            continue
        what = f"line {line} has the same id" + (
            "" if record.has_id else "; a record without an id has its line number"
        )
        yield replace(record, error=RecordError(DUPLICATE, what))


@dataclass(frozen=True, slots=True)
class Survey:
    """The finished and remaining records of an input."""

    kept: int  # number of finished records
    left: int  # number of unfinished records
    first: Record | None  # the first unfinished record; None without one


class Finished:
    """The records that an output file already contains; ``--resume`` skips them.

    The file is only read, line by line; 20 to 40 bytes of each record stay in memory.

    Args:
        path: the file.
        anyway: accept a line as the record with its id even if the record has changed.

    Attributes:
        failed: the number of failed records.
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
        """Whether the file contains the record with a `Record.key`."""
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
        """Compare an input with the file; raises the UsageError of `take`."""
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
        coming: the record that is answered next, if any. The trace must not hold rounds of another unfinished record.
        known: whether the next record is known; else the trace may hold rounds of any record.
        turns: the number of finished turns of ``coming``.

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
    """A line written by this command: its number, size in bytes, value, and the `Record.key` of its record."""

    number: int
    size: int
    value: dict[str, Any]
    key: str


def _written(path: Path, *marks: str) -> Iterator[_Written | None]:
    """The lines written by this command into a file; a last item None marks an incomplete line."""
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


TURNS_SUFFIX = ".turns.jsonl"
_START = b'{"kind": "turn", '


@dataclass(frozen=True, slots=True)
class _TurnLine:
    """A finished turn: its record's `Record.key` and `content_of`, its index from 0, and its answer."""

    kind: str
    record: str
    content: int
    turn: int
    completion: CompletionSummary


class TurnsFile:
    """Keeps the finished turns of one record at a time, so that an interrupt loses no more than a turn.

    It exists only while a record has finished turns, or after an interrupt.

    Args:
        outputs: of the command; they open and lock the file.
        results: the results, a regular file.
        force: whether another file of this name may be replaced.

    Raises:
        UsageError: there is another file of this name.
    """

    def __init__(self, outputs: Outputs, results: OutputFile, *, force: bool = False) -> None:
        path = results.path.resolve()
        self._outputs, self._path = outputs, path.with_name(path.name + TURNS_SUFFIX)
        self._file: OutputFile | None = None
        self._kept: tuple[str, list[CompletionSummary]] = "", []
        if self._path.exists() and not force:
            with self._path.open("rb") as file:
                start = file.read(len(_START))
            if not _START.startswith(start):
                raise UsageError(f"{self._path} was not written by this command", "remove it, or choose another name")

    @property
    def kept(self) -> tuple[str, int]:
        """The `Record.key` and number of the turns that an interrupted run left."""
        return self._kept[0], len(self._kept[1])

    def find(self, record: Record) -> None:
        """Look for turns of a record that an interrupted run left; skips damaged turns and those of other records."""
        found: list[CompletionSummary] = []
        with suppress(UsageError):
            for number, line in lines_of(self._path) if self._path.exists() else ():
                each = parse_line(_lines(), self._path, number, line)
                if (each.record, each.content, each.turn) != (record.key, content_of(record.data), len(found)):
                    break
                found.append(each.completion)
        self._kept = record.key, found[: len(record.data.get("turns", ())) - 1]

    def begin(self) -> None:
        """Drop all turns but the `kept` ones."""
        if self._path.exists():
            size = sum(len(line) for _, (_, line) in zip(range(self.kept[1]), lines_of(self._path), strict=False))
            self._opened().begin(size)

    def of(self, record: Record) -> Sequence[CompletionSummary]:
        """The finished turns of a record."""
        key, turns = self._kept
        return turns if turns and key == record.key else ()

    def add(self, record: Record, turn: int, completion: CompletionSummary) -> None:
        """Store a finished turn of the current record."""
        line = _TurnLine("turn", record.key, content_of(record.data), turn, completion)
        write_line(self._opened(), _lines().dump_python(line, mode="json"))

    def clear(self) -> None:
        """Delete the turns, because their record is finished."""
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


@cache  # made when first needed, because every start of the program imports this module
def _lines() -> TypeAdapter[_TurnLine]:
    return TypeAdapter(_TurnLine)


FILES = "files"
_SPEED = {
    "device",
    "max_memory",
    "shards",
    "placement",
    "trust_remote_code",
    "revision",
    "model",
    "adapter",
    "head",
    "draft",
}
"""Keys of a model's table that do not affect text, or name files whose content is compared."""


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The provenance of a run's results: JSON values by the dotted keys of a profile or the names of flags."""

    decides: Mapping[str, Any]  # values that affect the text and the fields of a line
    drafting: Mapping[str, Any]  # the draft's settings with its policy; they affect sampled but not greedy text
    names: Mapping[str, str]  # of models and heads, by key
    # of their files' content, by key; a key is missing where the files are not on this machine
    hashes: Mapping[str, str]
    drawn: bool  # whether tokens are sampled

    @classmethod
    def of(cls, profile: Profile, **flags: Any) -> Self:
        """The provenance from a profile and the flags about result lines."""
        sampling = profile.sampling.model_dump(mode="json", exclude={"verification"})
        decides = {
            "specctl": __version__,
            "generation_config": profile.generation_config,
            **{f"target.{key}": value for key, value in _settings(profile.target.model_dump(mode="json")).items()},
            **{f"sampling.{key}": value for key, value in sampling.items()},
            **{f"prompt.{key}": value for key, value in profile.prompt.model_dump(mode="json").items()},
            **flags,
        }
        drafting = {"sampling.verification": profile.sampling.verification}
        names = {"target": profile.target.full_name}
        at_work = profile.draft.at_work() if profile.draft is not None else None
        levels: tuple[DraftTable, ...] = at_work.levels if at_work is not None else ()
        for depth, level in enumerate(levels, start=1):
            key = ".".join(["draft"] * depth)
            names[key] = level.full_name
            if level.head is not None:
                names[f"{key}.head"] = level.head
            drafting |= {f"{key}.{name}": each for name, each in _settings(level.model_dump(mode="json")).items()}
        try:
            hashes = Contents.of(profile.model_copy(update={"draft": at_work})).hashes()
        except (ModelError, OSError):  # loading the models reports the error, or they are on another machine
            hashes = {}
        return cls(decides, drafting, names, hashes, profile.sampling.temperature > 0)

    def differing(self, earlier: "MadeBy") -> list[str]:
        """A sentence for each difference from an earlier run that affects the text."""
        found = list(_differing(earlier.decides, self.decides))
        found += self._model_differing(earlier, "target")
        return [*found, *self._drafting_differing(earlier)] if self.drawn and earlier.drawn else found

    def differing_otherwise(self, earlier: "MadeBy") -> list[str]:
        """A sentence for each difference from an earlier run that does not affect the text."""
        return [] if self.drawn or earlier.drawn else list(self._drafting_differing(earlier))

    def _drafting_differing(self, earlier: "MadeBy") -> Iterator[str]:
        yield from _differing(earlier.drafting, self.drafting)
        for key in {**earlier.names, **self.names}:
            if key != "target":
                yield from self._model_differing(earlier, key)

    def _model_differing(self, earlier: "MadeBy", key: str) -> Iterator[str]:
        old, new = earlier.names.get(key), self.names.get(key)
        hashes = earlier.hashes.get(key), self.hashes.get(key)
        if None not in hashes and hashes[0] == hashes[1]:
            return  # the same files, wherever they are
        if old != new:
            yield f"{key} was {_shown(old)} and is {_shown(new)}"
        elif None not in hashes:
            yield f"{key}: the files of {new} have changed"

    def as_dict(self) -> dict[str, Any]:
        """The provenance as JSON values."""
        models = {
            key: {"name": name} | ({FILES: self.hashes[key]} if key in self.hashes else {})
            for key, name in self.names.items()
        }
        return {"models": models, "drawn": self.drawn, "decides": dict(self.decides), "drafting": dict(self.drafting)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; raises TypeError, KeyError or AttributeError for other values."""
        models = found["models"]
        names = {key: model["name"] for key, model in models.items()}
        hashes = {key: model[FILES] for key, model in models.items() if FILES in model}
        return cls({**found["decides"]}, {**found["drafting"]}, names, hashes, bool(found["drawn"]))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}"


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _SPEED}


def _shown(value: Any) -> str:
    if isinstance(value, dict):  # a policy's table
        return ", ".join([str(value.get("name")), *(f"{key} {each}" for key, each in value.items() if key != "name")])
    return "not set" if value is None else value if isinstance(value, str) and value else repr(value)


RUN_SUFFIX = ".run.json"
VERSION = 1


class RunFile:
    """The provenance of a results file, in a file next to it, because each line of the results must be one record.

    Args:
        outputs: of the command; they open and lock the file.
        results: the results, a regular file.

    Raises:
        UsageError: the file cannot be written, or is not a file of this kind and --force is not given.
    """

    def __init__(self, outputs: Outputs, results: OutputFile, *, force: bool = False) -> None:
        self._results = results
        path = results.path.resolve()
        self._file = outputs.file("run file", path.with_name(path.name + RUN_SUFFIX), resumed=True)
        self._found = _read(self._file.path) if self._file.continued else None
        if self._file.continued and self._found is None and not (force or results.continued):
            raise UsageError(f"{self._file.path} was not written by this command", "remove it, or choose another name")

    def compare(self, made: MadeBy, *, anyway: bool) -> list[str]:
        """Compare the provenance of the results so far with that of this run.

        Args:
            made: the provenance of this run.
            anyway: continue despite any difference.

        Returns:
            Sentences about remaining differences, to be reported.

        Raises:
            UsageError: a difference affects the text, or the provenance of the results is unknown.
        """
        if self._found is None:
            if anyway:
                return []
            raise UsageError(
                f"{self._file.path} is missing or damaged, so nothing says which models and settings made "
                f"{self._results.path}",
                "if they are those of this command, add --anyway; else name another file with --output",
            )
        differing = made.differing(self._found)
        if differing and not anyway:
            raise UsageError(
                "\n  ".join([f"{self._results.path} was made by another run:", *differing]),
                "repeat that command, name another file with --output, or mix both with --anyway",
            )
        return [*differing, *(f"{each}; the text is the same" for each in made.differing_otherwise(self._found))]

    def says(self, made: MadeBy) -> bool:
        """Whether the file has this provenance."""
        return self._found is not None and not made.differing(self._found)

    def write(self, made: MadeBy) -> None:
        """Record this run's provenance; the file is replaced as a whole."""
        document = {"schema_version": VERSION, "results": self._results.path.name, **made.as_dict()}
        self._file.replace(json.dumps(document, indent=2, ensure_ascii=True) + "\n")


def _read(path: Path) -> MadeBy | None:
    """The provenance in a file; None for another kind of file, or one that is damaged or of a later version."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and found.get("schema_version") == VERSION and not too_deep(found):
            return MadeBy.from_dict(found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return None
