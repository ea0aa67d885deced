"""A setting: which policy stops each draft, and with what values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from specctl.policies.base import Signal, StoppingPolicy
from specctl.policies.registry import POLICIES


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with its values and, in a hierarchy, the setting of the draft below.

    Profiles, flags, benchmarks, calibration and replay all describe a policy by this type. Two settings are equal where
    they draft alike; `of` brings a policy table into that form.

    Attributes:
        policy: a name in `POLICIES`.
        values: (name, value) of what differs from the policy's defaults, in the order of the policy's own fields.
        once: in a hierarchy, whether the block is offered after a single round of the draft below; the policy then
            only limits its length.
        below: how the draft below is stopped; None for a draft that writes alone.
        head: path or name of the acceptance head that the policy reads, where the draft has several; None for the only
            one.
        head_label: what tables call that head.
    """

    policy: str
    values: tuple[tuple[str, Any], ...] = ()
    once: bool = False
    below: "Setting | None" = None
    head: str | None = None
    head_label: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Setting":
        """From a policy table: its ``name`` and any of its settings.

        A policy that this version does not know, as an older results file may name one, keeps all that is given.
        """
        name = table["name"]
        given = {key: value for key, value in table.items() if key != "name"}
        defaults = _defaults(name) if name in POLICIES else {}
        known = [(key, given.pop(key)) for key in defaults if key in given]
        return cls(name, (*(pair for pair in known if pair[1] != defaults[pair[0]]), *given.items()))

    @property
    def levels(self) -> "tuple[Setting, ...]":
        """This setting, the one below it, and so on down."""
        return (self, *(self.below.levels if self.below is not None else ()))

    @property
    def label(self) -> str:
        """Policies with their values, from the top down: ``constant:draft_length=4(once) < svip``."""
        return self.label_on(())

    def label_on(self, models: Sequence[str]) -> str:
        """`label` with the name of each level's model, where names are given: ``svip@mid < constant@draft``."""
        names = [f"@{model}" for model in models] or [""] * len(self.levels)
        return " < ".join(level._label + name for level, name in zip(self.levels, names, strict=True))

    @property
    def _label(self) -> str:
        head = self.head_label or self.head
        pairs = [*self.values, *([("head", head)] if head is not None else [])]
        values = ",".join(f"{key}={_text(value)}" for key, value in pairs)
        return f"{self.policy}{':' * bool(values)}{values}{'(once)' * self.once}"

    @property
    def family(self) -> str:
        """What it has in common with settings that differ in values alone: policies, heads, once or loop."""
        return " < ".join(level._family for level in self.levels)

    @property
    def _family(self) -> str:
        head = self.head_label or self.head
        return self.policy + "(once)" * self.once + (f" {head}" if head is not None else "")

    @property
    def drafts(self) -> bool:
        """Whether its first policy ever drafts."""
        return POLICIES[self.policy].drafts

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that its first policy reads."""
        return POLICIES[self.policy].signals_of(dict(self.values))

    @property
    def needs_head(self) -> bool:
        """Whether its first policy reads an acceptance head's predictions."""
        return "accept_prob" in self.signals

    @property
    def all_values(self) -> dict[str, Any]:
        """Every setting of the first policy, defaults included."""
        defaults = _defaults(self.policy) if self.policy in POLICIES else {}
        return {**defaults, **dict(self.values)}

    @property
    def longest_draft(self) -> int:
        """The most tokens that any level drafts in a round."""
        caps = (level.all_values.get(key, 0) for level in self.levels for key in ("max_draft", "draft_length"))
        return max(caps, default=0)

    @property
    def table(self) -> dict[str, Any]:
        """As a profile's policy table, with ``head``, ``pre_verify`` and the table below where it has them."""
        table: dict[str, Any] = {"name": self.policy, **dict(self.values)}
        if self.head is not None:
            table["head"] = self.head
        if self.below is not None:
            table |= {"pre_verify": self.pre_verify, "draft": self.below.table}
        return table

    @property
    def pre_verify(self) -> str:
        """How a profile spells ``once``."""
        return "once" if self.once else "loop"

    def build(self) -> StoppingPolicy:
        """A fresh policy object of the first level."""
        return POLICIES[self.policy](**dict(self.values))


NONE = Setting("none")
"""Target-only decoding."""


def nested(levels: Sequence[Setting]) -> Setting:
    """Settings of single levels, from the top down, as one; it ends above a level that never drafts."""
    top, *lower = levels
    if not lower or not lower[0].drafts or not top.drafts:
        return replace(top, once=False, below=None)
    return replace(top, below=nested(lower))


def _defaults(policy: str) -> dict[str, Any]:
    return {one.name: one.default for one in fields(POLICIES[policy]) if one.init}  # type: ignore[arg-type]


def _text(value: Any) -> str:
    """A value as a policy flag takes it; floats as short as they can be without meaning another number."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)
