"""What a draft drafts in the rounds that may begin at each position of its verifier's text. No torch here.

A round begins with tokens that other rounds have at the same positions, and may end in a branch: tokens that belong to
it, and to those rounds that leave the text with the same token. How much rounds share differs.

A draft model's tokens depend on nothing but the text before them. Where they are verified one by one, all rounds that
come to a rejected token have it, and what follows it, in common::

    position           0     1     2     3
    text      tokens   the   cat   sat   down
    draft     along    the   cat   ran   down
              branches             off   and  ...      (what the draft drafts after "the cat ran")

A round that starts at position 0 and drafts four tokens drafts ``the cat ran off``, of which two are accepted, and the
next round starts at position 3.

Where a draft model's tokens are verified as blocks, a round's tokens are those of the text until one is not kept. Where
that is depends on where the round began, for the balance w of block verification begins anew with each round. But w
never exceeds 1, and rounds whose w is the same at a position go on alike, so few of them differ, and what is not kept
is a branch that several rounds may share.

A draft head reads its own approximate states beyond the last verified token, or draws a whole block at once. So what it
drafts at a position depends on where the round began, nothing is shared, and each round is a branch::

    a round   at 0     the   cat   ran   off          two are accepted
    that      at 1           cat   sat   up           two
    begins    at 2                 sat   down         two
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.records import DraftStep
from specctl.replay.chances import BlockChances, RoundChances, TokenChances
from specctl.replay.steps import DraftSteps, Judged, judged_in_round, too_short


@dataclass(frozen=True)
class Recorded:
    """The rounds of a draft along a text of N tokens, written by the target or, in a hierarchy, by the draft above.

    Trace files hold it as it is.

    Attributes:
        accepted_runs: of the round that begins at each of the N positions, and at the end, how many of its tokens are
            accepted before one is rejected, if it is long enough.
        shared: of each of these rounds, how many of its first tokens stand in ``along``.
        tails: of each of these rounds, which of ``branches`` it has behind these; None if no further token is recorded.
        branches: tokens that follow each other, as many as were recorded.
        along: the shared token at each of the N positions; None if rounds share none.
        chances: how likely tokens are kept, when sampling; None in greedy decoding, for a draft below another one, and
            where tokens are drawn apart from the text's.
        below: in a hierarchy, what the next draft drafts along ``along``, given the text before each position.
        branches_below: in a hierarchy, what the next draft drafts along each branch; empty if nothing was recorded.
        longest: the most tokens that the draft can draft in a round; None for any number.
        reach: R, where the draft's context ends within the token limit: it drafts no token at position R or behind it.
            What is recorded by position then covers the first R of them only. None where it does not end.
        disco: computes what a policy reads of the steps; files hold it once, in their header.
    """

    accepted_runs: list[int]
    shared: list[int]
    tails: list[int | None]
    branches: list[DraftSteps]
    along: DraftSteps | None = None
    chances: TokenChances | RoundChances | None = None
    below: "Recorded | None" = None
    branches_below: "list[Recorded]" = field(default_factory=list)
    longest: int | None = None
    reach: int | None = None
    disco: Annotated[DiscoPredictor | None, Field(exclude=True)] = field(default=None, compare=False)

    def room(self, start: int, budget: int) -> int:
        """How many tokens of a budget a round that starts at a position can draft in the draft's context."""
        return budget if self.reach is None else max(0, min(budget, self.reach - start))

    def run(self, start: int) -> int:
        """`accepted_runs` at a position; 0 behind the draft's context."""
        return self.accepted_runs[start] if start < len(self.accepted_runs) else 0

    def step(self, start: int, index: int) -> DraftStep:
        """The ``index``-th step of a round that starts at a position.

        Each is found once, because thousands of settings replay the same steps.

        Raises:
            UsageError: the trace was recorded for shorter drafts.
        """
        steps = self._steps.setdefault(start, [])
        while len(steps) < index:
            steps.append(self._find(start, len(steps) + 1))
        return steps[index - 1]

    def _find(self, start: int, index: int) -> DraftStep:
        shared, tail = self.shared[start], self.tails[start]
        if index <= shared and self.along is not None:
            return self.along.step(start + index - 1, index, self.disco)
        if tail is None or index - shared > len(self.branches[tail]):
            raise too_short(index)
        return self.branches[tail].step(index - shared - 1, index, self.disco)

    def verified_chances(self, start: int, drafted: int, judged: int) -> tuple[float, ...] | None:
        """`specctl.records.Round.chances` of a round of ``drafted`` tokens, of which verification judged the first."""
        if self.chances is None:
            return None
        if not drafted:
            return ()
        return self.chances.of_round(start, self.shared[start], self.tails[start], drafted)[:judged]

    @property
    def accepted(self) -> list[bool]:
        """Whether the first token of the round at each of the N positions is accepted."""
        return [run > 0 for run in self.accepted_runs[:-1]]

    @property
    def by_place(self) -> bool:
        """Whether tokens and verdicts at a position are the same in every round that comes to it."""
        return self.along is not None and not (self.chances is not None and self.chances.in_blocks)

    def judged(self) -> Iterator[Judged]:
        """The tokens that verification judges: of every start those up to the first that is rejected.

        Where they are known by their place, the token at every position, as if each were the first of a draft.
        """
        if self.along is not None and self.by_place:
            accepted, starts = self.accepted, range(len(self.along))
            outcomes = [self._outcomes(start, 1)[0] for start in starts]
            predictions = [self._prediction(start) for start in starts]
            yield Judged.of(self.along, accepted, outcomes, [1] * len(accepted), predictions, self.disco)
            return
        for start, run in enumerate(self.accepted_runs[:-1]):
            row = self._row(start, run + 2)
            yield judged_in_round(row, run, self._outcomes(start, min(run + 1, len(row))), self.disco)

    def _row(self, start: int, count: int) -> DraftSteps:
        """The first tokens of a round, as many as there are."""
        shared, tail = min(self.shared[start], count), self.tails[start]
        branch = None if tail is None else self.branches[tail][: count - shared]
        if self.along is None:
            assert branch is not None
            return branch
        row = self.along[start : start + shared]
        return row if branch is None or shared == count else row + branch

    def _outcomes(self, start: int, count: int) -> list[float]:
        """The probability that each of the first tokens of a round is accepted."""
        if self.chances is None:
            return [float(number < self.accepted_runs[start]) for number in range(count)]
        return self.chances.as_last(start, self.shared[start], self.tails[start], count)

    def _prediction(self, start: int) -> float | None:
        """A head's prediction for the first token of a round, which stands where that token has been fed."""
        row = self._row(start, 2)
        return None if row.accept_prob is None or len(row) < 2 else row.accept_prob[1]

    def under(self, start: int) -> "Recorded":
        """What the next draft drafts along the tokens that this draft writes in a round starting at a position.

        These tokens are ``along`` up to the first rejected token, this token included, and then its branch. Positions
        are counted from the start of ``along``.
        """
        assert self.below is not None
        tail = self.tails[start]
        if tail is None or not self.branches_below:
            return self.below
        if tail not in self._under:
            self._under[tail] = _joined(self.below, self.branches_below[tail], start + self.shared[start])
        return self._under[tail]

    def each(self, change: Callable[[DraftSteps], DraftSteps]) -> "Recorded":
        """This object with other steps in the place of its own."""
        along = None if self.along is None else change(self.along)
        return replace(self, along=along, branches=[change(branch) for branch in self.branches])

    def of_predictor(self, name: str) -> "Recorded":
        """This object with the predictions of another head of the draft; itself where no other head has that name."""
        own = self.branches if self.along is None else [self.along]
        if not any(name in (steps.further or {}) for steps in own):
            return self
        if name not in self._by_predictor:
            self._by_predictor[name] = self.each(lambda steps: steps.of_predictor(name))
        return self._by_predictor[name]

    def of_disco(self, levels: Sequence[DiscoPredictor | None]) -> "Recorded":
        """This object with a DISCO head for each level from its own down; itself where no level has one."""
        if not any(levels):
            return self
        if (known := tuple(levels)) not in self._by_disco:
            own, *below = known
            self._by_disco[known] = replace(
                self,
                disco=own,
                below=None if self.below is None else self.below.of_disco(below),
                branches_below=[branch.of_disco(below) for branch in self.branches_below],
            )
        return self._by_disco[known]

    @cached_property
    def _steps(self) -> dict[int, list[DraftStep]]:
        return {}

    @cached_property
    def _under(self) -> "dict[int, Recorded]":
        return {}

    @cached_property
    def _by_predictor(self) -> "dict[str, Recorded]":
        return {}

    @cached_property
    def _by_disco(self) -> "dict[tuple[DiscoPredictor | None, ...], Recorded]":
        return {}


