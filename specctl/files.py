"""Files of JSON lines: their contents, and conversion between records and lines.

A line ends at a line feed and at no other character, and is flushed as it is written. Text after the last line feed
was left by an interrupted write: readers ignore it, and `OutputFile.begin` cuts it off before a run continues the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from specctl.errors import UsageError, too_deep
from specctl.outputs import OutputFile, Sink
from specctl.printable import escaped

T = TypeVar("T")

SCHEMA_VERSION = 1  # ``schema_version`` of the first line, unless a format has its own; another version is rejected


class Content(StrEnum):
    """The contents of a file of JSON lines, worded for messages."""

    RESULTS = "results of specctl bench"
    LOAD = "requests of specctl bench --url"
    TRACE = "a trace of specctl calibrate"
    ROUNDS = "a trace of specctl generate"
    COMPLETIONS = "output of specctl generate"
    PROMPTS = "prompts"
    UNKNOWN = "nothing that specctl has written"


_KEYS = (
    ({"kind", "candidates"}, Content.RESULTS),
    ({"kind", "concurrency"}, Content.LOAD),
    ({"kind", "depth"}, Content.TRACE),
    ({"round", "steps"}, Content.ROUNDS),
    ({"id", "completion"}, Content.COMPLETIONS),
    ({"prompt"}, Content.PROMPTS),
    ({"messages"}, Content.PROMPTS),
    ({"turns"}, Content.PROMPTS),
)
"""Keys by which the first line of a file is recognised; the first match decides."""


def content_of(path: Path) -> Content | None:
    """A file's contents by its first line; None for a file without a complete line. Raises UsageError if unreadable."""
    first = next(lines_of(path), None)
    return None if first is None else _content(first[1])


def _content(line: bytes) -> Content:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return Content.UNKNOWN
    known = (content for keys, content in _KEYS if isinstance(found, dict) and keys <= found.keys())
    return next(known, Content.UNKNOWN)


def write_line(stream: Sink, value: Mapping[str, Any]) -> None:
    """Write one object as one line and flush, so that readers see it at once. On a terminal more characters are
    escaped.
    """
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # lone surrogates have no UTF-8 form
        line = json.dumps(value)
    stream.write((escaped(line) if stream.isatty() else line) + "\n")
    stream.flush()


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete, non-blank lines of a file, each with its number, counted from 1.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n") and line.strip():
                    yield number, line
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def parse_line(adapter: TypeAdapter[T], path: Path, number: int, line: bytes, hint: str = "") -> T:
    """Parse a line into a record.

    Args:
        adapter: for the record's type.
        path, number: where the line is, for messages.
        line: its text.
        hint: how to fix the file, for messages.

    Raises:
        UsageError: the line holds no such record; the message names the file, the line and the key.
    """
    try:
        value = json.loads(line)
        if too_deep(value):
            raise RecursionError("it is nested too deeply")
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path}:{number}: {where}{': ' if where else ''}{first['msg']}", hint) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}:{number}: the line is not JSON ({error})", hint) from None
    except (TypeError, LookupError, AttributeError) as error:  # one of our own validators failed
        raise UsageError(f"{path}:{number}: a value is missing or of another type ({error})", hint) from None


class LineFormat(Generic[T]):
    """A kind of file: a header on the first line, then records, each with its ``kind``.

    Fields at their default are not written, and unknown keys are ignored when read.

    Args:
        content: the contents of such a file.
        header: the dataclass of the first line.
        kinds: the dataclass of each other kind of line, alone or annotated with a validator of pydantic.
        version: ``schema_version`` of the header.
    """

    def __init__(
        self, content: Content, header: type[T], kinds: Mapping[str, Any], version: int = SCHEMA_VERSION
    ) -> None:
        self.content, self.version = content, version
        self._types = {"header": header, **kinds}
        self._kinds = {getattr(found, "__origin__", found): kind for kind, found in self._types.items()}

    def line(self, record: object) -> dict[str, Any]:
        """A record of one of the kinds as a dictionary of JSON values."""
        kind = self._kinds[type(record)]
        version = {"schema_version": self.version} if kind == "header" else {}
        found: dict[str, Any] = self._writers[kind].dump_python(
            record, mode="json", by_alias=True, exclude_defaults=True
        )
        return {"kind": kind, **version, **found}

    def append(self, stream: Sink, record: object) -> None:
        """Write a record of one of the kinds as one line and flush."""
        write_line(stream, self.line(record))

    def continues(self, output: OutputFile | None) -> bool:
        """Whether an output that is continued has a header; one that was cut short by an interrupt counts as none.

        Raises:
            UsageError: the output holds no whole line, and not the start of a header.
        """
        if output is None or not output.continued:
            return False
        if next(lines_of(output.path), None) is not None:
            return True
        start = b'{"kind": "header", "schema_version": '
        with output.path.open("rb") as file:
            found = file.read(len(start))
        if not start.startswith(found):
            raise UsageError(f"{output.path} holds {Content.UNKNOWN}, not {self.content}")
        return False

    def writing(self, output: OutputFile | None, header: object) -> Callable[[object], None]:
        """Begin an output, and write the header unless the output already has one.

        Args:
            output: the file; None to write nothing.
            header: first record of a new file.

        Returns:
            A function that writes one record as one line.
        """
        if output is None:
            return lambda _: None
        if output.begin():
            self.append(output, header)
        return lambda record: self.append(output, record)

    def read(self, path: Path) -> Iterator[Any]:
        """Yield the header, then every other record, each line read when its record is needed.

        Raises:
            UsageError: the file cannot be read, holds something else, is of another version, or a line is damaged; the
                message names the file and the line.
        """
        empty = True
        for number, line in lines_of(path):
            if empty:
                self._recognise(path, line)
            yield parse_line(self._reader, path, number, line)
            empty = False
        if empty:
            what = "holds no whole line" if path.stat().st_size else "is empty"
            raise UsageError(f"{path} {what}", f"give a file that holds {self.content}")

    def _recognise(self, path: Path, line: bytes) -> None:
        found = _content(line)
        if found is not self.content:
            raise UsageError(f"{path} holds {found}, not {self.content}")
        version = json.loads(line).get("schema_version")
        if version != self.version:
            raise UsageError(
                f"{path}:1: schema_version {version} of {self.content}; this specctl reads {self.version}",
                "make the file again, or read it with the specctl that wrote it",
            )

    @cached_property
    def _writers(self) -> dict[str, TypeAdapter[Any]]:
        return {kind: TypeAdapter(found) for kind, found in self._types.items()}

    @cached_property
    def _reader(self) -> TypeAdapter[Any]:
        union: Any = reduce(or_, (Annotated[found, Tag(kind)] for kind, found in self._types.items()))
        message = f"this line is not part of {self.content}"
        by_kind = Discriminator(_kind, custom_error_type="kind", custom_error_message=message)
        return TypeAdapter(Annotated[union, by_kind])


def _kind(line: Any) -> Any:
    return line.get("kind") if isinstance(line, dict) else None
