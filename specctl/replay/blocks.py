"""What a draft model drafts along a text whose rounds are verified as blocks. No torch here.

Where a block's draft leaves the text depends on where its round began, for the balance w of block verification begins
anew with each round. But w never exceeds 1, and rounds whose w is the same at a position go on alike, so few of them
differ, and what is not kept is a branch that several rounds may share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from specctl.models.running.disco_head import DiscoHead
from specctl.records import DraftStep
from specctl.replay.block_chances import BlockChances
from specctl.replay.steps import DraftSteps, Judged, RecordedRounds, judged_in_round, too_short


@dataclass(frozen=True)
class DraftBlocks(RecordedRounds):
    """What a draft model drafts in the rounds that may begin at each position of the target's text.

    Attributes:
        along: the text's own token at each of the N positions, as the draft would draft it.
        runs: for each of the N positions, how many tokens of a round that begins there are kept: tokens of the text.
        chances: for each of the N positions, what is known of these tokens' chances.
        tails: for each of the N positions, which of ``branches`` the round ends in; None where it keeps all its tokens.
        branches: the tokens from one that is not kept on.
        branch_chances: of each branch.
        disco: computes what a policy reads of the steps; files hold it once, in their header.
    """

    along: DraftSteps
    runs: list[int]
    chances: list[BlockChances]
    tails: list[int | None]
    branches: list[DraftSteps]
    branch_chances: list[BlockChances]
    disco: Annotated[DiscoHead | None, Field(exclude=True)] = field(default=None, compare=False)

    @property
    def longest(self) -> None:
        """The most tokens that a draft model can draft in a round: any number."""

    def of_head(self, name: str) -> "DraftBlocks":
        """This object with the predictions of another head of the draft; itself where no other head has that name."""
        if name not in (self.along.further or {}):
            return self
        if name not in self._by_head:
            branches = [branch.of_head(name) for branch in self.branches]
            self._by_head[name] = replace(self, along=self.along.of_head(name), branches=branches)
        return self._by_head[name]

    def of_disco(self, levels: Sequence[DiscoHead | None]) -> "DraftBlocks":
        """This object with a DISCO head, the first; itself without one."""
        own = levels[0] if levels else None
        if own is None:
            return self
        if own not in self._by_disco:
            self._by_disco[own] = replace(self, disco=own)
        return self._by_disco[own]

    @cached_property
    def accepted_runs(self) -> list[int]:
        """From each of the N positions and from the end, the number of draft tokens in a row that are kept."""
        return [*self.runs, 0]

    def _find(self, start: int, index: int) -> DraftStep:
        run, tail = self.runs[start], self.tails[start]
        if index <= run:
            return self.along.step(start + index - 1, index, self.disco)
        if tail is None or index - run > len(self.branches[tail]):
            raise too_short(index)
        return self.branches[tail].step(index - run - 1, index, self.disco)

    def verified_chances(self, start: int, drafted: int, judged: int) -> tuple[float, ...]:
        """`specctl.records.Round.chances` of a round of ``drafted`` tokens, of which verification judged the first."""
        return self._chances(start).of_round(drafted)[:judged]

    def _chances(self, start: int) -> BlockChances:
        tail = self.tails[start]
        return self.chances[start] if tail is None else self.chances[start] + self.branch_chances[tail]

    def judged(self) -> Iterator[Judged]:
        """For every start the tokens that verification judges: to the first that is not kept."""
        for start, (run, tail) in enumerate(zip(self.runs, self.tails, strict=True)):
            row = self.along[start : start + run]
            row = row if tail is None else row + self.branches[tail][:2]
            yield judged_in_round(row, run, self._chances(start).as_last(min(run + 1, len(row))), self.disco)

    @cached_property
    def _by_head(self) -> "dict[str, DraftBlocks]":
        return {}

    @cached_property
    def _by_disco(self) -> "dict[DiscoHead, DraftBlocks]":
        return {}
