"""Text on standard output and messages on standard error, without anything that a terminal would obey."""

import os
import re
import shutil
import sys
import textwrap
from contextlib import suppress

from specctl.outputs import Sink
from specctl.printable import escaped, harmless, printable

_INTERVAL = re.compile(r"\d[\d.,]*x? \(\d[\d.]* to \d[\d.]*")
"""A number with its interval: ``1.31x (1.16 to 1.65)``."""
_JOINED = "\N{NO-BREAK SPACE}"


def write_text(sink: Sink, text: str) -> None:
    """Write text that may come from a model or a file: cleaned for a terminal, as it is into a file or a pipe."""
    sink.write(harmless(text) if sink.isatty() else text)


def write_out(text: str) -> None:
    """`write_text` on standard output, with a line feed behind it."""
    if sys.stdout is not None:
        write_text(sys.stdout, f"{text}\n")


def write_sentence(text: str) -> None:
    """`write_out` of one line, which a terminal gets broken between words, never within a number and its interval."""
    broken = sys.stdout is not None and sys.stdout.isatty()
    write_out(_wrapped(text) if broken else text)


def write_json(document: str) -> None:
    """`write_out` for a JSON document, in which a terminal gets escapes, so that it stays the same document.

    So does anything else if the document has no UTF-8 form: the name of a file need not be text.
    """
    if sys.stdout is not None:
        sys.stdout.write((escaped(document) if sys.stdout.isatty() or not _is_text(document) else document) + "\n")


def _is_text(document: str) -> bool:
    try:
        document.encode()
    except UnicodeEncodeError:
        return False
    return True


def tell(text: str, label: str = "", style: str = "") -> None:
    """Write a message to standard error, cleaned even if it is a file: logs are read in terminals.

    Args:
        text: one or several lines.
        label: stands before the text, with a colon.
        style: parameters of the escape sequence that colours the label on a terminal.
    """
    colour = style and sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    start = f"\033[{style}m{label}:\033[0m " if colour else f"{label}: " if label else ""
    told = printable(text)
    if sys.stderr is not None and sys.stderr.isatty():
        told = _wrapped(told, len(label) + 2 if label else 0)
    with suppress(OSError):  # standard error may be closed
        print(start + told, file=sys.stderr, flush=True)


def _wrapped(text: str, before: int = 0) -> str:
    """The text with its lines broken between words for a terminal; indented ones stay whole, to be copied.

    Args:
        text: whole lines.
        before: characters in front of the first of them.
    """
    width = max(shutil.get_terminal_size().columns, 20)
    lines: list[str] = []
    for line in text.split("\n"):
        taken = "" if lines else " " * before
        joined = _INTERVAL.sub(lambda found: found[0].replace(" ", _JOINED), line)
        parts = textwrap.wrap(joined, width, initial_indent=taken, break_long_words=False, break_on_hyphens=False)
        parts = [part.replace(_JOINED, " ") for part in parts]
        whole = line.startswith(" ") or len(parts) < 2
        lines += [line] if whole else [parts[0].removeprefix(taken), *parts[1:]]
    return "\n".join(lines)
