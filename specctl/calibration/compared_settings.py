"""The settings that a calibration compares: the profile's own, the candidates, and others for comparison."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product, zip_longest
from pathlib import Path
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.models.loading.model import loading_order
from specctl.models.loading.pair_members import find_head
from specctl.models.predictors.predictor_checkpoint import CONFIG, KIND_SIGNALS, locate_predictor
from specctl.policies import LOOKUP_SIGNALS, NONE, POLICIES, SIGNALS, TRAINED_SIGNALS, Setting, Signal, nested
from specctl.profile.schema import FILTERS, LOOKUP_POLICY, DraftTable, Profile, SamplingTable
from specctl.profile.validation import unoffered
from specctl.profile.wording import did_you_mean, distinct_name
from specctl.prompts.suites import Suite
from specctl.replay.play import require_recordable
from specctl.replay.trace_files import TraceHeader, require_same_request

Grid = Literal["paper", "dense"]
LONGEST = 40
SIMPLEST = (
    "none",
    "constant",
    "heuristic",
    "svip",
    "max-confidence",
    "self-verify",
    "adaedl",
    "vllm-adaptive",
    "cost-optimal",
    "bandit",
    "confidence",
    "disco",
    "specdec++",
)
"""Policies from the simplest to the most elaborate, by the signals they read and the state they keep."""


def grid(policy: str, kind: Grid, known: Set[str]) -> list[Setting]:
    """The settings of one policy; for ``all``, the settings of every policy that reads known signals only.

    Raises:
        UsageError: there is no such policy.
    """
    if policy == "all":
        settings = (setting for name in POLICIES for setting in grid(name, kind, known))
        return [setting for setting in settings if setting.signals <= known]
    if policy not in POLICIES:
        unknown = f"there is no policy '{policy}'{did_you_mean(policy, [*POLICIES, 'all'])}"
        raise UsageError(POLICIES.broken.get(policy, unknown))
    points = _paper(policy) if kind == "paper" else _dense(policy)
    if policy == LOOKUP_POLICY["name"] and known == LOOKUP_SIGNALS:
        points = [{**LOOKUP_POLICY, **values} for values in points]
    return list(dict.fromkeys(Setting.of({"name": policy, **values}) for values in points))


def with_predictors(candidates: Iterable[Setting], heads: Mapping[str, Signal]) -> list[Setting]:
    """Copy each setting that reads a head's predictions once for each suitable head; other settings stay as they are.

    Args:
        candidates: settings of one level.
        heads: by head name, the signal that the head computes; empty if there is nothing to choose.
    """
    return [
        replace(one, head=head, head_label=distinct_name(head, list(heads))) if head is not None else one
        for one in candidates
        for head in (_heads_of(one, heads) if one.needs_predictor and heads else (None,))
    ]


def _heads_of(setting: Setting, heads: Mapping[str, Signal]) -> list[str]:
    return [name for name, signal in heads.items() if signal in setting.signals]


def level_grids(policies: Sequence[str], kind: Grid, known: Sequence[Set[str]]) -> list[list[Setting]]:
    """The settings of each level of a hierarchy, from the top down.

    A level above another either collects inner rounds until its policy stops, or ends its block after one inner round,
    as the paper's pre-verification does, so that only the block's length can be chosen. Every level below the first may
    be left out together with the levels below it.

    Args:
        policies: for each level, a name or ``all``.
        kind: the kind of grid.
        known: for each level, the signals that it can read.
    """
    grids = [grid(policy, kind, signals) for policy, signals in zip(policies, known, strict=True)]
    once = [replace(one, once=True) for one in grid("constant", kind, frozenset())]
    drafting = [[one for one in level if one.drafts] for level in grids]
    options = [[*level, *once] for level in drafting[:-1]] + drafting[-1:]
    return options[:1] + [[*level, NONE] for level in options[1:]]


def _paper(policy: str) -> list[dict[str, Any]]:
    """The values that the papers themselves try."""
    tenths = [round(0.1 * n, 1) for n in range(1, 10)]
    match policy:
        case "constant":
            return [{"draft_length": length} for length in range(2, 15)]
        case "svip":
            return [{"threshold": h} for h in (0.2, 0.3, 0.4, 0.5)]
        case "adaedl" | "max-confidence":
            return [{"threshold": value} for value in tenths]
        case "specdec++":
            return [{"threshold": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)]
        case "disco":  # its paper tunes the threshold and names no values
            return [{"threshold": value} for value in tenths]
        case "confidence":
            return [{"threshold": h} for h in (0.2, 0.4, 0.6, 0.8)]
        case "vllm-adaptive":  # it is a maximum draft length with a rule
            return [{"max_draft": cap} for cap in (4, 6, 8, 12)]
    return _crossed(**POLICIES[policy].grid)


def _dense(policy: str) -> list[dict[str, Any]]:
    """Fine steps over the useful range of every value, including the papers' own values."""
    caps = (5, 7, 10, 16, LONGEST)
    match policy:
        case "constant":
            return [{"draft_length": length} for length in range(1, 25)]
        case "heuristic":
            return _crossed(draft_length=(2, 5, 8), max_draft=(6, *caps))
        case "svip":
            return _crossed(threshold=_steps(0.02, 1.2, 0.02), max_draft=caps)
        case "max-confidence":
            fixed = _crossed(threshold=_steps(0.02, 0.98, 0.02), max_draft=caps, adapt=(False,))
            return fixed + _crossed(threshold=_steps(0.1, 0.9, 0.1), max_draft=caps)
        case "adaedl":
            knobs = {"threshold": (0.0, 1.0), "gamma": (0.05, 0.5), "eps": (0.0, 0.1), "alpha": (0.3, 1.0)}
            return _paper(policy) + [{**point, "max_draft": cap} for cap in caps for point in _spread(knobs, 64)]
        case "self-verify":
            return [{"max_draft": cap} for cap in range(2, 21)]
        case "confidence":
            return _crossed(threshold=_steps(0.05, 0.95, 0.05), max_draft=caps)
        case "vllm-adaptive":
            return _crossed(max_draft=range(2, 17), token_ratio=(0.01, 0.02, 0.05, 0.1, 0.2))
        case "disco":
            return _crossed(threshold=_steps(0.05, 0.95, 0.025), max_draft=(7, 10, 20, LONGEST))
        case "specdec++":
            return _crossed(threshold=_steps(0.05, 0.95, 0.025), max_draft=(7, 10, 20), min_draft=(1, 2))
    return _crossed(**POLICIES[policy].grid)