def recorded_by_place(
    accepted: Sequence[bool],
    along: DraftSteps,
    branches: Mapping[int, DraftSteps],
    chances: list[float] | None = None,
    below: Recorded | None = None,
    branches_below: Mapping[int, Recorded] | None = None,
) -> Recorded:
    """What a draft model drafts whose tokens are verified one by one.

    Args:
        accepted: for each of the N positions of the text, whether verification accepts the draft token, once it has
            accepted those before it in the round.
        along: the draft token at each of the N positions, given the text before the position.
        branches: by position of a rejected draft token, the tokens that the draft drafts after it.
        chances: when sampling, the probability that verification accepts the draft token at each of the N positions.
        below: in a hierarchy, what the next draft drafts along ``along``.
        branches_below: in a hierarchy, by position, what the next draft drafts along each branch.
    """
    numbers = {position: number for number, position in enumerate(branches)}
    runs, shared = [0] * (len(accepted) + 1), [0] * (len(accepted) + 1)
    tails: list[int | None] = [None] * (len(accepted) + 1)
    for start in reversed(range(len(accepted))):
        if accepted[start]:
            runs[start], shared[start], tails[start] = runs[start + 1] + 1, shared[start + 1] + 1, tails[start + 1]
        else:
            shared[start], tails[start] = 1, numbers.get(start)
    known = None if chances is None else TokenChances(chances, [])
    ordered = [branches_below[position] for position in branches] if branches_below else []
    return Recorded(runs, shared, tails, list(branches.values()), along, known, below, ordered)


