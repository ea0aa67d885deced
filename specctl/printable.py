"""Text from models and files, made safe to show in a terminal; sizes for people to read."""

import json
import unicodedata
from collections.abc import Set

_JOINERS = frozenset({0x200C, 0x200D})
"""Characters of Persian, of Indic scripts and of emoji that are format characters but move nothing."""


class _Translation(dict[int, str]):
    """Translation of characters that could command a terminal or deceive its reader; filled in as they occur."""

    def __init__(self, own: dict[int, str], dropped: Set[str], replaced: Set[str]) -> None:
        super().__init__(own)
        self._dropped, self._replaced = dropped, replaced

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if code < 0x20:
            shown = chr(0x2400 + code)
        elif code == 0x7F:
            shown = "\N{SYMBOL FOR DELETE}"
        elif category in self._replaced:
            shown = "\N{REPLACEMENT CHARACTER}"
        elif category in ("Zl", "Zp"):
            shown = "\n"
        elif category in self._dropped:
            shown = ""
        else:
            shown = char
        self[code] = shown
        return shown


_SELECTORS = dict.fromkeys([*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)], "")
_CELLS = _Translation(
    {ord("\n"): "\n", ord("\r"): "", ord("\t"): "    "} | _SELECTORS, {"Cf"}, {"Cc", "Cs", "Co", "Cn"}
)
_TEXT = _Translation(
    {ord("\n"): "\n", ord("\r"): "", ord("\t"): "\t"} | {code: chr(code) for code in _JOINERS}, {"Cf"}, {"Cc", "Cs"}
)


def printable(text: str) -> str:
    """The text without anything a terminal would obey or whose width terminals disagree on, ready to be laid out.

    Line feeds are the only controls left. Control characters become visible symbols, tabs four spaces; bidirectional
    and other format characters and variation selectors vanish, lone surrogates become U+FFFD.
    """
    return text.translate(_CELLS)


def one_line(text: str) -> str:
    """`printable` with line feeds turned into spaces."""
    return printable(text).replace("\n", " ")


def harmless(text: str) -> str:
    """The text without anything a terminal would obey, but with tabs, joiners and all that only needs a good font.

    For text whose width does not matter. Each character is treated by itself, so a text may be cleaned in pieces.
    """
    return text.translate(_TEXT)


def escaped(document: str) -> str:
    """The same JSON with what `harmless` would change written as escapes; line feeds between values stay."""
    return "".join(char if harmless(char) == char else json.dumps(char)[1:-1] for char in document)


def counted(number: int, noun: str) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{number:,} {noun}{'s'[: number != 1]}"


def gib(size: float) -> str:
    """A number of bytes with a unit, for messages."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
