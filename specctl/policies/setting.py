"""A setting: the policy that stops each draft, and its values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import log
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.policies.base import TRAINED_SIGNALS, Signal, StoppingPolicy
from specctl.policies.known_policies import POLICIES, RegisteredPolicy
from specctl.records import DraftStep

LEAST_TREE, MOST_TREE = 2, 64
"""Tokens of a tree, the newest token included: one draft token, and what a pass may be wide."""
BEAMS, MOST_BEAMS = 10, 32  # Default number of beams, as in EAGLE-2, and the maximum


@dataclass(frozen=True, slots=True)
class TreeSize:
    """The size of a draft's trees; the stopping policy decides their depth."""

    # the most tokens that the target verifies in a round, including the newest token (EAGLE-2's ``total_token``)
    tokens: int = 60
    # The number of tokens of a level that are continued, and of continuations of each (EAGLE-2's ``top_k``).
    beams: int = BEAMS

    def __str__(self) -> str:
        return f"tree={self.tokens}" + (f",tree_beams={self.beams}" if self.beams != BEAMS else "")


def parse_tree(text: str) -> int:
    """The number of tokens in a flag's value.

    Raises:
        UsageError: it is not a valid number.
    """
    if text.isdecimal() and LEAST_TREE <= int(text) <= MOST_TREE:
        return int(text)
    raise UsageError(
        f"--tree {text} is not a number of tokens from {LEAST_TREE} to {MOST_TREE}", "for example --tree 60"
    )


