"""The settings that a calibration compares: the profile's own, the candidates, and others for comparison."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from specctl.calibration.ascent import Space
from specctl.calibration.grids import Grid, grid, level_grids, with_predictors
from specctl.errors import UsageError
from specctl.models.loading.model import loading_order, model_tables
from specctl.models.loading.pair_members import find_head
from specctl.models.predictors.predictor_checkpoint import CONFIG, KIND_SIGNALS, locate_predictor
from specctl.policies import NONE, POLICIES, SIGNALS, TRAINED_SIGNALS, Setting, Signal
from specctl.profile.schema import DraftTable, Profile
from specctl.profile.validation import require_models
from specctl.replay.play import require_recordable
from specctl.replay.trace_files import TraceHeader

UNTUNED = "cost-optimal"
"""The policy that needs no calibration, so a calibrated setting has to be faster than it."""


@dataclass(frozen=True, slots=True)
class ComparedSettings:
    """The settings that compete, of one draft or of all drafts of a hierarchy.

    Attributes:
        old: the profile's own setting.
        candidates: settings that may be chosen; all are replayed.
        also_ranked: settings that are ranked too, but not chosen.
        space: for a hierarchy, the settings of each level, whose combinations are too many to replay all.
        untuned: the policy that needs no calibration, with its defaults, which is run live beside the chosen setting.
        at_least: a length of drafts that traces shall hold, whatever the settings draft.
    """

    old: Setting
    candidates: list[Setting]
    also_ranked: list[Setting]
    space: Space | None
    untuned: Setting | None = None
    at_least: int = 0

    @property
    def depth(self) -> int:
        """The longest draft at any level."""
        levels = (one for level in (self.space.fine if self.space is not None else ()) for one in level)
        settings = (self.old, *self.candidates, *self.also_ranked, *levels)
        return max(self.at_least, *(one.longest_draft for one in settings))

    def most(self, old: Setting | None) -> int:
        """An upper bound of the number of settings that a search replays.

        Args:
            old: the profile's own setting; None if it cannot be replayed.
        """
        certain = len(settings_replayed(self.candidates, old, self.also_ranked))
        return certain + (self.space.most if self.space is not None else 0)


def compared_settings(
    draft: DraftTable,
    policy: str | None,
    kind: Grid,
    heads: Sequence[str],
    recorded: Set[str],
    computed: Mapping[str, Signal],
) -> ComparedSettings:
    """The settings to compare for a profile and the options of a calibration.

    Args:
        draft: the profile's draft table; its head is the first of ``heads`` if these are given.
        policy: name of the policy whose settings are candidates, or ``all``; or one name for each level, separated by
            commas. None means the policy that reads ``heads`` if these are given, else the profile's own policies.
        kind: the grid of settings.
        heads: heads of a single draft to choose among.
        recorded: the signals that a trace contains, or can contain.
        computed: by the name of each head of the drafts and of ``heads`` the signal that it computes.

    Raises:
        UsageError: there is no such policy, the numbers of policies and drafts differ, a policy needs a head and
            the draft has none of its kind, heads of two kinds are given and no policy, or drafts are trees or go
            on in parallel.
    """
    if draft.tree is not None:
        raise UsageError("drafts that are trees cannot be replayed", "calibrate the chain: --set draft.tree=0")
    if draft.parallel:
        raise UsageError(
            "no policy stops a draft in parallel, so there is none to choose",
            "calibrate drafting in turns: --set draft.parallel=false",
        )
    choices = {name: computed[name] for name in heads}
    names = _policies(policy or (_reader(choices) if heads else None), draft)
    made = [set(choices.values()) or {computed[level.head]} if level.head else set() for level in draft.levels]
    known = [recorded - (TRAINED_SIGNALS - trained) for trained in made]
    # What a draft head predicts of its next token is known where it drafts: at the lowest level.
    known[:-1] = [signals - {"next_accept_prob"} for signals in known[:-1]]
    own = draft.setting.at(1)
    old = next(iter(with_predictors([own], choices)), own)
    _require_known([[one] for one in old.levels], known)
    chained = partial(_in_chain, draft)
    (untuned,) = chained([Setting(UNTUNED)])
    also_ranked = chained([] if names == ["all"] else grid("constant", kind, known[0]))
    if len(names) == 1 or names[0] == "none":
        candidates = chained(grid(names[0], kind, known[0]))
        _require_known([candidates], known)
        return ComparedSettings(old, with_predictors(candidates, choices), also_ranked, None, untuned)
    first, *lower = level_grids(names, kind, known)
    fine = [chained(first), *lower]
    _require_known(fine, known)
    # The combinations of all policies on a fine grid would be too many.
    first, *lower = level_grids(names, "paper", known) if "all" in names and kind == "dense" else fine
    coarse = [chained(first), *lower]
    return ComparedSettings(old, [], also_ranked, Space(coarse, fine), untuned)


def _in_chain(draft: DraftTable, settings: Iterable[Setting]) -> list[Setting]:
    """Settings of a draft, where it is in a chain with a lookup those of the chain."""
    return [
        replace(one, lookup=True, earlier=draft.earlier) if draft.lookup and one.drafts else one for one in settings
    ]


def settings_replayed(
    candidates: Iterable[Setting], old: Setting | None, also_ranked: Iterable[Setting] = ()
) -> list[Setting]:
    """The settings that `search` replays in any case, each once."""
    return list(dict.fromkeys([NONE, *candidates, *([old] if old is not None else []), *also_ranked]))


def recordable(profile: Profile) -> frozenset[Signal]:
    """The signals that a trace with the profile's models can contain, if its draft has an acceptance head.

    Told from the files, before a model is loaded.

    Raises:
        ModelError: a draft cannot be found.
        UsageError: a draft is a lookup, or a draft head below another draft.
    """
    if profile.draft is not None:
        require_models(profile.draft.levels, "calibrate", "compare policies of a lookup with specctl bench")
    tables = loading_order(model_tables(profile))
    heads = [
        find_head(key, table, verifier) for (key, table), verifier in pairwise(tables) if isinstance(table, DraftTable)
    ]
    require_recordable(len(heads), any(heads))
    foreseeing = any(head is not None and head.foresees for head in heads)
    return frozenset(SIGNALS) - (frozenset() if foreseeing else {"next_accept_prob"})


def computed_by(draft: DraftTable, heads: Iterable[str], header: TraceHeader | None) -> dict[str, Signal]:
    """The signal that each head computes, by its name.

    Args:
        draft: whose heads are meant, at every level.
        heads: further heads.
        header: of the trace that is searched, which knows its DISCO heads; None to ask the heads' files.

    Raises:
        ModelError: a head cannot be found.
    """
    names = dict.fromkeys([*heads, *(level.head for level in draft.levels if level.head is not None)])
    if header is None:
        return {name: KIND_SIGNALS[locate_predictor(name).kind] for name in names}
    disco = {name for level in header.disco for name in level}
    return {name: "own_accept_prob" if name in disco else "accept_prob" for name in names}


def _reader(choices: Mapping[str, Signal]) -> str:
    """The policy that reads the heads to choose among."""
    signals = set(choices.values())
    if len(signals) > 1:
        raise UsageError("--head names heads of two kinds", "choose one of their policies with --policy, or all")
    return next(name for name, policy in POLICIES.items() if policy.reads == signals)


def heads_in(given: Iterable[str]) -> list[str]:
    """The heads in ``given``, each once; a folder of heads, as a sweep writes it, is replaced by its heads.

    Raises:
        UsageError: a folder contains no head.
    """
    found: list[str] = []
    for name in (name.rstrip("/") or name for name in given):
        inside = sorted(str(config.parent) for config in Path(name).glob(f"*/{CONFIG}"))
        if Path(name).is_dir() and not (Path(name) / CONFIG).exists():
            if not inside:
                raise UsageError(f"{name} holds no head", "name a folder that specctl train-head has written")
            found += inside
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def heads_among(given: Sequence[str], draft: DraftTable) -> list[str]:
    """The heads to choose among, the profile's own first; empty if ``given`` is empty.

    Raises:
        UsageError: there is more than one draft.
    """
    if given and draft.draft is not None:
        raise UsageError("--head is for one draft, and the profile has several", "name each one's head in the profile")
    own = [draft.head] if given and draft.head is not None else []
    return list(dict.fromkeys([*own, *given]))


def _policies(policy: str | None, draft: DraftTable) -> list[str]:
    """The name of the policy whose settings are wanted, for each level."""
    levels = draft.levels
    if policy is None:
        return [level.policy.name for level in levels]
    names = [name.strip() for name in policy.split(",")]
    if len(names) not in (1, len(levels)):
        drafts = "1 draft" if len(levels) == 1 else f"{len(levels)} drafts"
        raise UsageError(
            f"--policy names {len(names)} policies for {drafts}", "name one policy for all drafts, or one for each"
        )
    return names * (len(levels) // len(names))


def _require_known(options: Sequence[Sequence[Setting]], known: Sequence[Set[str]]) -> None:
    """Check that every setting reads known signals only.

    Args:
        options: the settings of each level.
        known: the signals known at each level.

    Raises:
        UsageError: a setting needs a prediction that is not made at its level.
    """
    levels = zip(options, known, strict=False)
    policy = next((one.policy for level, signals in levels for one in level if not one.signals <= signals), None)
    if policy == "confidence":
        raise UsageError(
            f"{policy} reads what a draft head predicts of its next token, and this draft predicts nothing",
            "draft with a DSpark head that has a confidence head, or choose another policy",
        )
    if policy is not None:
        kind = " that `specctl train-head --kind disco` made" if policy == "disco" else " that predicts acceptance"
        raise UsageError(
            f"{policy} needs a head{kind}",
            "name one with --set draft.head=PATH; if the trace was recorded without it, record a new trace",
        )
