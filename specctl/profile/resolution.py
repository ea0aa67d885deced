"""Resolves a profile name and overrides to a checked profile, with the origin of every value."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specctl.errors import ProfileError
from specctl.policies import NONE
from specctl.policies.registry import parse_value, policy_table
from specctl.profile.profile_file import (
    DEFAULT_PROFILE,
    HERE,
    Document,
    chosen,
    display,
    find,
    found_here,
    is_path,
    owned,
    read,
    shadowed,
)
from specctl.profile.schema import DEFAULT_POLICY, EMBEDDED, GRAMMARS, LOOKUP, LOOKUP_POLICY, Profile, unchained
from specctl.profile.validation import check_policy, validate
from specctl.profile.wording import Key, brief, dotted, shown

_WHOLE_VALUES = {"device", "max_memory", "provenance", "batch_policies", "json_schema", "logit_bias"}
"""Tables replaced as a whole: for example, a mix of two device maps is not a valid map."""
OF_ONE_MODEL = ("head", "revision", "adapter", "trust_remote_code")
"""Keys about one checkpoint, dropped when a later layer names another model."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one source; ``place`` returns where in the source a key is set, for messages."""

    table: dict[str, Any]
    place: Callable[[Key], str]


@dataclass(slots=True)
class Layers:
    """The merged values of all layers so far; later layers win."""

    table: dict[str, Any] = field(default_factory=dict)  # the merged values
    origins: dict[Key, str] = field(default_factory=dict)  # where each key came from, tables included

    def lay(self, layer: Layer) -> None:
        """Merge a layer on top, table by table.

        A policy table that names another policy replaces the earlier one. A table that names another model drops the
        earlier model's kind, head, revision and adapter, and the permission to run its code.
        """
        self._merge(self.table, _with_lookups(layer.table), (), layer.place)

    def copy(self) -> "Layers":
        """A copy of the values so far, which later layers do not change."""
        return Layers(deepcopy(self.table), dict(self.origins))

    def drop(self, key: Key) -> None:
        """Remove a key, if it is there."""
        table: Any = self.table
        for name in key[:-1]:
            table = table.get(name) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table.pop(key[-1], None)
        self._forget(key)

    def origin(self, key: Key) -> str | None:
        """The origin of a key, else of the nearest table that contains it."""
        return next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), None)

    def _merge(self, below: dict[str, Any], above: dict[str, Any], at: Key, place: Callable[[Key], str]) -> None:
        gone: list[str] = []
        if "model" in above and "lookup" not in above:  # a model named alone drafts without a lookup
            gone += ("lookup", "earlier")
        if above.get("model", below.get("model")) != below.get("model"):
            gone += ("kind", *OF_ONE_MODEL)
        if any(name in above for name in GRAMMARS):  # a text follows only one grammar
            gone += (name for name in GRAMMARS if name not in above)
        if _names_a_policy(above) and "batch_policies" not in above:  # they were chosen with another policy
            gone.append("batch_policies")
        for name in gone:
            below.pop(name, None)
            self._forget((*at, name))
        for name, value in above.items():
            key = (*at, name)
            old = below.get(name)
            if isinstance(value, dict) and isinstance(old, dict) and not _replaces(name, value, old):
                self._merge(old, value, key, place)
            else:
                self._forget(key)
                below[name] = deepcopy(value)
                self._remember(key, value, place)

    def _forget(self, key: Key) -> None:
        self.origins = {other: origin for other, origin in self.origins.items() if other[: len(key)] != key}

    def _remember(self, key: Key, value: Any, place: Callable[[Key], str]) -> None:
        self.origins[key] = place(key)
        if isinstance(value, dict):
            for name, inner in value.items():
                self._remember((*key, name), inner, place)


def _with_lookups(table: dict[str, Any]) -> dict[str, Any]:
    """The table with explicit model names for drafts that are lookups by kind, so that they replace earlier models, and
    for chains with a lookup.
    """
    draft = table.get("draft")
    if not isinstance(draft, dict):
        return table
    named = {"model": LOOKUP} if draft.get("kind") == "lookup" else {}
    return {**table, "draft": {**named, **_with_lookups(unchained(draft))}}


def _names_a_policy(draft: dict[str, Any]) -> bool:
    """Whether a draft table names a policy; a table of settings alone changes the earlier policy."""
    policy = draft.get("policy")
    return "name" in policy if isinstance(policy, dict) else policy is not None


def _replaces(name: str, above: dict[str, Any], below: dict[str, Any]) -> bool:
    if name == "policy":
        return "name" in above and above["name"] != below.get("name", DEFAULT_POLICY)
    return name in _WHOLE_VALUES


