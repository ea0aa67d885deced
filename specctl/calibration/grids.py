"""The settings worth trying for each policy."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.policies import POLICIES, Signal, StoppingPolicy
from specctl.profile.model_names import distinct_name
from specctl.profile.schema import DraftTable, PolicyTable
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
    """A policy with settings; those not named have their defaults.

    Attributes:
        once: in a hierarchy, whether the draft's block goes up after a single round of the draft below.
        below: how that draft is stopped; None for a draft that writes alone.
        head: which of the draft's heads it listens to, where there are several.
        head_name: what that is called beside the others.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    once: bool = False
    below: "Candidate | None" = None
    head: str | None = None
    head_name: str | None = field(default=None, compare=False)

    @property
    def levels(self) -> "tuple[Candidate, ...]":
        """This one, the one below it, and so on down."""
        return (self, *(self.below.levels if self.below is not None else ()))

    @property
    def label(self) -> str:
        return " < ".join(one._label + "(once)" * one.once for one in self.levels)

    @property
    def _label(self) -> str:
        settings = [*self.settings, *([("head", self.head_name or self.head)] if self.head is not None else [])]
        given = ",".join(f"{key}={_text(value)}" for key, value in settings)
        return f"{self.name}:{given}" if given else self.name

    @property
    def family(self) -> tuple[str, str | None]:
        """The names of its policies, and its head: what it has in common with others that differ in settings."""
        return " < ".join(one.name + "(once)" * one.once for one in self.levels), self.head

    @property
    def title(self) -> str:
        """The family for people to read."""
        names, head = self.family
        return names if head is None else f"{names} {self.head_name or head}"

    @property
    def table(self) -> dict[str, Any]:
        """As a profile's policy table says it, with ``pre_verify`` and the table below in a hierarchy."""
        table = {"name": self.name, **dict(self.settings)}
        if self.head is not None:
            table["head"] = self.head
        if self.below is None:
            return table
        return {**table, "pre_verify": _pre_verify(self.once), "draft": self.below.table}

    @property
    def whole_table(self) -> dict[str, Any]:
        """The policy's own table with every setting, defaults too: laid over another, it leaves nothing of that."""
        policy = self.build()
        names = (field.name for field in fields(policy) if field.init)  # type: ignore[arg-type]
        return {"name": self.name, **{name: getattr(policy, name) for name in names}}

    def draft_table(self, drafts: int) -> dict[str, Any]:
        """What a profile's ``[draft]`` has to say for it, every setting of so many drafts."""
        table: dict[str, Any] = {"policy": self.whole_table}
        if self.head is not None:
            table["head"] = str(Path(self.head).resolve()) if Path(self.head).exists() else self.head
        if drafts > 1:
            below = self.below or Candidate("none")
            table |= {"pre_verify": _pre_verify(self.once), "draft": below.draft_table(drafts - 1)}
        return table

    def build(self) -> StoppingPolicy:
        """The policy of the first level."""
        return POLICIES[self.name](**dict(self.settings))

    def build_levels(self) -> list[StoppingPolicy]:
        return [one.build() for one in self.levels]

    @property
    def signals(self) -> frozenset[Signal]:
        """What the first level reads."""
        return self.build().signals

    @property
    def longest_draft(self) -> int:
        """Of any level."""
        return max(max(getattr(policy, "max_draft", 0), policy.draft_limit()) for policy in self.build_levels())


def _pre_verify(once: bool) -> str:
    return "once" if once else "loop"


def nested(levels: Sequence[Candidate]) -> Candidate:
    """Candidates of single levels, from the top down, as one; it ends above a level that never drafts."""
    top, *lower = levels
    if not lower or not lower[0].build().drafts or not top.build().drafts:
        return replace(top, once=False, below=None)
    return replace(top, below=nested(lower))


def candidate_of(draft: DraftTable) -> Candidate:
    """A profile's own setting, at every level."""
    levels = [
        replace(candidate({"name": level.policy.name, **level.policy.settings()}), once=level.pre_verify == "once")
        for level in draft.levels
    ]
    return nested(levels)


def stopped(draft: DraftTable, by: Candidate) -> DraftTable:
    """A profile's drafts with another setting, the models below a draft that is to write alone left idle."""
    if draft.draft is None:
        head = {} if by.head is None else {"head": by.head}
        return draft.model_copy(update={"policy": PolicyTable(**by.whole_table), **head})
    below = stopped(draft.draft, by.below or Candidate("none"))
    changed = {"policy": PolicyTable(**by.whole_table), "pre_verify": _pre_verify(by.once), "draft": below}
    return draft.model_copy(update=changed)


def candidate(table: dict[str, Any]) -> Candidate:
    """From a policy table with its name; settings that say the default are left out."""
    name = table["name"]
    defaults = {field.name: field.default for field in fields(POLICIES[name]) if field.init}  # type: ignore[arg-type]
    # In the order of the policy's own fields, so that one setting is one candidate however it was written.
    given = ((key, table[key]) for key, default in defaults.items() if key in table and table[key] != default)
    return Candidate(name, tuple(given))


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


def with_heads(candidates: Iterable[Candidate], heads: Sequence[str | None]) -> list[Candidate]:
    """Every candidate that a head tells something with each of several heads in its place; the others as they are."""
    known = [head for head in heads if head is not None]
    return [
        replace(one, head=head, head_name=distinct_name(head, known)) if head is not None else one
        for one in candidates
        for head in (heads if "accept_prob" in one.signals else (None,))
    ]


def level_grids(policies: Sequence[str], kind: Grid, known: Sequence[Set[str]]) -> list[list[Candidate]]:
    """The candidates of each level of a hierarchy, from the top down.

    A level above another may go on until its policy stops or, as the paper's pre-verification does, hand its block up
    after one round of the draft below, with its length alone to choose; every level below the first may be left out,
    with those below it.

    Args:
        policies: a name, or ``all``, for each level.
        kind: of the grids.
        known: the signals that each level can read.
    """
    grids = [grid(policy, kind, signals) for policy, signals in zip(policies, known, strict=True)]
    once = [replace(one, once=True) for one in grid("constant", kind, frozenset())]
    drafting = [[one for one in some if one.name != "none"] for some in grids]
    options = [[*some, *once] for some in drafting[:-1]] + drafting[-1:]
    return options[:1] + [[*some, Candidate("none")] for some in options[1:]]


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
