"""``specctl profiles``: list, show, check, find and write profiles."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.commands.grouped_command import But, HelpAll, grouped
from specctl.commands.help_screen import CommandWithHelp, GroupWithHelp
from specctl.commands.new_profile import new
from specctl.commands.option_groups import PairOptions, RunOptions
from specctl.commands.options import JsonOption, SetOption, complete_profile
from specctl.errors import ProfileError
from specctl.profile import ResolvedProfile, resolve
from specctl.profile.profile_file import available, chosen, display, find
from specctl.profile.resolution import ENVIRONMENT_PREFIX
from specctl.profile.schema import EMBEDDED
from specctl.profile.wording import short_name
from specctl.profile.writing import annotated
from specctl.terminal.output import write_json, write_out

app = typer.Typer(cls=GroupWithHelp, no_args_is_help=True)


@app.callback()
def profiles(help_all: HelpAll = False) -> None:
    """List, show, check and write profiles."""


app.command(cls=CommandWithHelp)(new)

ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", show_default=False, autocompletion=complete_profile, help="Name or path of a profile."
    ),
]

ProfileArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME...", show_default=False, autocompletion=complete_profile, help="Names or paths of profiles."
    ),
]

_COLUMNS = ("name", "target", "draft", "policy", "description", "path")
_LEAST = {"policy": 14, "target": 10, "draft": 10, "description": 40}
"""Columns of a terminal that a column needs at least, or is left out; the first gets first what is left, but for names,
which are always whole."""
_WIDEST = {"target": 26, "draft": 26}
_MODELS = ("target", "draft")


@app.command("list", cls=CommandWithHelp)
@grouped()
def list_(as_json: JsonOption = False) -> None:
    """List every profile that can be used by name."""
    rows = [_row(name, path) for name, path in available().items()]
    rows.sort(key=_is_demonstration)
    if as_json:
        _print_json(rows)
    elif sys.stdout is not None and sys.stdout.isatty():
        _print_table(rows)
    else:
        for row in rows:
            line = "\t".join(" ".join(str(row[column] or "").split()) for column in _COLUMNS)
            write_out(line.encode(errors="replace").decode())  # the name of a file need not be text


@app.command(cls=CommandWithHelp)
@grouped()
def show(
    *,
    name: ProfileArgument = None,
    models: Annotated[PairOptions, But(("profile",))],
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all values of a profile, with the origin of each."""
    # It is shown, and runs nothing.
    resolved = RunOptions(overrides, trust_remote_code=True).resolve(replace(models, profile=name))
    if as_json:
        _print_json(_document(resolved))
    else:
        write_out(annotated(resolved).rstrip("\n"))


@app.command(cls=CommandWithHelp)
@grouped()
def check(names: ProfileArguments = None) -> None:
    """Check the named profiles, or all of them. Exits with 2 if any is invalid."""
    wrong = []
    for name in names or available():
        try:
            resolve(name, environ=_bare_environment(), trust_remote_code=True)
        except ProfileError as error:
            wrong.append(error.told)
        else:
            path = display(find(name))
            write_out(f"{name}: ok" if path == name else f"{name}: ok ({path})")
    if wrong:
        raise ProfileError("\n".join(wrong))


@app.command(cls=CommandWithHelp)
@grouped()
def path(name: ProfileArgument = None) -> None:
    """Print the path of a profile's file."""
    write_out(str(chosen(name).absolute()))


def _bare_environment() -> dict[str, str]:
    """The environment without overrides of profile values, so that only the file counts."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}


def _row(name: str, path: Path) -> dict[str, str | None]:
    row: dict[str, str | None] = dict.fromkeys(_COLUMNS) | {"name": name, "path": str(path.absolute())}
    try:
        profile = resolve(str(path.absolute()), environ=_bare_environment(), trust_remote_code=True).profile
    except ProfileError as error:
        return row | {"description": f"not usable: {error}"}
    row |= {"target": profile.target.model, "description": profile.description}
    if profile.draft is not None:
        row |= {"draft": profile.draft.model, "policy": profile.draft.policy.name}
    return row


def _document(resolved: ResolvedProfile) -> dict[str, Any]:
    table = resolved.profile.model_dump()
    model, dumped = resolved.profile.draft, table["draft"]
    table["target"]["model"] = resolved.profile.target.checkpoint
    while model is not None:
        dumped["model"] = model.checkpoint
        model, dumped = model.draft, dumped["draft"]
    return {
        "name": resolved.name,
        "path": None if resolved.source is None else str(resolved.source.absolute()),
        "profile": table,
        "origins": resolved.origins,
    }


def _print_json(document: Any) -> None:
    write_json(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def _is_demonstration(row: dict[str, str | None]) -> bool:
    return (row["target"] or "").startswith(EMBEDDED)


def _print_table(rows: list[dict[str, str | None]]) -> None:
    """One line for each profile, with as many columns as fit."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console

    from specctl.reporting.console import cell

    console = Console()
    texts = [
        {**{column: row[column] or "-" for column in _COLUMNS}, **{key: short_name(row[key] or "-") for key in _MODELS}}
        for row in rows
    ]
    shown = [{column: cell(text).plain for column, text in row.items()} for row in texts]
    natural = {column: max((cell_len(row[column]) for row in shown), default=0) for column in _COLUMNS}
    room = console.width - natural["name"]
    taken: dict[str, int] = {}
    for column, least in _LEAST.items():
        width = min(least, natural[column])
        if width + 2 > room:
            break
        taken[column] = width
        room -= width + 2
    for column, least in taken.items():
        more = min(room, min(natural[column], _WIDEST.get(column, room + least)) - least)
        taken[column] += more
        room -= more
    widths = {"name": natural["name"], **{column: taken[column] for column in _COLUMNS if column in taken}}

    def line(row: dict[str, str]) -> str:
        cut = [_cut(row[column], width) if column != "name" else row[column] for column, width in widths.items()]
        return "  ".join(map(set_cell_size, cut, widths.values())).rstrip()

    console.print(cell(line({column: column for column in _COLUMNS}), "bold"), soft_wrap=True)
    told = False
    for row, text in zip(rows, shown, strict=True):
        if not told and (told := _is_demonstration(row)):
            console.print(cell("demonstration models, which ship with specctl:", "dim"))
        console.print(cell(line(text)), soft_wrap=True)


def _cut(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
