"""What the columns of tables and other words mean, as docs/words.md defines them; it ships with the program."""

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
"""What holds for all tables."""
_PACKAGE = Path(__file__).parent.parent
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$")


class Word(NamedTuple):
    """A word of the page with its meaning; ``heads`` where it stands above a column or before a row."""

    text: str
    meaning: str
    heads: bool


def meanings(command: str, headings: Iterable[str]) -> dict[str, str]:
    """The meaning of each heading that is defined, in their order.

    Args:
        command: that shows the tables; other commands define the words that it does not.
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
                # One entry for all names that a placeholder stands for.
                found[known] = words[known]
                break
    return found


def lookup(asked: str) -> list[tuple[str, Word]]:
    """The words with this text in them, in any case, each with its section; all those of a section of this name."""
    sections, key = _sections(), asked.casefold()
    whole = [(name, word) for name, words in sections.items() if name.casefold() == key for word in words]
    found = [(name, word) for name, words in sections.items() for word in words if key in word.text.casefold()]
    exact = [(name, word) for name, word in found if word.text.casefold() == key]
    return whole or exact or found


def all_words() -> dict[str, list[str]]:
    """By section, every word that is defined."""
    return {name: list(dict.fromkeys(word.text for word in words)) for name, words in _sections().items() if words}


@cache
def _sections() -> Mapping[str, Sequence[Word]]:
    """Every defined word, by section, for example by command."""
    installed = _PACKAGE / "_words.md"
    page = installed if installed.is_file() else _PACKAGE.parent / "docs" / "words.md"
    # Without the page a report lacks these meanings, and nothing else.
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
    """Markdown of a cell as the words that it shows."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("\\|", "|")