def _steps(low: float, high: float, step: float) -> tuple[float, ...]:
    return tuple(round(low + n * step, 6) for n in range(round((high - low) / step) + 1))


def _crossed(**values: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def _spread(knobs: dict[str, tuple[float, float]], count: int) -> Iterator[dict[str, float]]:
    """``count`` points spread evenly over the box of several settings; every call yields the same points.

    The n-th has the fractional part of n g^-i as its i-th coordinate, with g^(d+1) = g + 1 in d dimensions: Roberts'
    generalised golden ratio (2018, "The unreasonable effectiveness of quasirandom sequences").
    """
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (len(knobs) + 1))
    for number in range(1, count + 1):
        yield {
            name: round(low + (0.5 + number / ratio**place) % 1 * (high - low), 3)
            for place, (name, (low, high)) in enumerate(knobs.items(), start=1)
        }


UNTUNED = "cost-optimal"  # The policy that needs no calibration: a calibrated setting has to beat it


SWEEPS = 2
"""How often every level is searched. The best setting of a level hardly depends on the exact settings of the others."""


Options = Sequence[Sequence[Setting]]  # The candidate settings of each level, from the top down


@dataclass(frozen=True, slots=True)
class Space:
    """The settings to search at each level."""

    coarse: Options  # searched first
    # searched second, limited to the policies found by the coarse search; the same object as ``coarse`` if there
    # is not a second search
    fine: Options

    @property
    def most(self) -> int:
        """An upper bound of the number of settings that `explore` evaluates."""
        coarse = sum(len(level) for options in _by_mode(self.coarse) for level in options)
        fine = 0
        if self.fine is not self.coarse:
            fine = sum(
                max(Counter(one.policy for one in level).values())
                for options in _by_mode(self.fine)
                for level in options
            )
        return SWEEPS * (coarse + fine)


@dataclass(frozen=True, slots=True)
class ComparedSettings:
    """The settings that a calibration compares, of one draft or of all drafts of a hierarchy."""

    old: Setting  # the profile's own setting
    candidates: list[Setting]  # settings that may be chosen; all are replayed
    also_ranked: list[Setting]  # settings that are ranked but cannot be chosen
    space: Space | None  # for a hierarchy, the settings of each level; their combinations are too many to replay all
    # the policy that needs no calibration, with its defaults; it is run live next to the chosen setting
    untuned: Setting | None = None
    at_least: int = 0  # the draft length that traces must cover

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
            "drafting in parallel uses no stopping policy, so there is none to choose",
            "calibrate drafting in turns: --set draft.parallel=false",
        )
    choices = {name: computed[name] for name in heads}
    names = _policies(policy or (_reader(choices) if heads else None), draft)
    made = [set(choices.values()) or {computed[level.head]} if level.head else set() for level in draft.levels]
    known = [recorded - (TRAINED_SIGNALS - trained) for trained in made]
    # A draft head's prediction of its next token is known only at its own, lowest level.
    known[:-1] = [signals - {"next_accept_prob"} for signals in known[:-1]]
    if draft.levels[-1].is_lookup:
        known[-1] = LOOKUP_SIGNALS
    own = draft.setting.at(1)
    old = next(iter(with_predictors([own], choices)), own)
    _require_known([[one] for one in old.levels], known)
    chained = partial(_in_chain, draft)
    (untuned,) = chained([Setting.of(LOOKUP_POLICY) if draft.is_lookup else Setting(UNTUNED)])
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
    """Settings of a draft, or of its chain with a lookup if it has one."""
    return [
        replace(one, lookup=True, earlier=draft.earlier) if draft.lookup and one.drafts else one for one in settings
    ]


