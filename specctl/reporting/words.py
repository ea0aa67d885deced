"""The meanings of table columns and other words, from docs/words.md, which ships with the program."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from specctl.reporting.table import DOWN, UP, stands_for

READING = (
    "Brackets hold 95% bootstrap intervals over prompts. - is a value that cannot be known. An arrow after a heading "
    "says whether higher (↑) or lower (↓) is better."
)
"""The note on all tables."""
_PACKAGE = Path(__file__).parent.parent
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$")


class Word(NamedTuple):
    """A word of the page with its meaning; ``heads`` if it is the heading of a column or row."""

    text: str
    meaning: str
    heads: bool


def meanings(command: str, headings: Iterable[str]) -> dict[str, str]:
    """The meaning of each heading that is defined, in their order.

    Args:
        command: the command that shows the tables; other commands define the words that it lacks.
        headings: with their arrows.
    """
    sections = {name: {word.text: word.meaning for word in words if word.heads} for name, words in _sections().items()}
    order = [sections.get(command, {}), *(words for name, words in sections.items() if name != command)]
    found: dict[str, str] = {}
    for heading in headings:
        name = heading.removesuffix(UP).removesuffix(DOWN)
        for words in order:
            known = next((word for word in words if word == name), None) or next(
                (word for word in words if stands_for(word, name)), None
            )
            if known is not None:
                # One entry for all names with the same placeholder.
                found[known] = words[known]
                break
    return found


def lookup(asked: str) -> list[tuple[str, Word]]:
    """The words that contain this text, ignoring case, each with its section; for a section's name all its words."""
    sections, key = _sections(), asked.casefold()
    whole = [(name, word) for name, words in sections.items() if name.casefold() == key for word in words]
    found = [(name, word) for name, words in sections.items() for word in words if key in word.text.casefold()]
    exact = [(name, word) for name, word in found if word.text.casefold() == key]
    return whole or exact or found


def all_words() -> dict[str, list[str]]:
    """Every defined word, by section."""
    return {name: list(dict.fromkeys(word.text for word in words)) for name, words in _sections().items() if words}


@cache
def _sections() -> Mapping[str, Sequence[Word]]:
    installed = _PACKAGE / "_words.md"
    page = installed if installed.is_file() else _PACKAGE.parent / "docs" / "words.md"
    # Without the page, a report only lacks these meanings.
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return {name: tuple(_defined(body)) for name, _, body in (part.partition("\n") for part in text.split("\n## ")[1:])}


def _defined(section: str) -> Iterator[Word]:
    defines: str | None = None
    for line in section.splitlines():
        row = _ROW.match(line)
        if row is None:
            defines = None
        elif row[2] == "meaning":
            defines = row[1]
        elif defines is not None and set(row[1]) != {"-"}:
            yield Word(_plain(row[1]), _plain(row[2]), defines in ("column", "row"))


def _plain(text: str) -> str:
    """The visible text of a Markdown cell."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("\\|", "|")
