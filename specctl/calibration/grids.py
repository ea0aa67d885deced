"""The grids of settings that a calibration tries for each policy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.policies import NONE, POLICIES, Setting, Signal
from specctl.profile.wording import did_you_mean, distinct_name

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
    return list(dict.fromkeys(Setting.of({"name": policy, **values}) for values in points))


def with_predictors(candidates: Iterable[Setting], heads: Mapping[str, Signal]) -> list[Setting]:
    """For settings that read a head's predictions, one copy for each head that makes them; the others unchanged.

    Args:
        candidates: settings of one level.
        heads: by the name of each head the signal that it computes; empty where nothing is to choose.
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
        kind: of the grids.
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
        case "vllm-adaptive":  # it is a longest draft with a rule
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
    """``count`` points that fill the box of several settings evenly; every call yields the same points.

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
