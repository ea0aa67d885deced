"""``specctl profiles``: list, show, check, find and write profiles."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from specctl.commands.files import resolve_profile
from specctl.commands.new_profile import new
from specctl.commands.options import (
    DraftOption,
    JsonOption,
    ProfileArgument,
    ProfileArguments,
    SetOption,
    TargetOption,
)
from specctl.errors import ProfileError
from specctl.profile import ResolvedProfile, resolve
from specctl.profile.discovery import available, chosen, display, find
from specctl.profile.overrides import ENVIRONMENT_PREFIX
from specctl.profile.writing import annotated
from specctl.terminal.output import write_json, write_out

app = typer.Typer(no_args_is_help=True, help="List, show, check and write profiles.")

app.command()(new)

_COLUMNS = ("name", "target", "draft", "policy", "description", "path")


@app.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List every profile that can be used by name."""
    rows = [_row(name, path) for name, path in available().items()]
    if as_json:
        _print_json(rows)
    elif sys.stdout is not None and sys.stdout.isatty():
        _print_table(rows)
    else:
        for row in rows:
            line = "\t".join(" ".join(str(row[column] or "").split()) for column in _COLUMNS)
            write_out(line.encode(errors="replace").decode())  # the name of a file need not be text


@app.command()
def show(
    name: ProfileArgument = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all values of a profile, with the origin of each."""
    # It is shown, and runs nothing.
    resolved = resolve_profile(name, overrides, target=target, draft=draft, trust_remote_code=True)
    if as_json:
        _print_json(_document(resolved))
    else:
        write_out(annotated(resolved).rstrip("\n"))


@app.command()
def check(names: ProfileArguments = None) -> None:
    """Check the named profiles, or all of them. Exits with 2 if any is invalid."""
    wrong = []
    for name in names or available():
        try:
            resolve(name, environ=_bare_environment(), trust_remote_code=True)
        except ProfileError as error:
            wrong.append(error.told)
        else:
            write_out(f"{name}: ok ({display(find(name))})")
    if wrong:
        raise ProfileError("\n".join(wrong))


@app.command()
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


def _print_table(rows: list[dict[str, str | None]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specctl.reporting.console import cell

    columns = _COLUMNS[:-1]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(cell(row[column] or "-") for column in columns))
    Console().print(table)
