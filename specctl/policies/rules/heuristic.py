"""The length schedule of transformers' assisted generation."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from specctl.policies.base import Rule
from specctl.records import Round


@dataclass(slots=True)
class Heuristic(Rule):
    """Draft K tokens: K grows by 2 after a fully accepted round and shrinks by 1, to at least 1, after any other."""

    draft_length: Annotated[int, Ge(1)] = 5
    max_draft: Annotated[int, Ge(1)] = 40
    carry_over: bool = False
    _length: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        self._length = self.draft_length

    def reset(self) -> None:
        if not self.carry_over:
            self._length = self.draft_length

    def draft_limit(self) -> int:
        return min(self._length, self.max_draft)

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        # Clamped here too: a length far above the cap would need many rejections before the draft gets shorter.
        self._length = min(self._length + 2, self.max_draft) if round_.fully_accepted else max(1, self._length - 1)