Parallel = bool | Literal["force"]
"""Whether a draft goes on drafting while the target verifies; ``force`` even where they share a device."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy with its values and, in a hierarchy, the setting of the draft below.

    Profiles, flags, benchmarks, calibration and replay all describe a policy by this type. `of` builds a setting from a
    policy table and drops default values, so that settings with the same decisions are equal.
    """

    policy: str  # a name in `POLICIES`
    # (name, value) pairs that differ from the policy's defaults, in the order of the policy's fields
    values: tuple[tuple[str, Any], ...] = ()
    # in a hierarchy, whether the block is verified after a single round of the draft below; the policy then only limits
    # the block's length
    once: bool = False
    below: "Setting | None" = None  # the setting of the draft below; None if no model drafts for this draft
    # path or name of the acceptance head that the policy reads, if the draft has several; else None
    head: str | None = None
    head_label: str | None = field(default=None, compare=False)  # display name of ``head``
    tree: TreeSize | None = None  # the size of the trees that the draft grows; None for chains
    # whether the draft goes on drafting while the target verifies; only with a policy of `fixed_length`
    parallel: Parallel | None = None
    lookup: bool = False  # whether a lookup and the draft take turns; only for the draft that the target verifies
    earlier: int = 0  # how many tokens of answers to earlier prompts the lookup may copy too
    # for a single draft: replacements for this setting, each with the number of texts in a batch from which it applies,
    # ascending from 2
    batches: "tuple[tuple[int, Setting], ...]" = ()

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Setting":
        """The setting of a policy table: the ``name`` of a policy and any of its settings.

        A policy that this version does not know, for example from an older results file, keeps all its settings.
        """
        name = table["name"]
        given = {key: _value(value) for key, value in table.items() if key != "name"}
        defaults = _defaults(name)
        known = [(key, given.pop(key)) for key in defaults if key in given]
        return cls(name, (*(pair for pair in known if pair[1] != defaults[pair[0]]), *given.items()))

    def at(self, rows: int) -> "Setting":
        """The setting for a batch of this many texts."""
        return next((one for least, one in reversed(self.batches) if least <= rows), replace(self, batches=()))

    @property
    def levels(self) -> "tuple[Setting, ...]":
        """This setting and all settings below it, from the top down."""
        return (self, *(self.below.levels if self.below is not None else ()))

    @property
    def label(self) -> str:
        """Policies with their values, from the top down: ``constant:draft_length=4(once) < svip``."""
        return self.label_on(())

    def label_on(self, models: Sequence[str]) -> str:
        """`label` with the model of each level, if ``models`` is not empty: ``svip@mid < constant@draft``."""
        names = [f"@{model}" for model in models] or [""] * len(self.levels)
        return " < ".join(level._label + name for level, name in zip(self.levels, names, strict=True))

    @property
    def _label(self) -> str:
        head = self.head_label or self.head
        pairs = [*self.values, *([("head", head)] if head is not None else [])]
        values = ",".join(f"{key}={_text(value)}" for key, value in pairs)
        return f"{self.policy}{':' * bool(values)}{values}{self._shape}"

    @property
    def _shape(self) -> str:
        shapes = [
            "(once)" * self.once,
            f"({self.tree})" if self.tree is not None else "",
            "(parallel)" * bool(self.parallel),
            f"(lookup{(self.earlier and f', earlier={self.earlier}') or ''})" * self.lookup,
            *(f"({least} texts: {one.label})" for least, one in self.batches),
        ]
        return "".join(shapes)

    @property
    def word(self) -> str:
        """The top policy with its values, as ``--policy`` accepts it."""
        values = ",".join(f"{key}={_text(value)}" for key, value in self.values)
        return f"{self.policy}{':' * bool(values)}{values}"

    @property
    def family(self) -> str:
        """`label` without values: policies, heads and ``(once)``, equal for settings that differ in values only."""
        return " < ".join(level._family for level in self.levels)

    @property
    def _family(self) -> str:
        head = self.head_label or self.head
        return self.policy + self._shape + (f" {head}" if head is not None else "")

    @property
    def drafts(self) -> bool:
        """Whether the top policy ever drafts."""
        return POLICIES[self.policy].drafts

    @property
    def fixed_length(self) -> bool:
        """Whether the top policy drafts blocks of one length, or never.

        Other policies cannot draft in parallel: the target verifies all the time, so there is no moment at which they
        could stop a draft, and no round with the costs that they learn.
        """
        return self.policy == "constant" or not self.drafts

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that the top policy reads."""
        return POLICIES[self.policy].signals_of(dict(self.values))

    @property
    def needs_predictor(self) -> bool:
        """Whether the top policy, for any number of texts, reads an acceptance head's predictions."""
        return any(not one.signals.isdisjoint(TRAINED_SIGNALS) for one in (self, *(one for _, one in self.batches)))

    @property
    def needs_predictors(self) -> bool:
        """`needs_predictor` for any level."""
        return any(level.needs_predictor for level in self.levels)

    @property
    def all_values(self) -> dict[str, Any]:
        """Every setting of the top policy, defaults included."""
        return {**_defaults(self.policy), **dict(self.values)}

    @property
    def longest_draft(self) -> int:
        """The most tokens that any level drafts in a round, for any number of texts."""
        levels = (*self.levels, *(one for _, one in self.batches))
        caps = (level.all_values.get(key, 0) for level in levels for key in ("max_draft", "draft_length"))
        return max(caps, default=0)

    @property
    def never_stops(self) -> bool:
        """Whether no token reaches the top policy's threshold, so that every draft has its full length.

        Tested on the policy itself with the least certain token possible. An adaptive threshold may be reached later.
        """
        values = self.all_values
        moves = values.get("adapt", "alpha" in values) and values.get("eps", 0) > 0
        if "threshold" not in dict(self.values) or moves or POLICIES.origin(self.policy) is not None:
            return False
        policy = self.build()
        places = range(1, policy.draft_limit())
        return bool(places) and not any(policy.should_stop(replace(_DOUBTFUL, index=place)) for place in places)

    @property
    def table(self) -> dict[str, Any]:
        """The setting as a policy table, with ``head``, ``tree`` and ``tree_beams``, ``parallel``,
        ``lookup``, ``pre_verify`` and the lower ``draft`` if set."""
        table: dict[str, Any] = {"name": self.policy, **dict(self.values)}
        if self.head is not None:
            table["head"] = self.head
        if self.tree is not None:
            table |= {"tree": self.tree.tokens, "tree_beams": self.tree.beams}
        if self.parallel is not None:
            table["parallel"] = self.parallel
        if self.lookup:
            table |= {"lookup": True, **({"earlier": self.earlier} if self.earlier else {})}
        if self.batches:
            table["batch_policies"] = {str(least): one.word for least, one in self.batches}
        if self.below is not None:
            table |= {"pre_verify": self.pre_verify, "draft": self.below.table}
        return table

    @property
    def pre_verify(self) -> str:
        """The profile value of ``once``: ``once`` or ``loop``."""
        return "once" if self.once else "loop"

    def build(self) -> StoppingPolicy:
        """A new policy object of the top level."""
        policy = POLICIES[self.policy](**dict(self.values))
        origin = POLICIES.origin(self.policy)
        return policy if origin is None else RegisteredPolicy(policy, f"the policy {self.policy} of {origin}")


_DOUBTFUL = DraftStep(
    1,
    0,
    entropy=20 * log(2),  # a uniform distribution over a million tokens, more than any vocabulary has
    top_prob=2**-20,
    token_prob=2**-20,
    accept_prob=0.0,
    next_accept_prob=0.0,
    own_accept_prob=0.0,
)
NONE = Setting("none")  # Target-only decoding


def nested(levels: Sequence[Setting]) -> Setting:
    """Nest per-level settings, top first, dropping the first level that never drafts and all levels below it.

    If the first level never drafts, the result is this level alone.
    """
    top, *lower = levels
    if not lower or not lower[0].drafts or not top.drafts:
        return replace(top, once=False, below=None)
    return replace(top, below=nested(lower))


def _defaults(policy: str) -> dict[str, Any]:
    """A policy's settings with their defaults; empty for an unknown policy."""
    known = POLICIES.get(policy)
    return {} if known is None else {item.name: item.default for item in fields(known) if item.init}  # type: ignore[arg-type]


def _value(value: Any) -> Any:
    """A value in the policy's own type: files have lists instead of tuples."""
    return tuple(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    """A value as ``--policy`` accepts it; a float in the shortest form that reads back as the same number."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return str(value)
