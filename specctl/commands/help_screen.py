"""What --help and --help-all print: whole examples, options under headings; it fits 80 columns and pipes."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from specctl.commands.options import RUNNING

_EXAMPLE = re.compile(r"^\[cyan\](.*)\[/\]$")
_RANGE = re.compile(r"^[^ ]*\bx[<>]|[<>]=?x\b")
_SENTENCE = re.compile(r"\.(?: |$)")
_INDENT = "  "
_ALL = "help_all"
"""The parameter of --help-all."""
_NARROW, _COLUMN = 100, 27


class CommandWithHelp(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the formatter of typer is not used
        """Print the help on standard output."""
        print_help(self, ctx)


class GroupWithHelp(TyperGroup):
    """A group of commands with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the formatter of typer is not used
        """Print the help on standard output."""
        print_help(self, ctx)


def print_help(command: Any, ctx: Any, *, whole: bool = False) -> None:
    """Write a command's usage, description and options, or a group's commands, as wide as the terminal is.

    Args:
        command: of typer.
        ctx: its context.
        whole: whether every option is shown with all that is said of it; else the usual ones, with a sentence each.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line, style in help_lines(command, ctx, console.width, whole=whole):
        console.print(Text(line, style=style), soft_wrap=True)


def help_lines(command: Any, ctx: Any, width: int, *, whole: bool = False) -> Iterator[tuple[str, str]]:
    """The lines of a command's help, each with its style; ``whole`` as in `print_help`."""
    yield command.get_usage(ctx), "bold"
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        if example := _EXAMPLE.match(text):
            yield f"{_INDENT}{example[1]}", "cyan"
        elif text:
            yield "", ""
            yield from ((line, "") for line in _wrapped(text, width))
    sections, left_out = _sections(command, ctx, whole)
    longest = max(len(name) for rows in sections.values() for name, _ in rows) + 2 * len(_INDENT)
    column = min(longest, _COLUMN if width < _NARROW else 2 * width // 5)
    for title, rows in sections.items():
        yield "", ""
        yield f"{title}:", "bold"
        yield from ((line, "") for line in _columns(rows, column, width))
    if left_out:
        yield "", ""
        yield f"{left_out} more options, and more about these: {ctx.command_path} --help-all", "bold"


def _sections(command: Any, ctx: Any, whole: bool) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """What stands under each heading: commands, arguments, options in the order of the first of each, how it runs.

    Returns:
        The sections, and how many options are not shown, besides those about help.
    """
    usual = getattr(command.callback, "usual", ())
    brief = bool(usual) and not whole
    found: dict[str, list[tuple[str, str]]] = {"Commands": [], "Arguments": [], "Options": []}
    left_out = 0
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        if (brief and param.name not in usual) or (param.name == _ALL and not usual):
            left_out += param.name not in ("help", _ALL)
            continue
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        title = getattr(param, "rich_help_panel", None) or default
        text = _without_ranges(record[1])
        found.setdefault(title, []).append((record[0].removesuffix(" <str>"), _in_brief(text) if brief else text))
    if isinstance(command, TyperGroup):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            if inner is not None and not inner.hidden:
                found["Commands"].append((name, " ".join((inner.help or "").split("\n\n")[0].split())))
    last = found.pop(RUNNING, [])
    return {title: rows for title, rows in {**found, RUNNING: last}.items() if rows}, left_out


def _in_brief(text: str) -> str:
    """The first sentence, and what typer adds in brackets."""
    said, bracket, extras = text.rpartition(" [") if text.endswith("]") else (text, "", "")
    end = _SENTENCE.search(said)
    return f"{said[: end.start() + 1] if end else said}{bracket}{extras}"


def _without_ranges(text: str) -> str:
    """The help without a range such as ``x>=1`` at its end, which is told to who gives a wrong value."""
    start, bracket, extras = text.rpartition("  [")
    if not bracket or not extras.endswith("]"):
        return text
    kept = [part for part in extras[:-1].split("; ") if not _RANGE.search(part)]
    return f"{start} [{'; '.join(kept)}]" if kept else start


def _columns(rows: list[tuple[str, str]], column: int, width: int) -> Iterator[str]:
    """Names and their help side by side; a name that is too long has a line of its own."""
    for name, text in rows:
        start, lines = f"{_INDENT}{name}", _wrapped(text, width - column)
        if len(start) + len(_INDENT) > column:
            yield start
            start = ""
        for line in lines or [""]:
            yield f"{start:{column}}{line}".rstrip()
            start = ""


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words: what a person types has to be read in one piece."""
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
