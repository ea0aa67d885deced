"""Text that would command a terminal, deceive its reader, or be markup for rich, Markdown, HTML or matplotlib."""

import io
import unicodedata

HOSTILE = "\x1b]0;PWNED\x07\x1b[31mred\x9b1m\u202e\u2066\r [red]x[/] [/] :smile: <b>&amp; $\\frac$ $"
"""Sets the title of a window, colours what follows, and turns the writing direction around."""
CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}


class Terminal(io.StringIO):
    """A terminal: has what was typed, or collects what it would get."""

    def isatty(self) -> bool:
        return True


def commands(text: str) -> set[str]:
    """The characters of a text that a terminal would obey, but for line feeds and tabs."""
    return {char for char in text if unicodedata.category(char) in CATEGORIES} - {"\n", "\t"}
