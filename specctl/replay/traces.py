"""What one run of the models leaves behind, so that every policy can be replayed on it. No torch here.

A trace holds the text, what the draft drafts along it, and a branch behind every draft token that is rejected. Here the
draft is right twice, wrong at position 2, and right again::

    position           0     1     2     3
    text      tokens   the   cat   sat   down
    line      path     the   cat   ran   down
              kept     yes   yes   no    yes
              branches             off   and  ...      (position 2: how the draft goes on after "ran")

A round that starts at position 0 and drafts four tokens drafts ``the cat ran off``, of which two are accepted, and the
next round starts at position 3. In a hierarchy ``below`` holds the same for the next draft along ``path``, and
``branches_below`` along each branch, since these are the texts that the next draft has to predict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from specctl.errors import UsageError
from specctl.records import DraftStep

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Proposals:
    """Tokens that a draft drafts at consecutive positions, with its signals there.

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

    def __getitem__(self, places: slice) -> "Proposals":
        return Proposals(
            self.tokens[places],
            self.entropy[places],
            self.top_prob[places],
            self.token_prob[places],
            None if self.accept_prob is None else self.accept_prob[places],
        )

    def __add__(self, after: "Proposals") -> "Proposals":
        heads = None
        if self.accept_prob is not None and after.accept_prob is not None:
            heads = self.accept_prob + after.accept_prob
        return Proposals(
            self.tokens + after.tokens,
            self.entropy + after.entropy,
            self.top_prob + after.top_prob,
            self.token_prob + after.token_prob,
            heads,
        )

    def of_head(self, name: str) -> "Proposals":
        """The same with another head's predictions."""
        return replace(self, accept_prob=(self.further or {})[name], further=None)

    def signals(self, place: int) -> list[float]:
        """Entropy, top probability and token probability at a position."""
        return [self.entropy[place], self.top_prob[place], self.token_prob[place]]

    def step(self, place: int, index: int) -> DraftStep:
        """The token at a position as the ``index``-th step of a round."""
        accept_prob = None if self.accept_prob is None else self.accept_prob[place]
        if accept_prob is not None and index == 1:
            accept_prob = 1.0  # nothing drafted stands before it
        return DraftStep(
            index,
            self.tokens[place],
            self.entropy[place],
            self.top_prob[place],
            self.token_prob[place],
            accept_prob,
        )


@dataclass(frozen=True)
class Line:
    """What a draft drafts along a text that its verifier wrote: the target, or in a hierarchy the draft above.

    Attributes:
        kept: for each of the N positions of the text, whether verification accepts the draft token there, once it has
            accepted those before it in the round.
        path: the draft token at each of these positions, drafted after the text before it.
        branches: by position of a rejected draft token, how the draft goes on after that token.
        below: in a hierarchy, the next draft along ``path``, at each position after the text before it.
        branches_below: by position, the next draft along each branch.
    """

    kept: list[bool]
    path: Proposals
    branches: Mapping[int, Proposals]
    below: "Line | None" = None
    branches_below: "Mapping[int, Line]" = field(default_factory=dict)

    def of_head(self, name: str) -> "Line":
        """The same with the predictions of another of the draft's heads; itself for the head it has."""
        if name not in (self.path.further or {}):
            return self
        if name not in self._by_head:
            branches = {place: branch.of_head(name) for place, branch in self.branches.items()}
            self._by_head[name] = replace(self, path=self.path.of_head(name), branches=branches)
        return self._by_head[name]

    @cached_property
    def runs(self) -> list[int]:
        """How many draft tokens in a row are accepted from each position on."""
        runs = [0] * (len(self.kept) + 1)
        for place in range(len(self.kept) - 1, -1, -1):
            runs[place] = runs[place + 1] + 1 if self.kept[place] else 0
        return runs

    def step(self, start: int, index: int) -> DraftStep:
        """The ``index``-th step of a round that starts at a position.

        Raises:
            UsageError: the trace was recorded for shorter drafts.
        """
        # Cached, because a thousand policies walk the same steps.
        steps = self._steps.setdefault(start, [])
        while len(steps) < index:
            steps.append(self._find(start, len(steps) + 1))
        return steps[index - 1]

    def _find(self, start: int, index: int) -> DraftStep:
        place, rejected = start + index - 1, start + self.runs[start]
        if place <= rejected and place < len(self.path):
            return self.path.step(place, index)
        branch, after = self.branches.get(rejected), place - rejected - 1
        if place <= rejected or branch is None or after >= len(branch):
            raise UsageError(
                f"the trace was not recorded for drafts of {index} tokens",
                "record a new one, or replay policies with a smaller max_draft",
            )
        return branch.step(after, index)

    def under(self, start: int) -> "Line":
        """The next draft along what this draft writes in a round that starts at a position.

        That is the path up to and including the first rejected token, then the branch behind it. Positions are counted
        as along the path.
        """
        assert self.below is not None
        rejected = start + self.runs[start]
        if rejected not in self._under:
            branch = self.branches_below.get(rejected)
            self._under[rejected] = self.below if branch is None else _joined(self.below, branch, rejected + 1)
        return self._under[rejected]

    @cached_property
    def _steps(self) -> dict[int, list[DraftStep]]:
        return {}

    @cached_property
    def _under(self) -> "dict[int, Line]":
        return {}

    @cached_property
    def _by_head(self) -> "dict[str, Line]":
        return {}


def _joined(trunk: Line, branch: Line, first: int) -> Line:
    """A line along the first positions of one text and then all of another."""
    below = trunk.below
    if below is not None and branch.below is not None:
        below = _joined(below, branch.below, first)
    return Line(
        trunk.kept[:first] + branch.kept,
        trunk.path[:first] + branch.path,
        _shifted(trunk.branches, branch.branches, first),
        below,
        _shifted(trunk.branches_below, branch.branches_below, first),
    )


def _shifted(trunk: Mapping[int, _T], branch: Mapping[int, _T], first: int) -> dict[int, _T]:
    return {place: found for place, found in trunk.items() if place < first} | {
        first + place: found for place, found in branch.items()
    }


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence: everything that any policy could have read while it was generated.

    Attributes:
        prompt, category, turn: where it comes from.
        prompt_tokens: length of the prompt.
        limit: the token limit in force.
        tokens: N ids, the target's text.
        line: the draft along them.
        prefill_ms: time of the prompt in both models, in milliseconds.
        chances: when sampling, the probability that verification accepts the draft token at each of the N positions;
            None in greedy decoding.
    """

    prompt: str
    category: str
    turn: int
    prompt_tokens: int
    limit: int
    tokens: list[int]
    line: Line
    prefill_ms: float
    chances: list[float] | None = None

    def of_head(self, name: str | None) -> "Trace":
        """The same with the predictions of another of the draft's heads; itself for None or the head it has."""
        return self if name is None else replace(self, line=self.line.of_head(name))
