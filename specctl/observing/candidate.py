"""A candidate of a benchmark, and its form in a results file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specctl.peers.engines import ASSISTED
from specctl.policies import NONE, Setting
from specctl.policies.tree_shape import TreeSize
from specctl.profile.wording import distinct_name


@dataclass(frozen=True, slots=True)
class Candidate:
    """What competes in a benchmark: a setting on some of the loaded drafts, or a peer.

    Attributes:
        label: the name in tables, unique in a benchmark.
        setting: the policies and when they stop; None for a peer.
        drafts: for each level of the setting, the index of its draft in `Header.drafts`.
        peer: name of a peer; None for a setting.
        peer_settings: the peer's arguments; ``draft`` is how one that runs in a process of its own drafts.
        engine: of a setting that runs eagerly where the others run on another engine; None for the profile's.
    """

    label: str
    setting: Setting | None = NONE
    drafts: tuple[int, ...] = (0,)
    peer: str | None = None
    peer_settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Literal["eager"] | None = None

    @property
    def name(self) -> str:
        """The name of the first draft's policy, or of the peer."""
        return self.peer or (self.setting.policy if self.setting is not None else "")

    @property
    def values(self) -> Mapping[str, Any]:
        """Every value of the first draft's policy, defaults included, or the peer's arguments."""
        return self.peer_settings if self.setting is None else self.setting.all_values

    @property
    def way(self) -> str | None:
        """How a peer in a process of its own drafts; None for any other candidate."""
        return None if self.setting is not None else self.peer_settings.get("draft")

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts are trees, whose passes read several tokens."""
        return self.setting is not None and self.setting.tree is not None

    @property
    def parallel(self) -> bool:
        """Whether its draft writes while the target verifies, so that their times do not add up."""
        return self.setting is not None and self.setting.parallel is not None

    @property
    def takes_turns_in_chains(self) -> bool:
        """Whether its passes come one after the other, each of the draft's over one token, and so can be priced."""
        return not self.drafts_trees and not self.parallel and self.engine is None

    @property
    def family(self) -> str:
        """A name shared by all candidates with the same policies on the same models, whatever their values."""
        if self.setting is None:
            return f"{self.name}:{self.way}" if self.way is not None else self.name
        family = self.setting.family if self.engine is None else f"{self.setting.family}, {self.engine}"
        if self.drafts == (0,):
            return family
        return f"{family} on drafts {', '.join(map(str, self.drafts))}"

    def ran_on(self, engines: Mapping[str, str]) -> str | None:
        """On which engine its passes ran, of those of the models; None where they do not tell.

        Where its models ran on several, each is named with its model: ``target graph, draft eager``.
        """
        if self.peer is not None:
            # transformers calls the models as they are, whatever engine the profile's own passes have.
            return "eager" if self.peer in ASSISTED else self.peer
        if self.engine is not None:
            return self.engine
        used = () if self.setting == NONE else self.drafts
        # Levels have the names they have in a profile; loaded drafts have those that they would have as levels.
        keys = {"target": "target", **{level_key(place): level_key(draft) for place, draft in enumerate(used)}}
        # Behind the name may stand, in parentheses, why it is no other.
        ran = {level: engines[key].partition(" (")[0] for level, key in keys.items() if key in engines}
        if len(set(ran.values())) > 1:
            return ", ".join(f"{key} {engine}" for key, engine in ran.items())
        return next(iter(ran.values()), None)

    @property
    def eagerly(self) -> "Candidate":
        """The same setting as a candidate that runs eagerly."""
        return replace(self, label=f"{self.label} (eager)", engine="eager")


def level_key(index: int) -> str:
    """The name of a level below the target, from 0 on, as a profile's tables have it: ``draft``, ``draft.draft``."""
    return "draft" + ".draft" * index


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """A candidate as a results file contains it; without ``levels`` where the first draft alone drafts, with no head
    named, without trees or a lookup and not in parallel."""
    record: dict[str, Any] = {
        "label": candidate.label,
        "kind": "policy" if candidate.peer is None else "peer",
        "name": candidate.name,
        "settings": dict(candidate.values),
        **({"engine": candidate.engine} if candidate.engine is not None else {}),
    }
    levels = candidate.setting.levels if candidate.setting is not None else ()
    if (
        len(levels) > 1
        or candidate.drafts != (0,)
        or any(level.head or level.tree or level.parallel or level.lookup for level in levels)
    ):
        record["levels"] = [
            {
                "draft": draft,
                "policy": level.policy,
                "settings": level.all_values,
                "once": level.once,
                "head": level.head,
                **({"tree": level.tree.tokens, "tree_beams": level.tree.beams} if level.tree is not None else {}),
                **({"parallel": level.parallel} if level.parallel is not None else {}),
                **({"lookup": True, "earlier": level.earlier} if level.lookup else {}),
            }
            for draft, level in zip(candidate.drafts, levels, strict=True)
        ]
    return record


def candidate_of(record: Mapping[str, Any]) -> Candidate:
    """The candidate that a results file describes."""
    if not isinstance(record["label"], str):
        raise TypeError("a candidate's label is not text")
    if record["kind"] == "peer":
        return Candidate(record["label"], None, peer=record["name"], peer_settings=record["settings"])
    alone = {"draft": 0, "policy": record["name"], "settings": record["settings"]}
    records = record.get("levels") or [alone]
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
            tree=TreeSize(level["tree"], level["tree_beams"]) if "tree" in level else None,
            parallel=level.get("parallel"),
            lookup=level.get("lookup", False),
            earlier=level.get("earlier", 0),
        )
    drafts = tuple(level["draft"] for level in records)
    return Candidate(record["label"], setting, drafts, engine=record.get("engine"))
