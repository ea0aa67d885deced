"""Makes the labelled candidates of a benchmark from draft tables, and lists the models to load for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from specctl.errors import UsageError
from specctl.observing.results import BASELINE, Candidate
from specctl.peers.engines import ASSISTED, Launch, PeerSetting
from specctl.policies import NONE, Setting, nested
from specctl.policies.setting import TreeSize
from specctl.profile.resolution import pair_policy
from specctl.profile.schema import DraftTable, ModelTable, PolicyTable, Profile
from specctl.profile.validation import require_offered
from specctl.profile.wording import distinct_name, short_names

ModelKey = tuple[str, int]
LOADED = (*ModelTable.model_fields, "vocabulary", "tokens", "token_counts")
"""The keys of a draft's table that decide how its model is loaded."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates of a benchmark, and the models to load for them."""

    all: list[Candidate]  # the baseline, then every setting once, then the peers
    drafts: list[DraftTable]  # the draft models' tables, without heads
    names: list[str]  # names of these drafts, all different
    heads: list[list[str]]  # for each draft, the names of the heads used by its policies
    # for each draft, the index of the draft it first drafts for, None for the target; a draft head reads that model's
    # states
    above: list[int | None]
    # by label, how to start the peers that run in separate processes
    launches: Mapping[str, Launch] = field(default_factory=dict)

    @property
    def tree(self) -> TreeSize | None:
        """The tree size of the first candidate that drafts trees; None if all draft chains."""
        trees = (one.setting.tree for one in self.all if one.setting is not None and one.setting.tree is not None)
        return next(trees, None)


def candidates_of(
    competing_drafts: Iterable[DraftTable],
    peers: Iterable[PeerSetting] = (),
    launches: Mapping[str, Launch] = MappingProxyType({}),
) -> Candidates:
    """The candidates made from draft tables and peers.

    Args:
        competing_drafts: one draft table per candidate, with the policies of all its levels.
        peers: other implementations, with their settings.
        launches: by label, how to start the peers that run in separate processes.

    Raises:
        ProfileError: a policy needs signals that a lookup does not have.
        UsageError: a policy needs a head and no head, or more than one, is named.
    """
    drafting = [table for draft in competing_drafts if (table := draft.at_work()) is not None]
    for table in drafting:
        for level in table.levels:
            if level.is_lookup:
                require_offered(level.policy.setting)
    drafts: dict[ModelKey, DraftTable] = {}
    above: dict[ModelKey, ModelKey | None] = {}
    for table in drafting:
        keys = model_keys(table)
        for key, upper, level in zip(keys, [None, *keys], table.levels, strict=False):
            drafts.setdefault(key, level.model_copy(update={"head": None}))
            above.setdefault(key, upper)
    heads = _heads(drafting)
    indices = {key: index for index, key in enumerate(drafts)}
    names = _names(drafts)
    short = dict(zip(drafts, short_names(names), strict=True))
    chains = {tuple(model_keys(table)) for table in drafting if table.draft is not None}
    candidates: dict[str, Candidate] = {BASELINE: Candidate(BASELINE)}
    for table in drafting:
        keys = model_keys(table)
        setting = _with_heads(table, [heads[key] for key in keys])
        used = tuple(indices[key] for key in keys)
        # Labels omit model names if every candidate uses all drafts in the same order.
        ambiguous = len(used) != len(drafts) or len(chains) > 1
        label = setting.label_on([short[key] for key in keys] if ambiguous else ())
        candidates.setdefault(label, Candidate(label, setting, used))
    for peer in peers:
        values = peer.values
        if peer.label in launches:
            converted = launches[peer.label].converted
            values = {**values, "weights": converted.weights, "cache": converted.cache}
        candidates.setdefault(peer.label, Candidate(peer.label, None, peer=peer.peer, peer_settings=values))
    return Candidates(
        list(candidates.values()),
        list(drafts.values()),
        names,
        [heads[key] for key in drafts],
        [None if (upper := above[key]) is None else indices[upper] for key in drafts],
        launches,
    )


def with_counterpart(candidates: Candidates) -> Candidates:
    """Add a candidate if transformers' own loop is a peer: our loop on the eager engine, which transformers uses too.

    It copies the first candidate that drafts with the first draft alone and in turns. Without it, a faster engine would
    look like a better algorithm.
    """
    first = next((index for index, one in enumerate(candidates.all) if one.peer in ASSISTED), None)
    ours = next(
        (one for one in candidates.all if one.setting not in (None, NONE) and one.drafts == (0,) and not one.parallel),
        None,
    )
    if first is None or ours is None:
        return candidates
    return replace(candidates, all=[*candidates.all[:first], ours.eagerly, *candidates.all[first:]])


def competing_drafts(
    profiles: Sequence[Profile],
    policies: Sequence[PolicyTable],
    trees: Sequence[int] = (),
) -> list[DraftTable]:
    """The draft tables to compare on the first profile's target, each with the policies of all its levels.

    Each single draft but a lookup is followed by copies that draft trees of these numbers of tokens.

    Raises:
        UsageError: the profiles have different targets, or a policy has no draft to stop.
    """
    found = []
    for table in _stopped(profiles, policies):
        found.append(table)
        if not table.is_lookup and table.draft is None:
            found += [table.model_copy(update={"tree": each, "lookup": False, "earlier": 0}) for each in trees]
    return found


