"""Traces: all that is recorded about one generated text, so that any policy can be replayed on it. No torch here.

A trace contains the text, the draft token at each of its positions, and a branch for each rejected draft token: the
tokens that the draft drafts after it. In this example the draft tokens are accepted except at position 2::

    position           0     1     2     3
    text      tokens   the   cat   sat   down
    draft     along    the   cat   ran   down
              accepted yes   yes   no    yes
              branches             off   and  ...      (what the draft drafts after "the cat ran")

A round that starts at position 0 and drafts four tokens drafts ``the cat ran off``, of which two are accepted, and the
next round starts at position 3. In a hierarchy, the next draft predicts what this draft writes: ``below`` contains what
it drafts along ``along``, and ``branches_below`` what it drafts along each branch.

What a draft head drafts depends on where its round began, too: see `specctl.replay.grid.DraftGrid`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, TypeVar

from pydantic import AliasChoices, Field

from specctl.models.running.disco_head import DiscoHead
from specctl.records import DraftStep
from specctl.replay.blocks import DraftBlocks
from specctl.replay.grid import DraftGrid
from specctl.replay.steps import DraftSteps, Judged, RecordedRounds, too_short

_T = TypeVar("_T")


@dataclass(frozen=True)
class DraftAlong(RecordedRounds):
    """What a draft model drafts along a text of its verifier, which is the target or, in a hierarchy, the draft above.

    A draft model's tokens depend on nothing but the text before them, so one token for each position says it all.

    Attributes:
        accepted: for each of the N positions of the text, whether verification accepts the draft token, once it has
            accepted those before it in the round.
        along: the draft token at each of the N positions, given the text before the position.
        branches: by position of a rejected draft token, the tokens that the draft drafts after it.
        chances: when sampling, the probability that verification accepts the draft token at each of the N positions;
            None in greedy decoding and for a draft below another one.
        below: in a hierarchy, what the next draft drafts along ``along``, given the text before each position.
        branches_below: in a hierarchy, by position, what the next draft drafts along each branch.
        disco: computes what a policy reads of the steps; files hold it once, in their header.
    """

    accepted: Annotated[list[bool], Field(validation_alias=AliasChoices("accepted", "kept"))]
    along: Annotated[DraftSteps, Field(validation_alias=AliasChoices("along", "path"))]
    branches: Mapping[int, DraftSteps]
    chances: list[float] | None = None
    below: "DraftAlong | None" = None
    branches_below: "Mapping[int, DraftAlong]" = field(default_factory=dict)
    disco: Annotated[DiscoHead | None, Field(exclude=True)] = field(default=None, compare=False)

    @property
    def longest(self) -> None:
        """The most tokens that a draft model can draft in a round: any number."""

    def of_head(self, name: str) -> "DraftAlong":
        """This object with the predictions of another head of the draft; itself where no other head has that name."""
        if name not in (self.along.further or {}):
            return self
        if name not in self._by_head:
            branches = {position: branch.of_head(name) for position, branch in self.branches.items()}
            self._by_head[name] = replace(self, along=self.along.of_head(name), branches=branches)
        return self._by_head[name]

    def of_disco(self, levels: Sequence[DiscoHead | None]) -> "DraftAlong":
        """This object with a DISCO head for each level from its own down; itself where no level has one."""
        if not any(levels):
            return self
        if (known := tuple(levels)) not in self._by_disco:
            own, *below = known
            self._by_disco[known] = replace(
                self,
                disco=own,
                below=None if self.below is None else self.below.of_disco(below),
                branches_below={place: branch.of_disco(below) for place, branch in self.branches_below.items()},
            )
        return self._by_disco[known]

    @cached_property
    def accepted_runs(self) -> list[int]:
        """From each of the N positions and from the end, the number of draft tokens in a row that are accepted."""
        runs = [0] * (len(self.accepted) + 1)
        for position in range(len(self.accepted) - 1, -1, -1):
            runs[position] = runs[position + 1] + 1 if self.accepted[position] else 0
        return runs

    def _find(self, start: int, index: int) -> DraftStep:
        position, rejected = start + index - 1, start + self.accepted_runs[start]
        if position <= rejected and position < len(self.along):
            return self.along.step(position, index, self.disco)
        branch, after = self.branches.get(rejected), position - rejected - 1
        if position <= rejected or branch is None or after >= len(branch):
            raise too_short(index)
        return branch.step(after, index, self.disco)

    def verified_chances(self, start: int, drafted: int, judged: int) -> tuple[float, ...] | None:  # noqa: ARG002
        """`chances` of the first tokens of a round, which are those that verification judged, however many it has."""
        return None if self.chances is None else tuple(self.chances[start : start + judged])

    def judged(self) -> Iterator[Judged]:
        """The draft token at every position of the text, as if each were the first of a draft."""
        outcomes = list(map(float, self.accepted)) if self.chances is None else self.chances
        predictions = [self._prediction(position) for position in range(len(self.accepted))]
        yield Judged.of(self.along, self.accepted, outcomes, [1] * len(self.accepted), predictions, self.disco)

    def _prediction(self, position: int) -> float | None:
        """A head's prediction for the draft token at a position, which stands where that token has been fed."""
        after = self.along if self.accepted[position] else self.branches.get(position)
        index = position + 1 if self.accepted[position] else 0
        if after is None or after.accept_prob is None or index >= len(after):
            return None
        return after.accept_prob[index]

    def under(self, start: int) -> "DraftAlong":
        """What the next draft drafts along the tokens that this draft writes in a round starting at a position.

        These tokens are ``along`` up to the first rejected token, this token included, and then its branch. Positions
        are counted from the start of ``along``.
        """
        assert self.below is not None
        rejected = start + self.accepted_runs[start]
        if rejected not in self._under:
            branch = self.branches_below.get(rejected)
            self._under[rejected] = self.below if branch is None else _joined(self.below, branch, rejected + 1)
        return self._under[rejected]

    @cached_property
    def _under(self) -> "dict[int, DraftAlong]":
        return {}

    @cached_property
    def _by_head(self) -> "dict[str, DraftAlong]":
        return {}

    @cached_property
    def _by_disco(self) -> "dict[tuple[DiscoHead | None, ...], DraftAlong]":
        return {}


