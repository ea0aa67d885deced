"""A new profile as TOML text with comments."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from specctl.profile.model_names import short_name
from specctl.profile.overrides import set_layer
from specctl.profile.schema import Profile
from specctl.profile.validation import validate
from specctl.profile.wording import dotted

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
        values: as ``--set`` takes them, each KEY=VALUE; they are written in place of what is written without them.

    Raises:
        ProfileError: one of the values is not KEY=VALUE.
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
    _lay(table, given)
    first = {"schema_version": 1, "description": f"{names}, {table['draft']['policy']['name']}"}
    lines = ["# `specctl profiles show` prints every key with its value, those that are not here too."]
    lines += _lines((), {**first, **table})
    return "\n".join(lines) + "\n"


def _lay(table: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay values over a table; another policy takes nothing over of the one that it replaces."""
    for key, value in over.items():
        old = table.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, dict):
            table[key] = value
            continue
        if key == "policy" and value.get("name", old.get("name")) != old.get("name"):
            old.clear()
        _lay(old, value)


def checked(text: str, place: str) -> Profile:
    """The profile that a text holds; raises ProfileError with every mistake. ``place`` is for messages."""
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
