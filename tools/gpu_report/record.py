"""What a part of the report says, as JSON lines that stay even if the part ends in the middle."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""A line: ``kind`` says what it is, ``part`` who wrote it."""


class Recorder:
    """Writes what one part finds, each line at once.

    Args:
        path: of the part's own file.
        part: its name.
        facts: what earlier parts found out by name, such as a bandwidth.
    """

    def __init__(self, path: Path, part: str, facts: Mapping[str, Any]) -> None:
        self._path, self._part, self.facts = path, part, facts

    def check(self, claim: str, held: bool, detail: str = "") -> None:
        """A claim that is tested: whether it held, and the numbers by which that was told."""
        self._write("check", claim=claim, held=bool(held), detail=detail)

    def unjudged(self, claim: str, detail: str = "") -> None:
        """A claim that cannot be tested here."""
        self._write("check", claim=claim, held=None, detail=detail)

    def row(self, table: str, **values: object) -> None:
        """A row of a table; columns in the order of the values."""
        self._write("row", table=table, values=values)

    def fact(self, name: str, value: object) -> None:
        """Something that later parts want to know."""
        self._write("fact", name=name, value=value)

    def note(self, text: str) -> None:
        """Anything else that a reader should know."""
        self._write("note", text=text)

    def _write(self, kind: str, **more: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "part": self._part, **more}) + "\n")


def lines_of(path: Path) -> list[Line]:
    """The whole lines of a part's file; a torn last one is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def facts_in(lines: Iterable[Line]) -> dict[str, Any]:
    """The facts that lines tell; the last of a name counts."""
    return {line["name"]: line["value"] for line in lines if line["kind"] == "fact"}
