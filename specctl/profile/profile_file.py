"""Profile files: search, contents, and the line of each key."""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import ProfileError, too_deep
from specctl.profile.schema import SCHEMA_VERSION
from specctl.profile.wording import Key, brief, did_you_mean, shown

DEFAULT_PROFILE = "embedded"
HERE = Path("profiles")  # The folder in the working directory where profiles are found by name

_PACKAGE = Path(__file__).parent.parent


def packaged_directory() -> Path:
    """The profiles that ship with the program: inside the wheel, or next to the package in a source checkout."""
    installed = _PACKAGE / "_profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def user_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a user's own profiles."""
    config = environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "specctl" / "profiles"


def directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The directories searched by name, nearest first."""
    return [HERE, user_directory(environ), packaged_directory()]


def found_here(path: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a file is in ./profiles, which may belong to anyone, and not in the user's or the program's folder."""
    return _same(path.parent, HERE) and not owned(path, environ)


def owned(path: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a file is one of the user's own profiles or ships with the program."""
    return any(_same(path.parent, directory) for directory in directories(environ)[1:])


def shadowed(path: Path, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's or packaged profile that a file in ./profiles hides, if its contents differ."""
    if not found_here(path, environ):
        return None
    others = (directory / path.name for directory in directories(environ)[1:])
    hidden = next((other for other in others if _is_file(other)), None)
    return None if hidden is None or _same_text(path, hidden) else hidden


def available(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The file of every profile that can be found by name, sorted by name."""
    found: dict[str, Path] = {}
    for directory in directories(environ):
        for path in directory.glob("*.toml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def chosen(name: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of a profile, by default of the one named in SPECCTL_PROFILE, else of the packaged default profile."""
    name = name or environ.get("SPECCTL_PROFILE")
    return find(name, environ) if name else packaged_directory() / f"{DEFAULT_PROFILE}.toml"


def find(name: str, environ: Mapping[str, str] = os.environ, *, extended_by: Path | None = None) -> Path:
    """The file of a profile given by name, or by path if ``name`` has a separator or ends in ``.toml``.

    Args:
        name: see above.
        environ: environment variables; XDG_CONFIG_HOME sets the user's config directory.
        extended_by: the profile file that extends ``name``. Its directory is searched first, and relative paths start
            there. A file never extends itself, so it may extend another profile of the same name.

    Raises:
        ProfileError: there is no such file; the message suggests the nearest known profile.
    """
    if is_path(name):
        path = _expanded(name)
        if extended_by is not None:
            path = extended_by.parent / path
        if _is_file(path):
            return path
        raise ProfileError(f"there is no profile file {brief(display(path))}")
    for path in _candidates(name, environ, extended_by):
        if _is_file(path) and not (extended_by is not None and path.samefile(extended_by)):
            return path
    raise ProfileError(f"there is no profile named '{brief(name)}'{did_you_mean(name, available(environ))}")


def display(path: Path) -> str:
    """A path for messages: relative if it is below the current directory, else absolute."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def is_path(name: str) -> bool:
    """Whether a profile is given by path."""
    return name.endswith(".toml") or "/" in name or os.sep in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _same_text(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _candidates(name: str, environ: Mapping[str, str], extended_by: Path | None) -> Iterator[Path]:
    if extended_by is not None:
        yield extended_by.parent / f"{name}.toml"
    for directory in directories(environ):
        yield directory / f"{name}.toml"


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no such user, or no home folder
        return Path(name)


_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_KEY})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_KEY})\s*=")
_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


_DEEPEST = 20  # The most levels of nested tables in a profile; a hierarchy has one per draft


@dataclass(frozen=True, slots=True)
class Document:
    """One TOML file."""

    path: Path  # the file
    table: dict[str, Any]  # its contents
    # line numbers, from 1, of keys and tables that start a line; keys inside inline tables have none
    lines: dict[Key, int]

    def place(self, key: Key) -> str:
        """``file:line`` of a key, else of the nearest table that contains it, else the file."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{display(self.path)}:{self.lines[key[:length]]}"
        return display(self.path)


def read(path: Path) -> Document:
    """Read a profile file without checking its keys.

    Raises ProfileError where it cannot be read, is not TOML, or was written for another version of this program.
    """
    try:
        if not path.is_file():  # reading a pipe could block
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
    except ValueError as error:  # such as a number with thousands of digits
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
