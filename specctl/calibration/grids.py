"""The settings worth trying for each policy."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.policies import POLICIES, Signal, StoppingPolicy
from specctl.profile.wording import did_you_mean

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
    "cost-optimal",
    "specdec++",
)
"""Policies from the simplest to the most elaborate: by what they read and remember."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy with settings; those not named have their defaults."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        given = ",".join(f"{key}={_text(value)}" for key, value in self.settings)
        return f"{self.name}:{given}" if given else self.name

    @property
    def table(self) -> dict[str, Any]:
        """As a profile's policy table says it."""
        return {"name": self.name, **dict(self.settings)}

    @property
    def whole_table(self) -> dict[str, Any]:
        """The same with every setting, defaults too: laid over another table, it leaves nothing of that."""
        policy = self.build()
        names = (field.name for field in fields(policy) if field.init)  # type: ignore[arg-type]
        return {"name": self.name, **{name: getattr(policy, name) for name in names}}

    def build(self) -> StoppingPolicy:
        return POLICIES[self.name](**dict(self.settings))

    @property
    def signals(self) -> frozenset[Signal]:
        """What it reads."""
        return self.build().signals

    @property
    def longest_draft(self) -> int:
        policy = self.build()
        return max(getattr(policy, "max_draft", 0), policy.draft_limit())


def candidate(table: dict[str, Any]) -> Candidate:
    """From a policy table with its name; settings that say the default are left out."""
    name = table["name"]
    defaults = {field.name: field.default for field in fields(POLICIES[name]) if field.init}  # type: ignore[arg-type]
    given = {key: value for key, value in table.items() if key != "name" and defaults[key] != value}
    return Candidate(name, tuple(given.items()))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def grid(policy: str, kind: Grid, known: Set[str]) -> list[Candidate]:
    """The candidates of one policy, or of ``all`` that read only signals known.

    Raises:
        UsageError: there is no such policy.
    """
    if policy == "all":
        found = (one for name in POLICIES for one in grid(name, kind, known))
        return [one for one in found if one.signals <= known]
    if policy not in POLICIES:
        raise UsageError(f"there is no policy '{policy}'{did_you_mean(policy, [*POLICIES, 'all'])}")
    settings = _paper(policy) if kind == "paper" else _dense(policy)
    return list(dict.fromkeys(candidate({"name": policy, **one}) for one in settings))


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
    return [{}]


def _dense(policy: str) -> list[dict[str, Any]]:
    """Fine steps over all that matters, the papers' own values among them."""
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
            return _paper(policy) + [{**point, "max_draft": cap} for cap in caps for point in _sobol(knobs, 64)]
        case "self-verify":
            return [{"max_draft": cap} for cap in range(2, 21)]
        case "specdec++":
            return _crossed(threshold=_steps(0.05, 0.95, 0.025), max_draft=(7, 10, 20), min_draft=(1, 2))
    return [{}]


def _steps(low: float, high: float, step: float) -> tuple[float, ...]:
    return tuple(round(low + n * step, 6) for n in range(round((high - low) / step) + 1))


def _crossed(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def _sobol(knobs: dict[str, tuple[float, float]], count: int) -> Iterator[dict[str, float]]:
    """Points that fill the box of several knobs evenly, the same ones at every call."""
    from torch.quasirandom import SobolEngine

    points = SobolEngine(len(knobs), scramble=True, seed=0).draw(count).tolist()  # type: ignore[no-untyped-call]
    for point in points:
        yield {
            name: round(low + share * (high - low), 3)
            for (name, (low, high)), share in zip(knobs.items(), point, strict=True)
        }