def nothing_recorded(chances: TokenChances | RoundChances | None = None) -> Recorded:
    """What a draft drafts whose context the prompt fills; ``chances`` of no token where it is sampled."""
    return Recorded([0], [0], [None], [], DraftSteps([], [], [], []), chances, reach=0)


def recorded_by_start(
    rows: list[DraftSteps],
    runs: list[int],
    longest: int | None = None,
    chances: list[list[float]] | None = None,
    blocks: list[BlockChances] | None = None,
) -> Recorded:
    """What a draft head drafts.

    Args:
        rows: for each of the N positions, the tokens of a round that begins there, accepted or not; fewer than were
            asked for where the token limit or an end of sequence comes first.
        runs: for each of the N positions, how many tokens of the row are accepted, before the first that is rejected.
        longest: of `Recorded`.
        chances: when sampling, for each position, the probability of accepting each token of the row up to the first
            that is rejected, this one included, once those before it are accepted.
        blocks: when sampling with block verification, what the chances of each row follow from, in place of these.
    """
    one_by_one = None if chances is None else TokenChances([], chances)
    known = one_by_one if blocks is None else RoundChances([], blocks)
    nothing = [0] * (len(rows) + 1)
    return Recorded([*runs, 0], nothing, [*range(len(rows)), None], rows, chances=known, longest=longest)


def _joined(trunk: Recorded, branch: Recorded, first: int) -> Recorded:
    """What a draft model drafts along the first positions of one text, followed by the whole of another text."""
    if trunk.reach is not None and trunk.reach <= first:
        return trunk
    assert trunk.along is not None
    assert branch.along is not None
    moved = [None if tail is None else len(trunk.branches) + tail for tail in branch.tails]
    runs = trunk.accepted_runs[:first] + branch.accepted_runs
    shared = trunk.shared[:first] + branch.shared
    tails = trunk.tails[:first] + moved
    for start in reversed(range(first)):
        if start + runs[start] < first:
            break
        runs[start], shared[start] = first - start + branch.accepted_runs[0], first - start + branch.shared[0]
        tails[start] = moved[0]
    below = trunk.below
    if below is not None and branch.below is not None:
        below = _joined(below, branch.below, first)
    return Recorded(
        runs,
        shared,
        tails,
        trunk.branches + branch.branches,
        trunk.along[:first] + branch.along,
        None,
        below,
        trunk.branches_below + branch.branches_below,
        reach=trunk.reach,
        disco=trunk.disco,
    )
