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
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, TypeVar

from pydantic import AliasChoices, Field

from specctl.errors import UsageError
from specctl.records import DraftStep

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Draft tokens at consecutive positions with their signals, as columns.

    Every list is as long as ``tokens``. ``accept_prob`` is the prediction of the draft's head for the token fed just
    before the position, None without a head; ``further`` holds the predictions of the draft's other heads by name.
    """

    tokens: list[int]
    entropy: list[float]
    top_prob: list[float]
    token_prob: list[float]
    accept_prob: list[float] | None = None
    further: dict[str, list[float]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: slice) -> "DraftSteps":
        return DraftSteps(
            self.tokens[positions],
            self.entropy[positions],
            self.top_prob[positions],
            self.token_prob[positions],
            None if self.accept_prob is None else self.accept_prob[positions],
        )

    def __add__(self, after: "DraftSteps") -> "DraftSteps":
        heads = None
        if self.accept_prob is not None and after.accept_prob is not None:
            heads = self.accept_prob + after.accept_prob
        return DraftSteps(
            self.tokens + after.tokens,
            self.entropy + after.entropy,
            self.top_prob + after.top_prob,
            self.token_prob + after.token_prob,
            heads,
        )

    def of_head(self, name: str) -> "DraftSteps":
        """These steps with the predictions of another head in ``accept_prob``."""
        return replace(self, accept_prob=(self.further or {})[name], further=None)

    def signals(self, position: int) -> list[float]:
        """Entropy, top probability and token probability at a position."""
        return [self.entropy[position], self.top_prob[position], self.token_prob[position]]

    def step(self, position: int, index: int) -> DraftStep:
        """The token at a position as the ``index``-th step of a round."""
        accept_prob = None if self.accept_prob is None else self.accept_prob[position]
        if accept_prob is not None and index == 1:
            accept_prob = 1.0  # no draft token precedes it
        return DraftStep(
            index,
            self.tokens[position],
            self.entropy[position],
            self.top_prob[position],
            self.token_prob[position],
            accept_prob,
        )


@dataclass(frozen=True)
class DraftAlong:
    """What a draft drafts along a text of its verifier, which is the target or, in a hierarchy, the draft above.

    Attributes:
        accepted: for each of the N positions of the text, whether verification accepts the draft token, once it has
            accepted those before it in the round.
        along: the draft token at each of the N positions, given the text before the position.
        branches: by position of a rejected draft token, the tokens that the draft drafts after it.
        below: in a hierarchy, what the next draft drafts along ``along``, given the text before each position.
        branches_below: in a hierarchy, by position, what the next draft drafts along each branch.
    """

    accepted: Annotated[list[bool], Field(validation_alias=AliasChoices("accepted", "kept"))]
    along: Annotated[DraftSteps, Field(validation_alias=AliasChoices("along", "path"))]
    branches: Mapping[int, DraftSteps]
    below: "DraftAlong | None" = None
    branches_below: "Mapping[int, DraftAlong]" = field(default_factory=dict)

    def of_head(self, name: str) -> "DraftAlong":
        """This object with the predictions of another head of the draft; itself where no other head has that name."""
        if name not in (self.along.further or {}):
            return self
        if name not in self._by_head:
            branches = {position: branch.of_head(name) for position, branch in self.branches.items()}
            self._by_head[name] = replace(self, along=self.along.of_head(name), branches=branches)
        return self._by_head[name]

    @cached_property
    def accepted_runs(self) -> list[int]:
        """From each of the N positions and from the end, the number of draft tokens in a row that are accepted."""
        runs = [0] * (len(self.accepted) + 1)
        for position in range(len(self.accepted) - 1, -1, -1):
            runs[position] = runs[position + 1] + 1 if self.accepted[position] else 0
        return runs

    def step(self, start: int, index: int) -> DraftStep:
        """The ``index``-th step of a round that starts at a position.

        Raises:
            UsageError: the trace was recorded for shorter drafts.
        """
        # Cached, because thousands of settings replay the same steps.
        steps = self._steps.setdefault(start, [])
        while len(steps) < index:
            steps.append(self._find(start, len(steps) + 1))
        return steps[index - 1]

    def _find(self, start: int, index: int) -> DraftStep:
        position, rejected = start + index - 1, start + self.accepted_runs[start]
        if position <= rejected and position < len(self.along):
            return self.along.step(position, index)
        branch, after = self.branches.get(rejected), position - rejected - 1
        if position <= rejected or branch is None or after >= len(branch):
            raise UsageError(
                f"the trace was not recorded for drafts of {index} tokens",
                "record a new one, or replay policies with a smaller max_draft",
            )
        return branch.step(after, index)

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
    def _steps(self) -> dict[int, list[DraftStep]]:
        return {}

    @cached_property
    def _under(self) -> "dict[int, DraftAlong]":
        return {}

    @cached_property
    def _by_head(self) -> "dict[str, DraftAlong]":
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
        below,
        _shifted(trunk.branches_below, branch.branches_below, first),
    )


def _shifted(trunk: Mapping[int, _T], branch: Mapping[int, _T], first: int) -> dict[int, _T]:
    return {position: value for position, value in trunk.items() if position < first} | {
        first + position: value for position, value in branch.items()
    }


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
        chances: when sampling, the probability that verification accepts the draft token at each of the N positions;
            None in greedy decoding.
    """

    prompt: str
    category: str
    turn: int
    prompt_tokens: int
    limit: int
    tokens: list[int]
    draft: DraftAlong
    prefill_ms: float
    chances: list[float] | None = None

    def of_head(self, name: str | None) -> "Trace":
        """This trace with the predictions of another head of the draft; itself for None."""
        return self if name is None else replace(self, draft=self.draft.of_head(name))