def _joined(trunk: DraftAlong, branch: DraftAlong, first: int) -> DraftAlong:
    """What a draft drafts along the first positions of one text, followed by the whole of another text."""
    below = trunk.below
    if below is not None and branch.below is not None:
        below = _joined(below, branch.below, first)
    return DraftAlong(
        trunk.accepted[:first] + branch.accepted,
        trunk.along[:first] + branch.along,
        _shifted(trunk.branches, branch.branches, first),
        None,
        below,
        _shifted(trunk.branches_below, branch.branches_below, first),
        trunk.disco,
    )


def _shifted(trunk: Mapping[int, _T], branch: Mapping[int, _T], first: int) -> dict[int, _T]:
    return {position: value for position, value in trunk.items() if position < first} | {
        first + position: value for position, value in branch.items()
    }


Drafted = DraftAlong | DraftBlocks | DraftGrid
"""What a draft drafts along the target's text. Replay asks both for `step`, `accepted_runs` and `verified_chances`."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One generated sequence with everything that a policy could have read while it was generated.

    Attributes:
        prompt, category, turn: the prompt's id and category, and which of its turns was generated.
        prompt_tokens: length of the prompt.
        limit: the token limit in force.
        tokens: N ids, the text that the target wrote.
        draft: what the first draft drafts along this text.
        prefill_ms: time in which all models read the prompt, in milliseconds.
    """

    prompt: str
    category: str
    turn: int
    prompt_tokens: int
    limit: int
    tokens: list[int]
    draft: Drafted
    prefill_ms: float

    def of_head(self, name: str | None) -> "Trace":
        """This trace with the predictions of another head of the draft; itself for None."""
        return self if name is None else replace(self, draft=self.draft.of_head(name))

    def of_disco(self, levels: Sequence[DiscoHead | None]) -> "Trace":
        """This trace with a DISCO head for each draft, from the top down; itself where no draft has one."""
        return replace(self, draft=self.draft.of_disco(levels)) if any(levels) else self
