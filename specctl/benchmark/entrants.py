"""Who runs in a benchmark: draft tables as labelled entrants, and the models they need between them."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from specctl.benchmark.results import BASELINE, Entrant, Level, short_name
from specctl.errors import UsageError
from specctl.profile.schema import DraftTable, ModelTable, PolicyTable
from specctl.profile.wording import did_you_mean

ModelKey = tuple[str, int]


def field_of(contenders: Iterable[DraftTable], peers: Iterable[str]) -> tuple[list[Entrant], list[ModelTable]]:
    """The baseline, then every contender once, then the peers; with the draft models to load for them.

    Args:
        contenders: a draft table each, with the policies of all its levels.
        peers: names of transformers' own settings.

    Raises:
        UsageError: there is no such peer.
    """
    working = [table for contender in contenders if (table := contender.at_work()) is not None]
    drafts: dict[ModelKey, ModelTable] = {}
    for table in working:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            drafts.setdefault(key, level)
    places = {key: place for place, key in enumerate(drafts)}
    chains = {tuple(model_keys(table)) for table in working if table.draft is not None}
    found: dict[str, Entrant] = {BASELINE: Entrant(BASELINE, "policy", "none")}
    for table in working:
        labels, levels_of_it = [], []
        for key, level in zip(model_keys(table), table.levels, strict=True):
            label, settings = _described(level.policy)
            once = level.pre_verify == "once"
            labels.append(label + "(once)" * once)
            levels_of_it.append(Level(places[key], level.policy.name, settings, once))
        used = [level.draft for level in levels_of_it]
        # A model goes without saying where there is no other to take, or all take part in one and the same order.
        if len(used) != len(drafts) or len(chains) > 1:
            labels = [f"{label}@{short_name(level.model)}" for label, level in zip(labels, table.levels, strict=True)]
        label = " < ".join(labels)
        top = levels_of_it[0]
        entrant = Entrant(label, "policy", top.policy, top.settings, () if used == [0] else tuple(levels_of_it))
        found.setdefault(label, entrant)
    if peers:
        from specctl.benchmark.peers import SETTINGS

        for peer in peers:
            if peer not in SETTINGS:
                raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, list(SETTINGS))}")
            found.setdefault(peer, Entrant(peer, "peer", peer, SETTINGS[peer]))
    return list(found.values()), list(drafts.values())


def _described(table: PolicyTable) -> tuple[str, dict[str, Any]]:
    """A policy's name with the settings that are not its defaults, and all its settings."""
    policy = table.build()
    settings: dict[str, Any] = {}
    changed = []
    for field in fields(policy):  # type: ignore[arg-type]
        if field.init:
            settings[field.name] = getattr(policy, field.name)
            if settings[field.name] != field.default:
                changed.append(f"{field.name}={settings[field.name]}")
    return f"{table.name}:{','.join(changed)}" if changed else table.name, settings


def model_keys(table: DraftTable) -> list[ModelKey]:
    """What tells the models of a draft table and of those below it from others, from the top.

    A model that stands at two levels is two, for each needs a cache of its own.
    """
    keys: list[ModelKey] = []
    for level in table.levels:
        described = level.model_dump_json(include=set(ModelTable.model_fields))
        keys.append((described, sum(described == other for other, _ in keys)))
    return keys
