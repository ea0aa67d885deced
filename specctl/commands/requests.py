"""Typer commands made from one request dataclass each, and the text of --help."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from itertools import chain
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from specctl.errors import UsageError

RUNNING = "How it runs"
"""The last help heading, for options that most runs leave out."""
_EXAMPLE = re.compile(r"^\[cyan\](.*)\[/\]$")
_RANGE = re.compile(r"^[^ ]*\bx[<>]|[<>]=?x\b")
_SENTENCE = re.compile(r"\.(?: |$)")
_INDENT = "  "
_ALL = "help_all"
"""The parameter of --help-all."""
_NARROW, _COLUMN = 100, 27


class CommandWithHelp(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the formatter of typer is not used
        """Print the help on standard output."""
        print_help(self, ctx)


class GroupWithHelp(TyperGroup):
    """A group of commands with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the formatter of typer is not used
        """Print the help on standard output."""
        print_help(self, ctx)


def print_help(command: Any, ctx: Any, *, whole: bool = False) -> None:
    """Write a command's usage, description and options, or a group's commands, in the width of the terminal.

    Args:
        command: of typer.
        ctx: its context.
        whole: show every option with its whole help; else the usual ones, with a sentence each.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line, style in help_lines(command, ctx, console.width, whole=whole):
        console.print(Text(line, style=style), soft_wrap=True)


def help_lines(command: Any, ctx: Any, width: int, *, whole: bool = False) -> Iterator[tuple[str, str]]:
    """The lines of a command's help, each with its style; see `print_help` for ``whole``."""
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
    """The lines under each heading, headings in order of their first member: commands, arguments, options."""
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
    """The first sentence, and typer's additions in brackets."""
    said, bracket, extras = text.rpartition(" [") if text.endswith("]") else (text, "", "")
    end = _SENTENCE.search(said)
    return f"{said[: end.start() + 1] if end else said}{bracket}{extras}"


def _without_ranges(text: str) -> str:
    """The help without a range such as ``x>=1`` at its end: typer's message for a wrong value contains it."""
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
    """Lines of whole words, because words to be typed must stay in one piece."""
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True, slots=True, eq=False)
class But:
    """In the annotation of a group: changes to its options for one command.

    Attributes:
        without: fields that the command does not offer; they have their defaults.
        help: by field, the help in this command.
    """

    without: tuple[str, ...] = ()
    help: Mapping[str, str] = field(default_factory=dict)


def option(text: str, spelling: str = "", *, default: Any = None, panel: str | None = None, **more: Any) -> Any:
    """An option, as the default of a command's parameter or of a group's field, whose annotation is its type.

    Args:
        text: its help.
        spelling: its flags, unless its name is the only one, and a placeholder for its value: ``-t --temperature T``.
        default: its default value; ... for a required option.
        panel: its heading in the help; by default the group's ``panel``, if it has one. Empty for none.
        more: of `typer.Option`.
    """
    words = spelling.split()
    flags = [word for word in words if word.startswith("-")]
    more = {"metavar": " ".join(words[len(flags) :]) or None, **more}
    return field(default=default, metadata={"option": typer.Option(*flags, help=text, rich_help_panel=panel, **more)})


def grouped(*, usual: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a Typer command from a function of one request, and add the option --help-all.

    The request is a dataclass. Its fields are options or groups of options; a group is a dataclass too. A field is an
    `option`, or annotated as Typer's parameters are. A command of a few flags may have these as its parameters instead.

    Args:
        usual: names of the fields that --help shows, separated by spaces; by default all. --help-all always shows all.
    """
    return partial(_grouped, usual.split())


def _grouped(usual: Sequence[str], command: Callable[..., None]) -> Callable[..., None]:
    flat: list[Parameter] = []
    makers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for name, parameter in signature(command).parameters.items():
        found, makers[name] = _flattened(name, parameter.annotation, parameter.default)
        flat += found
    if missing := {*usual} - {one.name for one in flat}:
        raise TypeError(f"{command.__name__} has no parameter {sorted(missing)}")
    flat.append(Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))

    @wraps(command)
    def run(*, help_all: bool, **given: Any) -> None:  # noqa: ARG001 - Typer has printed the help before
        command(**{name: make(given) for name, make in makers.items()})

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.usual = tuple(usual)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _flattened(
    name: str, hint: Any, default: Any, given: "But | None" = None, panel: str | None = None
) -> tuple[list[Parameter], Callable[[dict[str, Any]], Any]]:
    """The Typer parameters of a field, and a function that makes the field's value from theirs."""
    kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        told = given.help.get(name) if given is not None else None
        parameter = (
            _parameter(name, hint, default, told, panel)
            if isinstance(default, Field)
            else Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
        return [parameter], lambda values: values[name]
    buts = [extra for extra in extras if isinstance(extra, But)]
    but = But(
        tuple(chain(*(one.without for one in buts))), {key: text for one in buts for key, text in one.help.items()}
    )
    parts = {
        one.name: _flattened(one.name, one.type, one, but, getattr(kind, "panel", None))
        for one in fields(kind)
        if one.name not in but.without
    }

    def make(values: dict[str, Any]) -> Any:
        return kind(**{field_name: build(values) for field_name, (_, build) in parts.items()})

    return [parameter for found, _ in parts.values() for parameter in found], make


def _print_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        print_help(ctx.command, ctx, whole=True)
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_print_all, is_eager=True, help="Show every option and exit.")
]
"""The flag that shows the whole help of a command."""


def _parameter(name: str, hint: Any, given: Any, description: str | None = None, panel: str | None = None) -> Parameter:
    """An option as a Typer parameter; ``description`` replaces its help, ``panel`` is its group's panel."""
    if not given.metadata and not hasattr(hint, "__metadata__"):  # the context
        return Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint)
    kind, own = (hint, given.metadata["option"]) if given.metadata else get_args(hint)
    own = copy(own)
    own.help, own.rich_help_panel = (
        description or own.help,
        (panel if own.rich_help_panel is None else own.rich_help_panel) or None,
    )
    default = Parameter.empty if given.default is ... else given.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, own])


def require_unused(
    ctx: typer.Context, option: str, because: str, *, only: type | None = None, but: tuple[str, ...] = ()
) -> None:
    """Reject options of the command line that have no effect.

    Args:
        ctx: of the command.
        option: the option that makes the others useless.
        because: the reason, worded to follow the flag: ``runs no prompt``.
        only: the parameters without effect; None for all but ``option`` and ``but``.

    Raises:
        UsageError: one of them is given.
    """
    flags = {parameter.name: max(parameter.opts, key=len) for parameter in ctx.command.params}
    idle = {one.name for one in fields(only)} if only is not None else {*flags} - {option, *but}
    given = [name for name in ctx.params if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if others := [flags[name] for name in given if name in idle]:
        raise UsageError(f"{flags[option]} {because}, so {', '.join(others)} has no effect", "leave it out")
