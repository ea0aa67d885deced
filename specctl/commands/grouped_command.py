"""Commands whose parameters may be groups of options, and what is said of options that have no effect."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args

import typer

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


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command as Typer takes it: the parameters that are groups of options are replaced by their options.

    A group is a dataclass whose fields are annotated as Typer's parameters are; the command takes keywords only. Its
    annotations and theirs are objects, no strings.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        hint = parameter.annotation
        kind, *extras = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if isinstance(kind, type) and is_dataclass(kind):
            options = _options(kind, [extra for extra in extras if isinstance(extra, But)])
            groups[name] = kind, [option.name for option in options]
            flat += options
        else:
            flat.append(parameter)

    @wraps(command)
    def run(**given: Any) -> None:
        filled = {name: kind(**{one: given.pop(one) for one in names}) for name, (kind, names) in groups.items()}
        command(**given, **filled)

    run.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _options(group: type, differences: list[But]) -> list[Parameter]:
    """The options of a group in one command."""
    found = []
    for one in fields(group):
        if any(one.name in but.without for but in differences):
            continue
        kind, option = get_args(one.type)
        for but in differences:
            if one.name in but.help:
                option = copy(option)
                option.help = but.help[one.name]
        found.append(
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=Annotated[kind, option])
        )
    return found


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