def _stopped(profiles: Sequence[Profile], policies: Sequence[PolicyTable]) -> list[DraftTable]:
    """The draft tables to compare, as their profiles and ``policies`` describe them.

    Every profile contributes its own drafts and policies. A policy in ``policies`` replaces the policy of the first
    profile's first draft; the drafts below stay, and a draft in parallel takes turns with the target unless the
    policy drafts blocks of one length. Without ``policies``, a profile is compared with policies that need no
    calibration on the same drafts: a single draft with constant, heuristic and cost-optimal, a hierarchy with constant
    and cost-optimal on each of its drafts alone, which shows whether a third model pays.
    """
    require_one_target(profiles)
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
        in_turns = draft.model_copy(update={"parallel": None})
        simple = [PolicyTable(name="constant"), PolicyTable(name="heuristic"), _uncalibrated(draft)]
        return [*own, *(_stopped_by(in_turns, policy) for policy in simple)]
    alone = [level.model_copy(update={"draft": None, "pre_verify": None}) for level in draft.levels]
    return [
        *own,
        *(
            _stopped_by(level, policy)
            for level in alone
            for policy in (PolicyTable(name="constant"), _uncalibrated(level))
        ),
    ]


def _uncalibrated(draft: DraftTable) -> PolicyTable:
    """The default policy of a draft."""
    return PolicyTable(**pair_policy(draft.model))


def require_one_target(profiles: Iterable[Profile]) -> None:
    """Raise a UsageError if profiles have different targets; ``dtype = "auto"`` is the dtype that another names."""
    tables = [profile.target for profile in profiles]
    dtypes = {table.dtype for table in tables if table.dtype != "auto"}
    targets = list(dict.fromkeys(_loaded_name(table, len(dtypes) > 1) for table in tables))
    if len(targets) > 1:
        raise UsageError(
            f"the profiles name different models as target ({', '.join(targets)})", "compare drafts of one target"
        )


def _stopped_by(table: DraftTable, policy: PolicyTable) -> DraftTable:
    parallel = table.parallel if policy.setting.fixed_length else None
    return table.model_copy(update={"policy": policy, "parallel": parallel})


def _with_heads(table: DraftTable, heads: Sequence[Sequence[str]]) -> Setting:
    """The table's setting; a level names its head if its policy reads one and its model has several heads."""
    levels = []
    for level, known in zip(table.levels, heads, strict=True):
        setting = level.own_setting
        if setting.needs_predictor and level.head is not None and len(known) > 1:
            setting = replace(setting, head=level.head, head_label=distinct_name(level.head, known))
        levels.append(setting)
    return nested(levels)


def _heads(tables: Iterable[DraftTable]) -> dict[ModelKey, list[str]]:
    """For each model, the heads used by its policies; a profile without a head uses the only head of the other
    profiles.
    """
    known: dict[ModelKey, list[str]] = {}
    used: dict[ModelKey, list[str | None]] = {}
    names: dict[ModelKey, str] = {}
    for table in tables:
        for key, level in zip(model_keys(table), table.levels, strict=True):
            known.setdefault(key, []).extend([level.head] if level.head is not None else [])
            if level.policy.setting.needs_predictor:
                used.setdefault(key, []).append(level.head)
                names.setdefault(key, level.policy.name)
    for key, heads in used.items():
        several = sorted(set(known[key]))
        if not several:
            raise UsageError(
                f"{names[key]} needs a head that predicts acceptance", "name one with --set draft.head=PATH"
            )
        if None in heads and len(several) > 1:
            raise UsageError(
                f"the profiles name different heads ({', '.join(several)}), and a policy needs a head that its profile "
                "does not name",
                "name one with head in its [draft] table",
            )
    return {key: list(dict.fromkeys(head or heads[0] for head in used.get(key, ()))) for key, heads in known.items()}


def _names(drafts: Mapping[ModelKey, DraftTable]) -> list[str]:
    """The drafts' names: the model, the size of a limited vocabulary, and the settings in which drafts of one model
    differ.
    """
    named = [
        (table, table.full_name if table.tokens is None else f"{table.full_name}-{table.tokens}")
        for table in drafts.values()
    ]
    found = []
    for table, name in named:
        alike = [other for other, its_name in named if its_name == name]
        for key in LOADED:
            value = getattr(table, key)
            if value is not None and any(getattr(other, key) != value for other in alike):
                name += f"-{value}" if isinstance(value, str) else f"-{key}={value}"
        found.append(name)
    return found


def _loaded_name(table: ModelTable, with_dtype: bool) -> str:
    """A model's name with every setting that makes it a different model."""
    revision = "" if table.revision is None else f" at {table.revision}"
    forms = [form for form in (table.quantize, table.dtype if with_dtype else None) if form is not None]
    return f"{table.full_name}{revision}{' in ' * bool(forms)}{', '.join(forms)}"


def model_keys(table: DraftTable) -> list[ModelKey]:
    """A key for each level's model in a draft table, from the top down; equal keys mean the same loaded model.

    A model used at two levels gets two keys, because each level needs its own cache.
    """
    keys: list[ModelKey] = []
    for level in table.levels:
        described = level.model if level.is_lookup else level.model_dump_json(include=set(LOADED))
        keys.append((described, sum(described == other for other, _ in keys)))
    return keys
