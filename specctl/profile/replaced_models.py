"""What a profile's files say about a model that an override replaces."""

from collections.abc import Iterator, Mapping
from typing import Any

from specctl.profile.known_names import EMBEDDED
from specctl.profile.layers import OF_ONE_MODEL, Layers
from specctl.profile.wording import Key, dotted, shown


def replaced_models(files: Layers, merged: Layers) -> list[Key]:
    """The tables whose model an override replaces.

    Args:
        files: the values of the profile's files alone.
        merged: the same values with the overrides on top.
    """
    now = dict(_models(merged.table))
    return [key for key, table in _models(files.table) if key in now and now[key]["model"] != table["model"]]


def drop_template(before: Layers, merged: Layers) -> None:
    """Forget what was said about the chat template of a target that a later layer replaces; the rule decides again.

    What is said of one embedded model is true of all.
    """
    key = ("prompt", "chat")
    if ("target",) not in replaced_models(before, merged):
        return
    family = all(layers.table["target"]["model"].startswith(EMBEDDED) for layers in (before, merged))
    if not family and before.origins.get(key) == merged.origins.get(key):
        merged.drop(key)


def outdated(files: Layers, merged: Layers) -> list[str]:
    """A sentence for each thing in the files that was meant for a replaced model; arguments as `replaced_models`."""
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
        if isinstance(found.get("model"), str):  # what else stands there is told when the profile is checked
            yield key, found
        found = table.get("draft") if key == ("target",) else found.get("draft")
        key = ("draft",) if key == ("target",) else (*key, "draft")


def _kept_settings(files: Layers, merged: Layers) -> Iterator[Key]:
    """The policy tables of which a setting still comes from a file."""
    for key, _ in _models(merged.table):
        policy = (*key, "policy")
        settings = [other for other in files.origins if other[:-1] == policy and other[-1] != "name"]
        if any(files.origins[setting] == merged.origins.get(setting) for setting in settings):
            yield policy
