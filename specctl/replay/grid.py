"""What a draft head drafts along a text: one row of tokens for each position at which a round may begin. No torch here.

Beyond the last verified token a draft head reads its own approximate states, or draws a whole block at once. So what
it drafts at a position depends on where the round began, and a trace needs a row for every start::

    position           0     1     2     3
    text      tokens   the   cat   sat   down
    a round   at 0     the   cat   ran   off          two are accepted
    that      at 1           cat   sat   up           two
    begins    at 2                 sat   down         two
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
class DraftGrid(RecordedRounds):
    """What a draft head drafts in the rounds that may begin at each position of its verifier's text.

    Attributes:
        rows: for each of the N positions, the tokens of a round that begins there, accepted or not, as many as were
            recorded; fewer where the token limit or an end of sequence comes first.
        runs: for each of the N positions, how many tokens of the row are accepted, before the first that is rejected.
        longest: the most tokens that the draft can draft in a round; None for any number.
        chances: when sampling, for each position, the probability of accepting each token of the row up to the first
            that is rejected, this one included, once those before it are accepted; None in greedy decoding.
        blocks: when sampling with block verification, what the chances of each row follow from; else None.
        disco: computes what a policy reads of the steps; files hold it once, in their header.
    """

    rows: list[DraftSteps]
    runs: list[int]
    longest: int | None = None
    chances: list[list[float]] | None = None
    blocks: list[BlockChances] | None = None
    disco: Annotated[DiscoHead | None, Field(exclude=True)] = field(default=None, compare=False)

    def of_head(self, name: str) -> "DraftGrid":
        """This object with the predictions of another head of the draft; itself where no other head has that name."""
        if not any(name in (row.further or {}) for row in self.rows):
            return self
        if name not in self._by_head:
            self._by_head[name] = replace(self, rows=[row.of_head(name) for row in self.rows])
        return self._by_head[name]

    def of_disco(self, levels: Sequence[DiscoHead | None]) -> "DraftGrid":
        """This object with a DISCO head, the only one of ``levels`` there is a draft for."""
        (own,) = levels
        if own is None:
            return self
        if own not in self._by_disco:
            self._by_disco[own] = replace(self, disco=own)
        return self._by_disco[own]

    @cached_property
    def accepted_runs(self) -> list[int]:
        """From each of the N positions and from the end, the number of draft tokens in a row that are accepted."""
        return [*self.runs, 0]

    def _find(self, start: int, index: int) -> DraftStep:
        row = self.rows[start]
        if index > len(row):
            raise too_short(index)
        return row.step(index - 1, index, self.disco)

    def verified_chances(self, start: int, drafted: int, judged: int) -> tuple[float, ...] | None:
        """`specctl.records.Round.chances` of a round of ``drafted`` tokens, of which verification judged the first."""
        if self.blocks is not None:
            return self.blocks[start].of_round(drafted)[:judged]
        return None if self.chances is None else tuple(self.chances[start][:judged])

    def judged(self) -> Iterator[Judged]:
        """For every start the tokens that verification judges: to the first that is rejected."""
        for start, (row, run) in enumerate(zip(self.rows, self.runs, strict=True)):
            outcomes = None if self.chances is None else self.chances[start]
            if self.blocks is not None:
                outcomes = self.blocks[start].as_last(min(run + 1, len(row)))
            yield judged_in_round(row, run, outcomes, self.disco)

    @cached_property
    def _by_head(self) -> "dict[str, DraftGrid]":
        return {}

    @cached_property
    def _by_disco(self) -> "dict[DiscoHead, DraftGrid]":
        return {}
