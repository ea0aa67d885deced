"""Who runs in a benchmark: draft tables as labelled entrants, and the models they need between them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from specctl.errors import UsageError
from specctl.observing.results import BASELINE, Entrant, Level
from specctl.policies import POLICIES
from specctl.profile.model_names import distinct_name, short_name
from specctl.profile.schema import DraftTable, ModelTable
from specctl.profile.wording import did_you_mean

ModelKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Field:
    """Who runs, and what has to be loaded for them.

    Attributes:
        entrants: the baseline, then every contender once, then the peers.
        drafts: the tables of the draft models, without heads.
        heads: for each of them the heads that its policies read.
    """

    entrants: list[Entrant]
    drafts: list[DraftTable]
    heads: list[list[str]]


def field_of(contenders: Iterable[DraftTable], peers: Iterable[str]) -> Field:
    """The entrants that draft tables make.

    Args:
        contenders: a draft table each, with the policies of all its levels.
        peers: names of transformers' own settings.

    Raises:
        UsageError: there is no such peer, or a policy needs a head and it is not told which.
    """
    working = [table for contender in contenders if (table := contender.at_work()) is not None]
    drafts: dict[ModelKey, DraftTable] = {}
    for table in working:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            drafts.setdefault(key, level.model_copy(update={"head": None}))
    heads = _heads(working)
    places = {key: place for place, key in enumerate(drafts)}
    chains = {tuple(model_keys(table)) for table in working if table.draft is not None}
    found: dict[str, Entrant] = {BASELINE: Entrant(BASELINE, "policy", "none")}
    for table in working:
        labels, levels_of_it = [], []
        for key, level in zip(model_keys(table), table.levels, strict=True):
            stopped = policy_entrant({"name": level.policy.name, **level.policy.settings()})
            once = level.pre_verify == "once"
            head = level.head if len(heads[key]) > 1 and _judges(level) else None
            named = (
                "" if head is None else f"{',' if ':' in stopped.label else ':'}head={distinct_name(head, heads[key])}"
            )
            labels.append(stopped.label + named + "(once)" * once)
            levels_of_it.append(Level(places[key], stopped.name, stopped.settings, once, head))
        used = [level.draft for level in levels_of_it]
        # A model goes without saying where there is no other to take, or all take part in one and the same order.
        if len(used) != len(drafts) or len(chains) > 1:
            labels = [f"{label}@{short_name(level.model)}" for label, level in zip(labels, table.levels, strict=True)]
        label = " < ".join(labels)
        top = levels_of_it[0]
        plain = used == [0] and top.head is None
        entrant = Entrant(label, "policy", top.policy, top.settings, () if plain else tuple(levels_of_it))
        found.setdefault(label, entrant)
    if peers:
        from specctl.benchmark.peers import SETTINGS

        for peer in peers:
            if peer not in SETTINGS:
                raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, list(SETTINGS))}")
            found.setdefault(peer, Entrant(peer, "peer", peer, SETTINGS[peer]))
    return Field(list(found.values()), list(drafts.values()), [heads[key] for key in drafts])


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


def _judges(level: DraftTable) -> bool:
    """Whether its policy reads what a head foretells."""
    return "accept_prob" in level.policy.build().signals


def _heads(tables: Iterable[DraftTable]) -> dict[ModelKey, list[str]]:
    """For each model the heads that its policies read; a profile that names none takes the only one there is."""
    known: dict[ModelKey, list[str]] = {}
    judged: dict[ModelKey, list[str | None]] = {}
    names: dict[ModelKey, str] = {}
    for table in tables:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            known.setdefault(key, []).extend([level.head] if level.head is not None else [])
            if _judges(level):
                judged.setdefault(key, []).append(level.head)
                names.setdefault(key, level.policy.name)
    for key, heads in judged.items():
        several = sorted(set(known[key]))
        if not several:
            raise UsageError(
                f"{names[key]} needs a head that foretells acceptance", "name it with --set draft.head=PATH"
            )
        if None in heads and len(several) > 1:
            raise UsageError(
                f"the profiles name different heads ({', '.join(several)}) and one that needs a head names none",
                "name it with head in [draft]",
            )
    return {key: list(dict.fromkeys(head or heads[0] for head in judged.get(key, ()))) for key, heads in known.items()}


def model_keys(table: DraftTable) -> list[ModelKey]:
    """What tells the models of a draft table and of those below it from others, from the top.

    A model that stands at two levels is two, for each needs a cache of its own.
    """
    keys: list[ModelKey] = []
    for level in table.levels:
        described = level.model_dump_json(include=set(ModelTable.model_fields))
        keys.append((described, sum(described == other for other, _ in keys)))
    return keys
