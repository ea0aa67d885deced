"""From a profile name and overrides to a checked profile, with the origin of every value."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specctl.errors import ProfileError
from specctl.policies import NONE
from specctl.policies.policy_text import policy_table
from specctl.profile.discovery import (
    DEFAULT_PROFILE,
    HERE,
    chosen,
    display,
    find,
    found_here,
    is_path,
    owned,
    shadowed,
)
from specctl.profile.layers import Layer, Layers
from specctl.profile.overrides import MODEL_FLAGS, environment_layer, flag_layer, pair_layer, pair_name, set_layer
from specctl.profile.profile_file import Document, read
from specctl.profile.replaced_models import drop_template, outdated, replaced_models
from specctl.profile.schema import Profile
from specctl.profile.validation import check_policy, validate
from specctl.profile.wording import Key, brief, dotted, shown

BY_DEFAULT = "default"
"""The origin of a value that nobody gave."""
APART = {"schema_version", "description", "draft", "provenance"}
"""What each of several profiles in a run has for itself."""


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A checked profile and where its values came from.

    Attributes:
        name: the name or path that was requested; the flags of a pair without a profile.
        source: the profile file; None for a pair without a profile.
        profile: the checked values.
        origins: for each dotted key where its value came from: ``file:line``, ``environment NAME``, ``--set``,
            ``flag --NAME`` or ``default``.
        outdated: sentences about what the files say of a model that an override replaces, and no longer applies.
        files: the profile file and those it extends.
        notes: what a user should know about where the files were found.
    """

    name: str
    source: Path | None
    profile: Profile
    origins: dict[str, str]
    outdated: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    def unused(self, first: Profile) -> list[str]:
        """The dotted keys of what it says, not by default, otherwise than the profile that decides for several."""
        own, used = (profile.model_dump(exclude=APART) for profile in (self.profile, first))
        differing = (dotted(key) for key in _leaves(own) if _at(own, key) != _at(used, key))
        return [key for key in differing if self.origins.get(key, BY_DEFAULT) != BY_DEFAULT]

    def under(self, first: Profile, flag: str) -> "ResolvedProfile":
        """The profile as it is in a run that another one decides: its drafts with their policies are its own.

        Args:
            first: the other one.
            flag: that named it: where the values come from that are others for that.
        """
        own, used = (profile.model_dump(exclude=APART) for profile in (self.profile, first))
        others = {dotted(key): f"flag {flag}" for key in _leaves(used) if _at(own, key) != _at(used, key)}
        profile = first.model_copy(update={key: getattr(self.profile, key) for key in APART})
        return replace(self, profile=profile, origins={**self.origins, **others})


@dataclass(frozen=True, slots=True)
class _Found:
    """A file of a profile; ``by_itself`` if nobody named its place and it is not the user's or the program's own."""

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

    Flags win over ``--set``, ``--set`` wins over the environment, and the environment wins over the file. Where an
    override names another model, what the file says about that checkpoint alone is left out; what ``--set`` or the
    environment say of the model that a flag names stays.

    Args:
        name: a name or a path. By default flags that name a target, or a lookup alone, are the whole pair; without them
            it is the value of ``SPECCTL_PROFILE``, else the packaged profile ``embedded``.
        overrides: ``KEY=VALUE`` texts of ``--set``.
        flags: values by dotted key; None means not given. A value may be a table, such as ``parse_policy`` returns.
        environ: environment variables; those that start with ``SPECCTL_`` are overrides.
        trust_remote_code: let a profile that was found in ./profiles run a checkpoint's own code.

    Raises:
        ProfileError: the profile cannot be found or read, or has mistakes, all of which are listed; or it was found in
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
        layers.drop(("provenance",))  # describes one file, not the files that extend it
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
        for key, model in models.items():  # only another model drops what this call says of one
            if model is not None and _at(layers.table, tuple(key.split("."))) != model:
                layers.lay(flag_layer({key: model}))
    if replaced_models(files, layers):
        layers.drop(("provenance",))  # describes another pair
        drop_template(files, layers)
    left_out = outdated(files, layers)
    if pair is not None and _undrafted(layers.table.get("draft")):
        layers.drop(("draft",))  # what --target alone is, said in another way
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
    """Whether a draft's table says that there is none: no model, and the policy ``none``."""
    policy = draft.get("policy") if isinstance(draft, dict) and set(draft) == {"policy"} else None
    return isinstance(policy, dict) and policy.get("name") == NONE.policy


def _default(flags: Mapping[str, Any]) -> str:
    """The profile used without a name; raises ProfileError for a draft that no target was named for."""
    if flags.get("draft.model") is not None:
        raise ProfileError("--draft names a draft without a target", "Add --target MODEL, or --profile NAME.")
    return DEFAULT_PROFILE


def changed(profile: Profile, override: str, place: str) -> Profile:
    """The profile with one ``KEY=VALUE`` laid over it; ``place`` is the text's source, for messages.

    Raises:
        ProfileError: the text has another form, or the value is wrong.
    """
    layers = Layers()
    for layer in (Layer(profile.model_dump(), lambda _: "profile"), set_layer([override], place)):
        layers.lay(layer)
    return validate(layers.table, lambda key: layers.origin(key) or place, place)


def parse_policy(text: str, place: str = "--policy") -> dict[str, Any]:
    """A policy table from ``NAME[:KEY=VALUE,...]``: the name and the given settings.

    Args:
        text: for example ``svip:threshold=0.4,max_draft=20``.
        place: the source of the text, for messages.

    Raises:
        ProfileError: the text has another form, or the policy or its settings are wrong.
    """
    try:
        policy = policy_table(text)
    except ValueError as error:
        raise ProfileError(f"{place} {text}: {error}", "For example: svip:threshold=0.4") from error
    check_policy(policy, f"{place} {text}")
    return policy


def _require_trust(layers: Layers, overrides: Sequence[Layer], chain: Sequence[_Found]) -> None:
    """Refuse to run a checkpoint's own code for a profile that was found in a folder that may be anyone's."""
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