ENVIRONMENT_PREFIX = "SPECCTL_"
_NOT_KEYS = {"SPECCTL_PROFILE", "SPECCTL_DEBUG", "SPECCTL_API_KEY"}
PAIR_POLICY = "cost-optimal"
"""The policy of a pair without a profile. It has no threshold to tune, and drafts almost nothing if drafting does not
pay.
"""
MODEL_FLAGS = {"target.model": "--target", "draft.model": "--draft"}  # The flags that name a model, by key


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Values of variables such as ``SPECCTL_SAMPLING__TEMPERATURE=0.7``; a double underscore separates tables.

    Raises ProfileError where one variable sets a value and another a table.
    """
    return _layer(
        (_key(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")), parse_value(text), f"environment {name}")
        for name, text in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _NOT_KEYS
    )


def set_layer(overrides: Sequence[str], place: str = "--set") -> Layer:
    """Values of ``--set KEY=VALUE`` in the order given; later ones win. ``place`` is their source, for messages.

    Raises ProfileError where a text is not KEY=VALUE, and where one sets a value and another a table.
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

    A lookup fits every target: without a target or a profile in the environment, it is used with `EMBEDDED`.
    """
    alone = flags.get("draft.model") == LOOKUP and not environ.get("SPECCTL_PROFILE")
    if flags.get("target.model") is None and not alone:
        return None
    return " ".join(f"{flag} {flags[key]}" for key, flag in MODEL_FLAGS.items() if flags.get(key) is not None)


def pair_layer(flags: Mapping[str, Any]) -> Layer:
    """A profile's values, besides the models, for the pair of ``--target`` and ``--draft``."""
    draft = flags.get("draft.model")
    table: dict[str, Any] = {} if draft is None else {"draft": {"policy": pair_policy(draft)}}
    if flags.get("target.model") is None:
        table["target"] = {"model": f"{EMBEDDED}target"}
    if str(flags.get("target.model") or EMBEDDED).startswith(EMBEDDED):
        table["prompt"] = {"chat": False}  # as in the profiles of the embedded models, which are trained on stories
    return Layer(table, lambda _: "default")


def pair_policy(draft: str) -> dict[str, Any]:
    """The policy of a draft of this name by default."""
    return LOOKUP_POLICY if draft == LOOKUP else {"name": PAIR_POLICY}


def flag_layer(flags: Mapping[str, Any]) -> Layer:
    """Values of command-line flags by dotted key; None means that the flag was not given."""
    given = {name: value for name, value in flags.items() if value is not None}
    words = {name: MODEL_FLAGS.get(name) or f"--{name.rpartition('.')[2].replace('_', '-')}" for name in given}
    return _layer((_key(name.split(".")), value, f"flag {words[name]}") for name, value in given.items())


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


def replaced_models(files: Layers, merged: Layers) -> list[Key]:
    """The tables whose model an override replaces: ``files`` has the profile's files only, ``merged`` also the
    overrides.
    """
    now = dict(_models(merged.table))
    return [key for key, table in _models(files.table) if key in now and now[key]["model"] != table["model"]]


def drop_template(before: Layers, merged: Layers) -> None:
    """Drop the chat template setting of a replaced target, so that the default rule applies again.

    A setting for one embedded model is valid for all of them.
    """
    key = ("prompt", "chat")
    if ("target",) not in replaced_models(before, merged):
        return
    family = all(layers.table["target"]["model"].startswith(EMBEDDED) for layers in (before, merged))
    if not family and before.origins.get(key) == merged.origins.get(key):
        merged.drop(key)


def outdated(files: Layers, merged: Layers) -> list[str]:
    """A sentence about each value in the files for a replaced model; for the arguments see `replaced_models`."""
    replaced = replaced_models(files, merged)
    old = dict(_models(files.table))
    sentences = []
    for key in replaced:
        dropped = [name for name in OF_ONE_MODEL if old[key].get(name) and (*key, name) not in merged.origins]
        if dropped:
            said = " and ".join(f"{dotted((*key, name))} = {shown(old[key][name])}" for name in dropped)
            models = f"{old[key]['model']}, which {merged.origin((*key, 'model'))} replaces"
            sentences.append(f"{files.origin((*key, dropped[0]))}: left out {said}: meant for {models}")
    if replaced:
        pair = " with ".join(table["model"] for table in old.values())
        sentences += [
            f"{files.origin(policy)}: the settings of {dotted(policy)} were chosen for {pair}; "
            "`specctl calibrate` finds those of this pair"
            for policy in _kept_settings(files, merged)
        ]
    return sentences


