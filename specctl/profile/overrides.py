"""Values from outside the profile file: the environment, ``--set`` and flags."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specctl.errors import ProfileError
from specctl.policies.policy_text import parse_value
from specctl.profile.known_names import EMBEDDED
from specctl.profile.layers import Layer
from specctl.profile.schema import LOOKUP, LOOKUP_POLICY
from specctl.profile.wording import Key, dotted

ENVIRONMENT_PREFIX = "SPECCTL_"
_NOT_KEYS = {"SPECCTL_PROFILE", "SPECCTL_DEBUG", "SPECCTL_API_KEY"}
PAIR_POLICY = "cost-optimal"
"""The policy of a pair without a profile: it has no threshold to find for the pair, and where drafting does not pay it
drafts next to nothing."""
MODEL_FLAGS = {"target.model": "--target", "draft.model": "--draft"}
"""The flags that name a model, by its key."""


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Values of variables such as ``SPECCTL_SAMPLING__TEMPERATURE=0.7``; a double underscore separates tables.

    Raises:
        ProfileError: one variable sets a value where another sets a table.
    """
    return _layer(
        (_key(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")), parse_value(text), f"environment {name}")
        for name, text in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NOT_KEYS
    )


def set_layer(overrides: Sequence[str], place: str = "--set") -> Layer:
    """Values of ``--set KEY=VALUE`` in the order given; later ones win. ``place`` is their source, for messages.

    Raises:
        ProfileError: a text is not KEY=VALUE, or one sets a value where another sets a table.
    """
    entries = []
    for text in overrides:
        name, equals, value = text.partition("=")
        parts = [part.strip() for part in name.split(".")]
        if not equals or not all(parts):
            raise ProfileError(f"{place} {text}: expected KEY=VALUE", f"For example: {place} sampling.temperature=0.7")
        entries.append((_key(parts), parse_value(value.strip()), place))
    return _layer(entries)


def pair_name(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """The flags that name a pair, for messages; None if they name no target.

    A lookup goes with every target: without a target and a profile of the environment it is that of `EMBEDDED`.
    """
    alone = flags.get("draft.model") == LOOKUP and not environ.get("SPECCTL_PROFILE")
    if flags.get("target.model") is None and not alone:
        return None
    return " ".join(f"{flag} {flags[key]}" for key, flag in MODEL_FLAGS.items() if flags.get(key) is not None)


def pair_layer(flags: Mapping[str, Any]) -> Layer:
    """What a profile for the pair of ``--target`` and ``--draft`` would say besides its models."""
    draft = flags.get("draft.model")
    table: dict[str, Any] = {} if draft is None else {"draft": {"policy": pair_policy(draft)}}
    if flags.get("target.model") is None:
        table["target"] = {"model": f"{EMBEDDED}target"}
    if str(flags.get("target.model") or EMBEDDED).startswith(EMBEDDED):
        table["prompt"] = {"chat": False}  # as in the profiles of the embedded models, which continue stories
    return Layer(table, lambda _: "default")


def pair_policy(draft: str) -> dict[str, Any]:
    """The policy of a draft of this name where nobody names one."""
    return LOOKUP_POLICY if draft == LOOKUP else {"name": PAIR_POLICY}


def flag_layer(flags: Mapping[str, Any]) -> Layer:
    """Values of command-line flags by dotted key; None means that the flag was not given."""
    return _layer(
        (_key(name.split(".")), value, f"flag {MODEL_FLAGS.get(name) or _flag_name(name)}")
        for name, value in flags.items()
        if value is not None
    )


def _flag_name(name: str) -> str:
    return "--" + name.rpartition(".")[2].replace("_", "-")


def _key(parts: Sequence[str]) -> Key:
    return ("draft", *parts) if parts[0] == "policy" else tuple(parts)


def _layer(entries: Iterable[tuple[Key, Any, str]]) -> Layer:
    table: dict[str, Any] = {}
    places: dict[Key, str] = {}
    for key, value, place in entries:
        inner = table
        for depth, part in enumerate(key[:-1], start=1):
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                around = dotted(key[:depth])
                raise ProfileError(f"{place}: {dotted(key)}: {around} is already set to a value and cannot be a table")
            places.setdefault(key[:depth], place)
        inner[key[-1]] = value
        places[key] = place

    def place_of(key: Key) -> str:
        return next(places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in places)

    return Layer(table, place_of)
