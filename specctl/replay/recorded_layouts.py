"""How a trace file spells a recorded draft: with no more than its kind of draft needs. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Discriminator, GetPydanticSchema, PlainSerializer, Tag
from pydantic_core.core_schema import no_info_after_validator_function

from specctl.replay.chances import BlockChances, RoundChances
from specctl.replay.recorded import Recorded, recorded_by_place, recorded_by_start
from specctl.replay.steps import DraftSteps


@dataclass(frozen=True, slots=True)
class _ByPlace:
    """Of a draft model whose tokens are verified one by one: what `recorded_by_place` takes."""

    accepted: list[bool]
    along: DraftSteps
    branches: dict[int, DraftSteps]
    chances: list[float] | None = None
    below: "_ByPlace | None" = None
    branches_below: "dict[int, _ByPlace]" = field(default_factory=dict)

    @classmethod
    def of(cls, draft: Recorded) -> "_ByPlace":
        assert draft.along is not None
        assert draft.chances is None or not draft.chances.in_blocks
        chances = None if draft.chances is None else draft.chances.along
        rejected = zip(draft.accepted, draft.tails[:-1], strict=True)
        branches = {place: tail for place, (fine, tail) in enumerate(rejected) if tail is not None and not fine}
        return cls(
            draft.accepted,
            draft.along,
            {place: draft.branches[tail] for place, tail in branches.items()},
            chances,
            None if draft.below is None else cls.of(draft.below),
            {place: cls.of(draft.branches_below[tail]) for place, tail in branches.items() if draft.branches_below},
        )

    def recorded(self) -> Recorded:
        below = None if self.below is None else self.below.recorded()
        branches = {place: branch.recorded() for place, branch in self.branches_below.items()}
        return recorded_by_place(self.accepted, self.along, self.branches, self.chances, below, branches)


@dataclass(frozen=True, slots=True)
class _ByStart:
    """Of a draft head: what `recorded_by_start` takes."""

    rows: list[DraftSteps]
    runs: list[int]
    longest: int | None = None
    chances: list[list[float]] | None = None
    blocks: list[BlockChances] | None = None

    @classmethod
    def of(cls, draft: Recorded) -> "_ByStart":
        one, known = cls(draft.branches, draft.accepted_runs[:-1], draft.longest), draft.chances
        if known is None:
            return one
        return replace(one, blocks=known.branches) if known.in_blocks else replace(one, chances=known.branches)

    def recorded(self) -> Recorded:
        return recorded_by_start(self.rows, self.runs, self.longest, self.chances, self.blocks)


@dataclass(frozen=True, slots=True)
class _InBlocks:
    """Of a draft model whose tokens are verified as blocks; see `Recorded`, here without the end of the text."""

    along: DraftSteps
    runs: list[int]
    chances: list[BlockChances]
    tails: list[int | None]
    branches: list[DraftSteps]
    branch_chances: list[BlockChances]

    @classmethod
    def of(cls, draft: Recorded) -> "_InBlocks":
        assert draft.along is not None
        assert draft.chances is not None
        assert draft.chances.in_blocks
        starts, branches = draft.chances.starts, draft.chances.branches
        return cls(draft.along, draft.accepted_runs[:-1], starts, draft.tails[:-1], draft.branches, branches)

    def recorded(self) -> Recorded:
        runs, chances = [*self.runs, 0], RoundChances(self.chances, self.branch_chances)
        return Recorded(runs, runs, [*self.tails, None], self.branches, self.along, chances)


_Layout = _ByPlace | _ByStart | _InBlocks


def _kind(layout: Any) -> str:
    names = layout if isinstance(layout, Mapping) else layout.__dataclass_fields__
    return "head" if "rows" in names else "blocks" if "tails" in names else "model"


def _recorded(layout: _Layout) -> Recorded:
    return layout.recorded()


def _layout(draft: Recorded) -> _Layout:
    return (_ByPlace if draft.by_place else _ByStart if draft.along is None else _InBlocks).of(draft)


_Any = Annotated[
    Annotated[_ByPlace, Tag("model")] | Annotated[_ByStart, Tag("head")] | Annotated[_InBlocks, Tag("blocks")],
    Discriminator(_kind),
]
Spelled = Annotated[
    Recorded,
    GetPydanticSchema(lambda _, handler: no_info_after_validator_function(_recorded, handler(_Any))),
    PlainSerializer(_layout, return_type=_Any),
]
"""`Recorded` as a field of what stands in a file."""
