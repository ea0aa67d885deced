"""Text from models and files, made safe to show in a terminal."""

import unicodedata


class _Printable(dict[int, str]):
    """Translation of characters that could command a terminal or whose width terminals disagree on."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if code < 0x20:
            shown = chr(0x2400 + code)
        elif category in ("Cc", "Cs", "Co", "Cn"):
            shown = "\N{REPLACEMENT CHARACTER}"
        elif category in ("Zl", "Zp"):
            shown = "\n"
        elif category == "Cf" or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
            shown = ""
        else:
            shown = char
        self[code] = shown
        return shown


_PRINTABLE = _Printable({ord("\n"): "\n", ord("\r"): "", ord("\t"): "    "})


def printable(text: str) -> str:
    """The text without anything a terminal would obey; line feeds are the only controls left.

    Control characters become visible symbols, tabs four spaces; bidirectional and other format characters and
    variation selectors vanish, lone surrogates become U+FFFD.
    """
    return text.translate(_PRINTABLE)


def one_line(text: str) -> str:
    """`printable` with line feeds turned into spaces."""
    return printable(text).replace("\n", " ")
