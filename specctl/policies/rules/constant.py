"""A fixed draft length, and target-only decoding."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from specctl.policies.base import Rule


@dataclass(slots=True)
class Constant(Rule):
    """Draft ``draft_length`` tokens every round (K of Leviathan et al. 2023, arXiv 2211.17192)."""

    draft_length: Annotated[int, Ge(1)] = 5

    def draft_limit(self) -> int:
        return self.draft_length


@dataclass(slots=True)
class NoDraft(Rule):
    """Target-only autoregressive decoding through the same loop: the baseline of every speedup."""

    drafts = False

    def draft_limit(self) -> int:
        return 0