def _models(table: Mapping[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The tables that name a model: the target's, then each draft's from the top down."""
    key: Key = ("target",)
    found = table.get("target")
    while isinstance(found, dict):
        if isinstance(found.get("model"), str):  # other values are reported when the profile is checked
            yield key, found
        found = table.get("draft") if key == ("target",) else found.get("draft")
        key = ("draft",) if key == ("target",) else (*key, "draft")


def _kept_settings(files: Layers, merged: Layers) -> Iterator[Key]:
    """The policy tables with a setting that still comes from a file."""
    for key, _ in _models(merged.table):
        policy = (*key, "policy")
        settings = [other for other in files.origins if other[:-1] == policy and other[-1] != "name"]
        if any(files.origins[setting] == merged.origins.get(setting) for setting in settings):
            yield policy


BY_DEFAULT = "default"  # The origin of a value that was not given
APART = {"schema_version", "description", "draft", "provenance"}
"""The keys in which several profiles of a run may differ."""


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A checked profile and where its values came from."""

    name: str  # the name or path that was requested; the flags of a pair without a profile
    source: Path | None  # the profile file; None for a pair without a profile
    profile: Profile  # the checked values
    # by dotted key: ``file:line``, ``environment NAME``, ``--set``, ``flag --NAME`` or ``default``
    origins: dict[str, str]
    # sentences about values in the files that were meant for a model that an override replaces
    outdated: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()  # the profile file and those it extends
    notes: tuple[str, ...] = ()  # notices about the files' locations

    def unused(self, first: Profile) -> list[str]:
        """The dotted keys of its non-default values that the deciding profile overrides."""
        own, used = (profile.model_dump(exclude=APART) for profile in (self.profile, first))
        differing = (dotted(key) for key in _leaves(own) if _at(own, key) != _at(used, key))
        return [key for key in differing if self.origins.get(key, BY_DEFAULT) != BY_DEFAULT]

    def under(self, first: Profile, flag: str) -> "ResolvedProfile":
        """The profile with the values of ``first``, except its own drafts and policies; ``flag`` named ``first``."""
        own, used = (profile.model_dump(exclude=APART) for profile in (self.profile, first))
        others = {dotted(key): f"flag {flag}" for key in _leaves(used) if _at(own, key) != _at(used, key)}
        profile = first.model_copy(update={key: getattr(self.profile, key) for key in APART})
        return replace(self, profile=profile, origins={**self.origins, **others})


@dataclass(frozen=True, slots=True)
class _Found:
    """A profile's file; ``by_itself`` if it was found by name and is not the user's or the program's own."""

    document: Document
    by_itself: bool
    shadows: Path | None


def resolve(
    name: str | None = None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    trust_remote_code: bool = False,
) -> ResolvedProfile:
    """Find a profile, apply the overrides and check the result.

    Flags win over ``--set``, ``--set`` over the environment, and the environment over the file. If an override names
    another model, the file's keys about the old checkpoint are dropped. Values of ``--set`` or the environment about a
    flag's model stay.

    Args:
        name: a name or a path. By default flags that name a target, or a lookup alone, are the whole pair; without them
            it is the value of ``SPECCTL_PROFILE``, else the packaged profile ``embedded``.
        overrides: ``KEY=VALUE`` texts of ``--set``.
        flags: values by dotted key; None means not given. A value may be a table, such as ``parse_policy`` returns.
        environ: environment variables; those that start with ``SPECCTL_`` are overrides.
        trust_remote_code: let a profile that was found in ./profiles run a checkpoint's own code.

    Raises:
        ProfileError: the profile cannot be found or read, or has mistakes, which are all listed; or it was found in
            ./profiles, sets ``trust_remote_code``, and is not trusted.
    """
    layers = Layers()
    source: Path | None = None
    chain: list[_Found] = []
    pair = None if name else pair_name(flags, environ)
    if pair is not None:
        layers.lay(pair_layer(flags))
        name = pair
    else:
        source = chosen(name, environ)
        name = name or environ.get("SPECCTL_PROFILE") or _default(flags)
        chain = list(_chain(source, is_path(name), environ))
    for document in (found.document for found in reversed(chain)):
        layers.drop(("provenance",))  # describes one file only, not those that extend it
        table = {key: value for key, value in document.table.items() if key != "extends"}
        below = layers.copy()
        layers.lay(Layer(table, document.place))
        drop_template(below, layers)
    files = layers.copy()
    models = {key: flags.get(key) for key in MODEL_FLAGS}
    others = {key: value for key, value in flags.items() if key not in models}
    above = [flag_layer(models), environment_layer(environ), set_layer(overrides), flag_layer(others)]
    for layer in above:
        layers.lay(layer)
        for key, model in models.items():  # only another model drops this call's keys about a model
            if model is not None and _at(layers.table, tuple(key.split("."))) != model:
                layers.lay(flag_layer({key: model}))
    if replaced_models(files, layers):
        layers.drop(("provenance",))  # describes another pair
        drop_template(files, layers)
    left_out = outdated(files, layers)
    if pair is not None and _undrafted(layers.table.get("draft")):
        layers.drop(("draft",))  # the same as --target alone
    place = name if source is None else display(source)
    try:
        profile = validate(layers.table, lambda key: layers.origin(key) or place, f"profile '{name}'")
    except ProfileError as error:
        alone = pair is not None and flags.get("draft.model") is None and "draft" in layers.table
        raise ProfileError(error.message, "Add --draft MODEL." if alone else "\n".join(left_out)) from error
    origins = {dotted(key): layers.origins.get(key, BY_DEFAULT) for key in _leaves(profile.model_dump())}
    if not trust_remote_code:
        _require_trust(layers, above, chain)
    notes = tuple(
        f"{display(found.document.path)} is used instead of {display(found.shadows)}"
        for found in chain
        if found.shadows is not None
    )
    paths = tuple(found.document.path for found in chain)
    return ResolvedProfile(name, source, profile, origins, tuple(left_out), paths, notes)


def _undrafted(draft: Any) -> bool:
    """Whether a draft's table disables drafting: no model, and the policy ``none``."""
    policy = draft.get("policy") if isinstance(draft, dict) and set(draft) == {"policy"} else None
    return isinstance(policy, dict) and policy.get("name") == NONE.policy


def _default(flags: Mapping[str, Any]) -> str:
    """The profile used without a name; raises ProfileError for a draft without a target."""
    if flags.get("draft.model") is not None:
        raise ProfileError("--draft names a draft without a target", "Add --target MODEL, or --profile NAME.")
    return DEFAULT_PROFILE


def changed(profile: Profile, override: str, place: str) -> Profile:
    """The profile with one ``KEY=VALUE`` laid over it; ``place`` is its source, for messages. Raises ProfileError."""
    layers = Layers()
    for layer in (Layer(profile.model_dump(), lambda _: "profile"), set_layer([override], place)):
        layers.lay(layer)
    return validate(layers.table, lambda key: layers.origin(key) or place, place)


def parse_policy(text: str, place: str = "--policy") -> dict[str, Any]:
    """A policy table from ``NAME[:KEY=VALUE,...]``, such as ``svip:threshold=0.4,max_draft=20``.

    ``place`` is the source of the text, for messages. Raises ProfileError for another form, and for a wrong policy or
    setting.
    """
    try:
        policy = policy_table(text)
    except ValueError as error:
        raise ProfileError(f"{place} {text}: {error}", "For example: svip:threshold=0.4") from error
    check_policy(policy, f"{place} {text}")
    return policy


def _require_trust(layers: Layers, overrides: Sequence[Layer], chain: Sequence[_Found]) -> None:
    """Reject a profile from ./profiles, found by name, that would run a checkpoint's own code."""
    stranger = next((found.document for found in chain if found.by_itself), None)
    model: Key = ("target",)
    while stranger is not None and _at(layers.table, model) is not None:
        key = (*model, "trust_remote_code")
        if _at(layers.table, key) is True and not any(_at(layer.table, key) is True for layer in overrides):
            raise ProfileError(
                f"{layers.origin(key)}: {dotted(key)} = true would run code that comes with "
                f"{shown(_at(layers.table, (*model, 'model')))}, and {display(stranger.path)} was found in ./{HERE} by "
                "its name alone",
                "If you trust both, add --trust-remote-code, or name the profile by its path.",
            )
        model = ("draft",) if model == ("target",) else (*model, "draft")


def _at(table: Mapping[str, Any], key: Key) -> Any:
    value: Any = table
    for part in key:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _chain(source: Path, by_hand: bool, environ: Mapping[str, str]) -> Iterator[_Found]:
    """A profile file, the file that it extends, and so on."""
    seen: list[Path] = []
    path: Path | None = source
    by_itself = False
    while path is not None:
        seen.append(path.resolve())
        by_itself = not owned(path, environ) and not by_hand and (by_itself or found_here(path, environ))
        document = read(path)
        yield _Found(document, by_itself, None if by_hand else shadowed(path, environ))
        by_hand = not by_itself and is_path(str(document.table.get("extends")))
        path = _parent(document, seen, environ)


def _parent(document: Document, seen: list[Path], environ: Mapping[str, str]) -> Path | None:
    name = document.table.get("extends")
    if name is None:
        return None
    place = f"{document.place(('extends',))}: extends"
    if not isinstance(name, str):
        raise ProfileError(f"{place}: must be the name or path of one profile")
    try:
        parent = find(name, environ, extended_by=document.path)
    except ProfileError as error:
        raise ProfileError(f"{place}: {brief(error.message, 1000)}") from error
    if parent.resolve() in seen:
        circle = [*seen[seen.index(parent.resolve()) :], parent]
        raise ProfileError(f"{place}: profiles extend each other in a circle: {' -> '.join(p.stem for p in circle)}")
    return parent


def _leaves(table: dict[str, Any], at: Key = ()) -> Iterator[Key]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*at, name))
        else:
            yield (*at, name)
