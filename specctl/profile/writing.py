"""Profiles as TOML text: a new one with comments, a resolved one with origins, and a file."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from specctl.outputs import Outputs, naming
from specctl.profile.resolution import ResolvedProfile, set_layer
from specctl.profile.schema import Profile
from specctl.profile.validation import validate
from specctl.profile.wording import Key, dotted, short_name

_COMMENTS = {
    "target.device": 'or "cuda:0", "cpu", a device_map table',
    "target.dtype": 'as the weights are stored; or "bfloat16", "float16", "float32"',
    "draft.policy.name": "when the draft stops; `specctl calibrate` finds what is fastest here",
    "sampling.temperature": "0 is greedy decoding",
    "sampling.max_new_tokens": "of each completion",
    "prompt.chat": "through the target's chat template; false sends prompts as they are",
}
_COLUMN = 24


def new_profile(
    target: str,
    drafts: Sequence[str],
    policy: Mapping[str, Any],
    *,
    chat: bool | None,
    values: Sequence[str] = (),
) -> str:
    """The text of a profile.

    Args:
        target: hub id or path.
        drafts: the target's own draft, then the model that drafts for it, and so on.
        policy: the table that `parse_policy` returns; every draft gets it.
        chat: whether prompts go through the chat template; None to leave that to the rule.
        values: KEY=VALUE texts of ``--set``, which replace what is written without them. Another form is a
            ProfileError.
    """
    names = " drafted by ".join(map(short_name, (target, *drafts)))
    drafting: dict[str, Any] = {}
    for draft in reversed(drafts):
        below = {"draft": drafting} if drafting else {}
        drafting = {"model": draft, "device": "auto", "dtype": "auto", "policy": dict(policy), **below}
    table: dict[str, Any] = {
        "target": {"model": target, "device": "auto", "dtype": "auto"},
        "draft": drafting,
        "sampling": {"temperature": 0.0, "max_new_tokens": 256},
        "prompt": {} if chat is None else {"chat": chat},
    }
    given = set_layer(values).table
    overlay(table, given)
    first = {"schema_version": 1, "description": f"{names}, {table['draft']['policy']['name']}"}
    lines = ["# `specctl profiles show` prints every key with its value, those that are not here too."]
    lines += _lines((), {**first, **table})
    return "\n".join(lines) + "\n"


def overlay(table: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Put values over those of a table; another policy keeps no values of the one that it replaces."""
    for key, value in over.items():
        old = table.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, dict):
            table[key] = value
            continue
        if key == "policy" and value.get("name", old.get("name")) != old.get("name"):
            old.clear()
        overlay(old, value)


def checked(text: str, place: str) -> Profile:
    """Parse and check a profile's text; raises ProfileError with every mistake. ``place`` is for messages."""
    return validate(tomllib.loads(text), lambda _: place, place)


def _lines(key: Sequence[str], table: Mapping[str, Any]) -> list[str]:
    """The lines of a table: its own values first, then the tables in it, each under its key."""
    lines = []
    for name, value in table.items():
        if not isinstance(value, Mapping):
            assignment = tomli_w.dumps({name: value}).rstrip("\n")
            comment = _COMMENTS.get(dotted((*key, name)))
            lines.append(assignment if comment is None else f"{assignment:{_COLUMN}}  # {comment}")
    if key and lines:
        lines = ["", f"[{dotted(tuple(key))}]", *lines]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines((*key, name), value)
    return lines


def write_profile(path: Path, table: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Write a profile file, creating its directory.

    Raises UsageError if the file exists without ``overwrite`` or cannot be written. Raises OutputError if it can be
    written only in part; it is then unchanged.
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
            comment = "".join(char if char.isprintable() else "?" for char in origins[key])
            lines.append(f"{assignment}  # {comment}")
    for name, inner in tables.items():
        _write_table(lines, inner, (*at, name), origins)
