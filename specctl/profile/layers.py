"""Merging values of several sources; the source of each value is kept."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from specctl.profile.base_tables import GRAMMARS
from specctl.profile.model_table import unchained
from specctl.profile.schema import DEFAULT_POLICY, LOOKUP
from specctl.profile.wording import Key

_WHOLE_VALUES = {"device", "max_memory", "provenance", "batch_policies", "json_schema", "logit_bias"}
"""Tables that are replaced as a whole, because for example two halves of different device maps make no valid map."""
OF_ONE_MODEL = ("head", "revision", "adapter", "trust_remote_code")
"""Keys that say something about one checkpoint: they go when a later layer names another model."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one source; ``place`` returns where in the source a key is set, for messages."""

    table: dict[str, Any]
    place: Callable[[Key], str]


@dataclass(slots=True)
class Layers:
    """The merged values of all layers so far; later layers win.

    Attributes:
        table: the merged values.
        origins: where each key came from, tables included.
    """

    table: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def lay(self, layer: Layer) -> None:
        """Merge a layer on top, table by table.

        A policy table that names another policy replaces the earlier policy table. A table that names another model
        drops what was said about the earlier one: its kind, its head, its revision, its adapter and the permission to
        run its code.
        """
        self._merge(self.table, _with_lookups(layer.table), (), layer.place)

    def copy(self) -> "Layers":
        """The values so far, which later layers leave as they are."""
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
        """Where a key came from, else the nearest table that contains it."""
        return next((self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins), None)

    def _merge(self, below: dict[str, Any], above: dict[str, Any], at: Key, place: Callable[[Key], str]) -> None:
        gone: list[str] = []
        if "model" in above and "lookup" not in above:  # a model that is named alone drafts alone
            gone += ("lookup", "earlier")
        if above.get("model", below.get("model")) != below.get("model"):
            gone += ("kind", *OF_ONE_MODEL)
        if any(name in above for name in GRAMMARS):  # a text follows one of them
            gone += (name for name in GRAMMARS if name not in above)
        if _names_a_policy(above) and "batch_policies" not in above:  # what fits several texts was chosen with another
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
    """The table with the model name of each draft that is a lookup by its kind, so that it replaces a model below; and
    of each chain with a lookup."""
    draft = table.get("draft")
    if not isinstance(draft, dict):
        return table
    named = {"model": LOOKUP} if draft.get("kind") == "lookup" else {}
    return {**table, "draft": {**named, **_with_lookups(unchained(draft))}}


def _names_a_policy(draft: dict[str, Any]) -> bool:
    """Whether a draft table says which policy stops it; a table of settings alone changes the one below."""
    policy = draft.get("policy")
    return "name" in policy if isinstance(policy, dict) else policy is not None


def _replaces(name: str, above: dict[str, Any], below: dict[str, Any]) -> bool:
    if name == "policy":
        return "name" in above and above["name"] != below.get("name", DEFAULT_POLICY)
    return name in _WHOLE_VALUES