def settings_replayed(
    candidates: Iterable[Setting], old: Setting | None, also_ranked: Iterable[Setting] = ()
) -> list[Setting]:
    """The settings that `search` always replays, each once."""
    return list(dict.fromkeys([NONE, *candidates, *([old] if old is not None else []), *also_ranked]))


def recordable(profile: Profile) -> frozenset[Signal]:
    """The signals that a trace of the profile's models can contain if its draft has an acceptance head.

    Determined from files, before a model is loaded.

    Raises:
        ModelError: a draft cannot be found.
        UsageError: a draft is a draft head below another draft.
    """
    tables = loading_order(profile.models)
    heads = [
        find_head(key, table, verifier)
        for (key, table), verifier in pairwise(tables)
        if isinstance(table, DraftTable) and not table.is_lookup
    ]
    require_recordable(len(heads), any(heads))
    foreseeing = any(head is not None and head.foresees for head in heads)
    return frozenset(SIGNALS) - (frozenset() if foreseeing else {"next_accept_prob"})


def computed_by(draft: DraftTable, heads: Iterable[str], header: TraceHeader | None) -> dict[str, Signal]:
    """The signal that each head computes, by head name.

    Args:
        draft: with its heads at every level.
        heads: further heads.
        header: of the trace that is searched, which lists its DISCO heads; None to read the heads' files.

    Raises:
        ModelError: a head cannot be found.
    """
    names = dict.fromkeys([*heads, *(level.head for level in draft.levels if level.head is not None)])
    if header is None:
        return {name: KIND_SIGNALS[locate_predictor(name).kind] for name in names}
    disco = {name for level in header.disco for name in level}
    return {name: "own_accept_prob" if name in disco else "accept_prob" for name in names}


def _reader(choices: Mapping[str, Signal]) -> str:
    """The policy that reads the given heads."""
    signals = set(choices.values())
    if len(signals) > 1:
        raise UsageError("--head names heads of two kinds", "choose one of their policies with --policy, or all")
    return next(name for name, policy in POLICIES.items() if policy.reads == signals)


