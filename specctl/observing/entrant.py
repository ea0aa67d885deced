"""What competes in a benchmark, and how a results file describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.policies import NONE, Setting
from specctl.profile.model_names import distinct_name


@dataclass(frozen=True, slots=True)
class Entrant:
    """What competes in a benchmark: a setting on some of the loaded drafts, or a peer.

    Attributes:
        label: its name in tables, unique in a benchmark.
        setting: how the drafts are stopped; None for a peer.
        drafts: for each level of the setting the loaded draft that plays it, a position in `Header.drafts`.
        peer: name of transformers' own assisted generation with ``peer_settings``; None for a setting.
        peer_settings: the peer's arguments.
    """

    label: str
    setting: Setting | None = NONE
    drafts: tuple[int, ...] = (0,)
    peer: str | None = None
    peer_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the policy that stops the draft which the target verifies, or of the peer."""
        return self.peer or (self.setting.policy if self.setting is not None else "")

    @property
    def values(self) -> Mapping[str, Any]:
        """Every value of that policy, defaults included, or the peer's arguments."""
        return self.peer_settings if self.setting is None else self.setting.all_values

    @property
    def family(self) -> str:
        """What it has in common with the same policies on the same models with other values."""
        if self.setting is None:
            return self.name
        if self.drafts == (0,):
            return self.setting.family
        return f"{self.setting.family} on drafts {', '.join(map(str, self.drafts))}"


def entrant_record(entrant: Entrant) -> dict[str, Any]:
    """An entrant as a results file holds it: ``levels`` only where other than the first draft is used alone."""
    record: dict[str, Any] = {
        "label": entrant.label,
        "kind": "policy" if entrant.peer is None else "peer",
        "name": entrant.name,
        "settings": dict(entrant.values),
    }
    levels = entrant.setting.levels if entrant.setting is not None else ()
    if len(levels) > 1 or entrant.drafts != (0,) or any(level.head is not None for level in levels):
        record["levels"] = [
            {
                "draft": draft,
                "policy": level.policy,
                "settings": level.all_values,
                "once": level.once,
                "head": level.head,
            }
            for draft, level in zip(entrant.drafts, levels, strict=True)
        ]
    return record


def entrant_of(record: Mapping[str, Any]) -> Entrant:
    """The entrant that a results file describes."""
    if record["kind"] == "peer":
        return Entrant(record["label"], None, peer=record["name"], peer_settings=record["settings"])
    own = {"draft": 0, "policy": record["name"], "settings": record["settings"]}
    records = record.get("levels") or [own]
    heads = [level["head"] for level in records if level.get("head") is not None]
    setting: Setting | None = None
    for level in reversed(records):
        head = level.get("head")
        setting = replace(
            Setting.of({**level["settings"], "name": level["policy"]}),
            once=level.get("once", False),
            below=setting,
            head=head,
            head_label=head and distinct_name(head, heads),
        )
    return Entrant(record["label"], setting, tuple(level["draft"] for level in records))
