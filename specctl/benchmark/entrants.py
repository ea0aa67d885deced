"""Who runs in a benchmark: draft tables as labelled entrants, and the models they need between them."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from specctl.benchmark.results import BASELINE, Entrant, Level, short_name
from specctl.errors import UsageError
from specctl.policies import POLICIES
from specctl.profile.schema import DraftTable, ModelTable
from specctl.profile.wording import did_you_mean

ModelKey = tuple[str, int]


def field_of(contenders: Iterable[DraftTable], peers: Iterable[str]) -> tuple[list[Entrant], list[DraftTable]]:
    """The baseline, then every contender once, then the peers; with the draft models to load for them.

    Args:
        contenders: a draft table each, with the policies of all its levels.
        peers: names of transformers' own settings.

    Raises:
        UsageError: there is no such peer, or a policy needs a head and there is none or more than one.
    """
    working = [table for contender in contenders if (table := contender.at_work()) is not None]
    drafts = _drafts(working)
    places = {key: place for place, key in enumerate(drafts)}
    chains = {tuple(model_keys(table)) for table in working if table.draft is not None}
    found: dict[str, Entrant] = {BASELINE: Entrant(BASELINE, "policy", "none")}
    for table in working:
        labels, levels_of_it = [], []
        for key, level in zip(model_keys(table), table.levels, strict=True):
            stopped = policy_entrant({"name": level.policy.name, **level.policy.settings()})
            once = level.pre_verify == "once"
            labels.append(stopped.label + "(once)" * once)
            levels_of_it.append(Level(places[key], stopped.name, stopped.settings, once))
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


def policy_entrant(table: Mapping[str, Any]) -> Entrant:
    """A policy table with its name as an entrant; its label tells the settings that are not the defaults."""
    name = table["name"]
    policy = POLICIES[name](**{key: value for key, value in table.items() if key != "name"})
    settings: dict[str, Any] = {}
    changed = []
    for field in fields(policy):  # type: ignore[arg-type]
        if field.init:
            settings[field.name] = getattr(policy, field.name)
            if settings[field.name] != field.default:
                changed.append(f"{field.name}={settings[field.name]}")
    return Entrant(f"{name}:{','.join(changed)}" if changed else name, "policy", name, settings)


def _drafts(tables: Iterable[DraftTable]) -> dict[ModelKey, DraftTable]:
    """The models of all levels, each with its head where one of the policies reads what that foretells."""
    drafts: dict[ModelKey, DraftTable] = {}
    heads: dict[ModelKey, set[str]] = {}
    judging: dict[ModelKey, str] = {}
    for table in tables:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            drafts.setdefault(key, level.model_copy(update={"head": None}))
            heads.setdefault(key, set()).update({level.head} if level.head is not None else ())
            if "accept_prob" in level.policy.build().signals:
                judging[key] = level.policy.name
    for key, name in judging.items():
        known = sorted(heads[key])
        if not known:
            raise UsageError(f"{name} needs a head that foretells acceptance", "name it with --set draft.head=PATH")
        if len(known) > 1:
            raise UsageError(f"the profiles name different heads ({', '.join(known)})", "benchmark one head at a time")
        drafts[key] = drafts[key].model_copy(update={"head": known[0]})
    return drafts


def model_keys(table: DraftTable) -> list[ModelKey]:
    """What tells the models of a draft table and of those below it from others, from the top.

    A model that stands at two levels is two, for each needs a cache of its own.
    """
    keys: list[ModelKey] = []
    for level in table.levels:
        described = level.model_dump_json(include=set(ModelTable.model_fields))
        keys.append((described, sum(described == other for other, _ in keys)))
    return keys