def heads_in(given: Iterable[str]) -> list[str]:
    """The heads in ``given``, each once; a sweep's folder stands for the heads in it.

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
    """The candidate heads, the profile's own first; empty if ``given`` is empty.

    Raises:
        UsageError: there is more than one draft.
    """
    if given and draft.is_lookup:
        raise UsageError("--head needs a draft model, and a lookup has no states", "leave --head out")
    if given and draft.draft is not None:
        raise UsageError("--head works with one draft, and the profile has several", "name their heads in the profile")
    own = [draft.head] if given and draft.head is not None else []
    return list(dict.fromkeys([*own, *given]))


def _policies(policy: str | None, draft: DraftTable) -> list[str]:
    """For each level, the name of the policy whose settings are candidates."""
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
    wrong = next(
        ((one.policy, signals) for level, signals in levels for one in level if not one.signals <= signals), None
    )
    if wrong is None:
        return
    policy, signals = wrong
    if signals == LOOKUP_SIGNALS:
        raise UsageError(unoffered(policy))
    if policy == "confidence":
        raise UsageError(
            f"{policy} reads a draft head's prediction of its next token, which this draft does not make",
            "draft with a DSpark head that has a confidence head, or choose another policy",
        )
    kind = " that `specctl train-head --kind disco` made" if policy == "disco" else " that predicts acceptance"
    raise UsageError(
        f"{policy} needs a head{kind}",
        "name one with --set draft.head=PATH; if the trace was recorded without it, record a new trace",
    )


_ENGINE_KEYS = ("engine", "compile", "deterministic", "threads")
_WRITES_KEYS = ("tokens", "token_counts")
_SAMPLING_KEYS = ("temperature", *FILTERS)


def require_fits(
    header: TraceHeader,
    profile: Profile,
    asked: ComparedSettings,
    heads: Sequence[str],
    prompts: Suite | None,
    path: Path,
) -> None:
    """Check that an earlier trace fits a calibration: with prompts it continues the trace, else it only searches.

    Raises:
        UsageError: it does not fit; the message names the difference.
    """
    if prompts is not None:
        require_same_request(header, profile, prompts, asked.depth, heads, path)
    else:
        require_same_pair(header, profile, heads, path)
        require_depth(header, asked, path)


def require_same_pair(header: TraceHeader, profile: Profile, heads: Sequence[str], path: Path) -> None:
    """Check that a trace was recorded with the models, the engine and the sampling of a profile.

    Raises:
        UsageError: it was recorded with others; the message names the difference.
    """
    recorded, asked = header.provenance["profile"], profile.model_dump(mode="json", exclude_none=True)
    for (role, was), (_, now) in zip_longest(_models(recorded), _models(asked), fillvalue=("draft", {})):
        if was.get("model") != now.get("model"):
            raise UsageError(
                f"{path} was recorded with {was.get('model')} as {role}, not {now.get('model')}",
                "name the profile that it was recorded with",
            )
        for key in _WRITES_KEYS:
            if was.get(key) != now.get(key):
                raise UsageError(f"{path} was recorded with another value of draft.{key}", "record a new trace")
        predicts = not TRAINED_SIGNALS.isdisjoint(header.signals) and now.get("head") is not None
        if predicts and now["head"] not in (was.get("head"), *header.heads):
            raise UsageError(
                f"{path} was recorded with {was.get('head')} as the draft's head, not {now['head']}",
                "record a new trace",
            )
    if missing := [name for name in heads if name not in (recorded["draft"].get("head"), *header.heads)]:
        raise UsageError(f"{path} was recorded without the head {missing[0]}", "record a new trace")
    for key in _ENGINE_KEYS:
        if recorded[key] != asked[key]:
            raise UsageError(
                f"{path} was recorded with another {key}", "its measured costs do not apply: record a new trace"
            )
    for key in _SAMPLING_KEYS:
        if header.provenance["sampling"].get(key, SamplingTable.model_fields[key].default) != asked["sampling"][key]:
            raise UsageError(f"{path} was recorded with another {key}", "record a new trace")


def require_depth(header: TraceHeader, asked: ComparedSettings, path: Path) -> None:
    """Check that a trace covers the longest draft of the compared settings.

    Raises:
        UsageError: the trace was recorded for shorter drafts.
    """
    if asked.depth > header.depth:
        raise UsageError(
            f"{path} was recorded for drafts of {header.depth} tokens, and these settings draft {asked.depth}",
            "record a new trace, or search other policies or --grid paper",
        )


def _models(profile: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The role and table of each model of a profile, from the target down."""
    tables = [("target", profile["target"])]
    below = profile.get("draft")
    while below is not None:
        tables.append(("draft", below))
        below = below.get("draft")
    return tables


def explore(space: Space, start: Setting, speed: Callable[[Setting], float]) -> None:
    """Coordinate search: call ``speed`` for settings, moving towards the fastest.

    Every combination of pre-verification modes is searched separately, because settings that suit a block of one inner
    round need not suit a loop.

    Args:
        space: the settings to search.
        start: the initial setting of each level that it has.
        speed: returns the speed of a setting, the higher the better; called repeatedly for the same setting.
    """
    for options in _by_mode(space.coarse):
        held = [_nearest(start, level, settings) for level, settings in enumerate(options)]
        best = _ascend(options, held, speed)
        if space.fine is not space.coarse:
            fine = [
                [one for one in settings if (one.policy, one.once) == (chosen.policy, chosen.once)]
                for settings, chosen in zip(space.fine, best, strict=True)
            ]
            _ascend(fine, best, speed)


def _by_mode(options: Options) -> list[list[list[Setting]]]:
    """Split the options by pre-verification mode: one entry for each combination of the levels' modes."""
    modes = product(*(sorted({one.once for one in some}) for some in options))
    return [
        [[one for one in some if one.once == once] for some, once in zip(options, mode, strict=True)] for mode in modes
    ]


def _nearest(start: Setting, level: int, options: Sequence[Setting]) -> Setting:
    """The start's setting at a level if it is among the options, else the middle option."""
    alone = [replace(setting, below=None) for setting in start.levels[level : level + 1]]
    return next((setting for setting in alone if setting in options), options[len(options) // 2])


def _ascend(
    options: Sequence[Sequence[Setting]], held: Sequence[Setting], speed: Callable[[Setting], float]
) -> list[Setting]:
    held = list(held)
    for _ in range(SWEEPS):
        previous = list(held)
        for level, settings in enumerate(options):
            held[level] = max(settings, key=lambda one: speed(nested([*held[:level], one, *held[level + 1 :]])))
        if held == previous:
            break
    return held
