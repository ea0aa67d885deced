"""A profile file: its table, and the line number of each key."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import ProfileError
from specctl.nesting import too_deep
from specctl.profile.discovery import display
from specctl.profile.schema import SCHEMA_VERSION
from specctl.profile.wording import Key, brief, shown

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_KEY})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_KEY})\s*=")
_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


_DEEPEST = 20
"""Tables in tables that a profile may have; a profile of a hierarchy has one for each draft."""


@dataclass(frozen=True, slots=True)
class Document:
    """One TOML file.

    Attributes:
        path: the file.
        table: its contents as TOML.
        lines: line numbers, from 1, of the keys and tables that start a line; keys inside inline tables have none.
    """

    path: Path
    table: dict[str, Any]
    lines: dict[Key, int]

    def place(self, key: Key) -> str:
        """``file:line`` of a key, else of the nearest table that contains it, else the file."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{display(self.path)}:{self.lines[key[:length]]}"
        return display(self.path)


def read(path: Path) -> Document:
    """Read a profile file without checking its keys.

    Raises:
        ProfileError: it cannot be read, is not TOML, or was written for a later version of this program.
    """
    try:
        if not path.is_file():  # reading a pipe would wait for its writer
            raise ProfileError(f"{display(path)}: is not a file")
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ProfileError(f"{display(path)}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{display(path)}: is not UTF-8: {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(_syntax_message(path, text, str(error))) from error
    except RecursionError as error:
        raise _nested(path) from error
    except ValueError as error:  # such as a number of thousands of digits
        raise ProfileError(f"{display(path)}: {brief(str(error))}") from error
    if too_deep(table, _DEEPEST):
        raise _nested(path)
    if any(not -(2**63) <= number < 2**63 for number in _integers(table)):
        raise ProfileError(f"{display(path)}: an integer has more than 64 bits")
    document = Document(path, table, key_lines(text))
    version = table.get("schema_version")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise ProfileError(
            f"{document.place(('schema_version',))}: schema_version {shown(version)}; this specctl reads "
            f"{SCHEMA_VERSION}",
            "Use the specctl that the profile was written for, or write it for this one.",
        )
    return document


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _integers(inner)


def _nested(path: Path) -> ProfileError:
    return ProfileError(f"{display(path)}: is nested too deeply")


def key_lines(text: str) -> dict[Key, int]:
    """The first line, from 1, of each key and table that starts a line of a TOML text."""
    lines: dict[Key, int] = {}
    table: Key = ()
    delimiter = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not delimiter:
            if header := _HEADER.match(line):
                table = _parts(header[1])
                _record(lines, (), table, number)
            elif assignment := _ASSIGNMENT.match(line):
                _record(lines, table, _parts(assignment[1]), number)
        delimiter = _open_string(line, delimiter)
    return lines


def _parts(key: str) -> Key:
    return tuple(part.strip("\"'") for part in re.findall(_PART, key))


def _record(lines: dict[Key, int], table: Key, parts: Key, number: int) -> None:
    for length in range(1, len(parts) + 1):
        lines.setdefault((*table, *parts[:length]), number)


def _open_string(line: str, delimiter: str) -> str:
    """The delimiter of the multi-line string still open after a line; ``delimiter`` was open before the line."""
    for quotes in re.findall(r'"""|\'\'\'', line):
        if not delimiter:
            delimiter = quotes
        elif quotes == delimiter:
            delimiter = ""
    return delimiter


def _syntax_message(path: Path, text: str, message: str) -> str:
    place = _SYNTAX_PLACE.search(message)
    if place is None:
        return f"{display(path)}: {message}"
    line = place[1] or max(1, len(text.splitlines()))
    return f"{display(path)}:{line}: {message[: place.start()]}"
