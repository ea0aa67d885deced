"""Profiles as TOML text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from specctl.outputs import Outputs, naming
from specctl.profile.resolution import ResolvedProfile
from specctl.profile.wording import Key, dotted


def write_profile(path: Path, table: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a profile file, creating its directory.

    Raises:
        UsageError: the file exists and ``overwrite`` is false, or it cannot be written.
        OutputError: it can be written only in part; then it is not changed.
    """
    with naming(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with Outputs(force=overwrite) as outputs:
        outputs.file("profile", path).replace(tomli_w.dumps(table))


def annotated(resolved: ResolvedProfile) -> str:
    """The resolved profile as TOML; a comment after each value shows its origin. Unset keys are left out."""
    lines: list[str] = []
    _write_table(lines, resolved.profile.model_dump(exclude_none=True), (), resolved.origins)
    return "\n".join(lines) + "\n"


def _write_table(lines: list[str], table: dict[str, Any], at: Key, origins: dict[str, str]) -> None:
    tables = {name: value for name, value in table.items() if isinstance(value, dict) and value}
    if at and (len(tables) < len(table) or not table):
        lines += ["", f"[{dotted(at)}]"]
    for name, value in table.items():
        if name not in tables and (key := dotted((*at, name))) in origins:  # a table without set keys has no origin
            assignment = tomli_w.dumps({name: value}).rstrip("\n")
            lines.append(f"{assignment}  # {_comment(origins[key])}")
    for name, inner in tables.items():
        _write_table(lines, inner, (*at, name), origins)


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
