"""A new profile as TOML text with comments."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from specctl.profile.model_names import short_name
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


def new_profile(target: str, drafts: Sequence[str], policy: Mapping[str, Any], *, chat: bool) -> str:
    """The text of a profile.

    Args:
        target: hub id or path.
        drafts: the target's own draft, then the model that drafts for it, and so on.
        policy: the table that `parse_policy` returns; every draft gets it.
        chat: whether prompts go through the chat template.
    """
    names = " drafted by ".join(map(short_name, (target, *drafts)))
    lines = [
        "# `specctl profiles show` prints every key with its value, those that are not here too.",
        "schema_version = 1",
        tomli_w.dumps({"description": f"{names}, {policy['name']}"}).rstrip("\n"),
        *_table(("target",), {"model": target, "device": "auto", "dtype": "auto"}),
    ]
    for depth, draft in enumerate(drafts, start=1):
        key = ("draft",) * depth
        lines += _table(key, {"model": draft, "device": "auto", "dtype": "auto"})
        lines += _table((*key, "policy"), policy)
    lines += _table(("sampling",), {"temperature": 0.0, "max_new_tokens": 256})
    lines += _table(("prompt",), {"chat": chat})
    return "\n".join(lines) + "\n"


def checked(text: str, place: str) -> Profile:
    """The profile that a text holds; raises ProfileError with every mistake. ``place`` is for messages."""
    return validate(tomllib.loads(text), lambda _: place, place)


def _table(key: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    lines = ["", f"[{dotted(tuple(key))}]"]
    for name, value in values.items():
        assignment = tomli_w.dumps({name: value}).rstrip("\n")
        comment = _COMMENTS.get(dotted((*key, name)))
        lines.append(assignment if comment is None else f"{assignment:{_COLUMN}}  # {comment}")
    return lines
