"""Who runs in a benchmark: draft tables as labelled entrants, and the models they need between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specctl.errors import UsageError
from specctl.observing.entrant import Entrant
from specctl.observing.results import BASELINE
from specctl.policies import Setting, nested
from specctl.profile.model_names import distinct_name, short_name
from specctl.profile.schema import DraftTable, ModelTable, PolicyTable, Profile
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
    found: dict[str, Entrant] = {BASELINE: Entrant(BASELINE)}
    for table in working:
        keys = model_keys(table)
        setting = _with_heads(table, [heads[key] for key in keys])
        used = tuple(places[key] for key in keys)
        # A model's name is left out where it is unambiguous: one draft, or all of them in one and the same order.
        ambiguous = len(used) != len(drafts) or len(chains) > 1
        label = setting.label_on([short_name(level.model) for level in table.levels] if ambiguous else ())
        found.setdefault(label, Entrant(label, setting, used))
    if peers:
        from specctl.observing.peers import SETTINGS

        for peer in peers:
            if peer not in SETTINGS:
                raise UsageError(f"there is no peer '{peer}'{did_you_mean(peer, list(SETTINGS))}")
            found.setdefault(peer, Entrant(peer, None, peer=peer, peer_settings=SETTINGS[peer]))
    return Field(list(found.values()), list(drafts.values()), [heads[key] for key in drafts])


def contenders(profiles: Sequence[Profile], policies: Sequence[PolicyTable]) -> list[DraftTable]:
    """What competes on the first profile's target: a draft table each, with the policies of all its levels.

    Every profile brings its own drafts and policies. A policy given by itself replaces the first profile's own at the
    draft that the target verifies; the drafts below stay. Without such a policy, one profile is compared with simple
    policies on the same drafts: constant and heuristic for a draft alone, and for a hierarchy constant on each draft by
    itself, which shows whether a third model pays.

    Raises:
        UsageError: the profiles have different targets, or a policy has no draft to stop.
    """
    targets = list(dict.fromkeys(profile.target.model for profile in profiles))
    if len(targets) > 1:
        raise UsageError(
            f"the profiles name different models as target ({', '.join(targets)})", "benchmark one target at a time"
        )
    own = [profile.draft for profile in profiles if profile.draft is not None]
    draft = profiles[0].draft
    if draft is None:
        if policies:
            raise UsageError("--policy has no draft to stop", "name a profile with a draft first")
        return own
    if policies:
        return [*(own if len(profiles) > 1 else []), *(_stopped_by(draft, policy) for policy in policies)]
    if len(profiles) > 1 and any(model_keys(table) != model_keys(draft) for table in own):
        return own
    if draft.draft is None:
        return [*own, *(_stopped_by(draft, PolicyTable(name=name)) for name in ("constant", "heuristic"))]
    alone = [level.model_copy(update={"draft": None, "pre_verify": None}) for level in draft.levels]
    return [*own, *(_stopped_by(level, PolicyTable(name="constant")) for level in alone)]


def _stopped_by(table: DraftTable, policy: PolicyTable) -> DraftTable:
    return table.model_copy(update={"policy": policy})


def _with_heads(table: DraftTable, heads: Sequence[Sequence[str]]) -> Setting:
    """The table's setting; a level names its head where its model has several and its policy reads one."""
    levels = []
    for level, known in zip(table.levels, heads, strict=True):
        own = replace(level.policy.setting, once=level.pre_verify == "once")
        if own.needs_head and level.head is not None and len(known) > 1:
            own = replace(own, head=level.head, head_label=distinct_name(level.head, known))
        levels.append(own)
    return nested(levels)


def _heads(tables: Iterable[DraftTable]) -> dict[ModelKey, list[str]]:
    """For each model the heads that its policies read; a profile that names none takes the only one there is."""
    known: dict[ModelKey, list[str]] = {}
    judged: dict[ModelKey, list[str | None]] = {}
    names: dict[ModelKey, str] = {}
    for table in tables:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            known.setdefault(key, []).extend([level.head] if level.head is not None else [])
            if level.policy.setting.needs_head:
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
