"""Commands whose parameters may be groups of options, and what is said of options that have no effect."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args

import typer

from specctl.commands.help_screen import print_help
from specctl.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class But:
    """In the annotation of a group: how its options differ in one command.

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
        spelling: its flags, if its name is not the only one, and what stands for its value: ``-t --temperature T``.
        default: its value where it is not given; ... for an option that has to be.
        panel: its heading in the help; by default the group's ``panel``, if it has one. Empty for none.
        more: of `typer.Option`.
    """
    words = spelling.split()
    flags = [word for word in words if word.startswith("-")]
    more = {"metavar": " ".join(words[len(flags) :]) or None, **more}
    return field(default=default, metadata={"option": typer.Option(*flags, help=text, rich_help_panel=panel, **more)})


def grouped(*, usual: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command as Typer takes it: the parameters that are groups of options are replaced by their options.

    A group is a dataclass whose fields are options, as its parameters are: an `option` each, or annotated as Typer's
    are. The command takes keywords only. Its annotations and theirs are objects, no strings. It gets a further option,
    --help-all.

    Args:
        usual: the names of the parameters that --help shows, with spaces between; by default all. --help-all always
            shows all of them.
    """
    return partial(_grouped, usual.split())


def _grouped(usual: Sequence[str], command: Callable[..., None]) -> Callable[..., None]:
    groups: dict[str, tuple[type, list[str]]] = {}
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        hint = parameter.annotation
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if isinstance(kind, type) and is_dataclass(kind):
            options = _options(kind, [extra for extra in extras if isinstance(extra, But)])
            groups[name] = kind, [option.name for option in options]
            flat += options
        elif isinstance(parameter.default, Field):
            flat.append(_parameter(name, hint, parameter.default))
        else:
            flat.append(parameter)

    if missing := {*usual} - {one.name for one in flat}:
        raise TypeError(f"{command.__name__} has no parameter {sorted(missing)}")
    flat.append(Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))

    @wraps(command)
    def run(*, help_all: bool, **given: Any) -> None:  # noqa: ARG001 - Typer has printed the help before
        filled = {name: kind(**{one: given.pop(one) for one in names}) for name, (kind, names) in groups.items()}
        command(**given, **filled)

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.usual = tuple(usual)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _print_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        print_help(ctx.command, ctx, whole=True)
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_print_all, is_eager=True, help="Show every option and exit.")
]
"""The flag that shows the whole help of a command."""


def _options(group: type, differences: list[But]) -> list[Parameter]:
    """The options of a group in one command."""
    found = []
    for one in fields(group):
        if any(one.name in but.without for but in differences):
            continue
        told = next((but.help[one.name] for but in differences if one.name in but.help), None)
        found.append(_parameter(one.name, one.type, one, told, getattr(group, "panel", None)))
    return found


def _parameter(name: str, hint: Any, given: Any, told: str | None = None, panel: str | None = None) -> Parameter:
    """An option as Typer takes it; ``told`` is another help, ``panel`` that of its group."""
    kind, own = (hint, given.metadata["option"]) if given.metadata else get_args(hint)
    own = copy(own)
    own.help, own.rich_help_panel = (
        told or own.help,
        (panel if own.rich_help_panel is None else own.rich_help_panel) or None,
    )
    default = Parameter.empty if given.default is ... else given.default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, own])


def require_unused(
    ctx: typer.Context, option: str, because: str, *, only: type | None = None, but: tuple[str, ...] = ()
) -> None:
    """Refuse options of the command line that have no effect.

    Args:
        ctx: of the command.
        option: the parameter for which they have none.
        because: why, as what follows its flag: ``runs no prompt``.
        only: the group that has none; None for all parameters but ``option`` and ``but``.

    Raises:
        UsageError: one is given.
    """
    flags = {parameter.name: max(parameter.opts, key=len) for parameter in ctx.command.params}
    idle = {one.name for one in fields(only)} if only is not None else {*flags} - {option, *but}
    given = [name for name in ctx.params if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if others := [flags[name] for name in given if name in idle]:
        raise UsageError(f"{flags[option]} {because}, so {', '.join(others)} has no effect", "leave it out")
