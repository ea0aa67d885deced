"""Traces: recordings of one generated text, on which any policy can be replayed. No torch here.

A trace has the text, and the drafts of the rounds that may begin at each position; in a hierarchy, those of every
draft.

A round begins with tokens that other rounds share at the same positions. It may end in a branch, which belongs to the
round and to those that leave the text with the same token. How much rounds share depends on the draft.

The tokens of a draft model depend only on the text before them. Where they are verified one by one, all rounds that
reach a rejected token share it and what follows it::

    position           0     1     2     3
    text      tokens   the   cat   sat   down
    draft     along    the   cat   ran   down
              branches             off   and  ...      (what the draft drafts after "the cat ran")

A round that begins at position 0 and drafts four tokens drafts ``the cat ran off``. Two are accepted, and the next
round begins at position 3.

Where the tokens of a draft model are verified as blocks, a round has the tokens of the text until one is rejected. That
place depends on where the round began, because the balance w of block verification starts again with each round. But w
never exceeds 1, and rounds with the same w at a position continue alike. So few of them differ, and several may share a
branch.

A draft head reads its own approximate states after the last verified token, or draws a whole block at once. So its
draft token at a position depends on where the round began. Nothing is shared, and each round is a branch::

    a round   at 0     the   cat   ran   off          two are accepted
    that      at 1           cat   sat   up           two
    begins    at 2                 sat   down         two

What a lookup copies follows from the text. So nothing of it is recorded but how much of it is accepted at each start,
and replay copies again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from specctl.decoding.logits.logits import kept_in_turn
from specctl.decoding.lookup import Agreement
from specctl.errors import UsageError
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.policies import TOP_PROBS
from specctl.records import DraftStep


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Draft tokens at consecutive positions with their signals, as columns as long as ``tokens``."""

    tokens: list[int]  # ids
    # entropy, top_prob, token_prob: see `specctl.records.DraftStep`
    entropy: list[float]
    top_prob: list[float]
    token_prob: list[float]
    # what the draft's head predicts for the token fed just before the position; None without a head
    accept_prob: list[float] | None = None
    further: dict[str, list[float]] | None = None  # by name, the predictions of the draft's other heads
    # what a draft head predicts for the token that it would draft next; None if it does not
    next_accept_prob: list[float] | None = None
    # the `TOP_PROBS` largest probabilities at each position; None without a DISCO head
    top_probs: list[list[float]] | None = None
    agreement: list[float] | None = None  # see `with_agreement`

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: slice) -> "DraftSteps":
        columns: dict[str, Any] = {
            name: None if column is None else column[positions] for name, column in self._columns().items()
        }
        return DraftSteps(**columns)

    def __add__(self, after: "DraftSteps") -> "DraftSteps":
        others = after._columns()
        columns: dict[str, Any] = {
            name: None if column is None or others[name] is None else column + others[name]
            for name, column in self._columns().items()
        }
        return DraftSteps(**columns)

    def _columns(self) -> dict[str, Any]:
        """The columns by name, without the predictions of other heads."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "further"}

    def of_predictor(self, name: str) -> "DraftSteps":
        """These steps with the predictions of another head in ``accept_prob``."""
        return replace(self, accept_prob=(self.further or {})[name], further=None)

    def signals(self, position: int) -> list[float]:
        """Entropy, top probability and token probability at a position."""
        return [self.entropy[position], self.top_prob[position], self.token_prob[position]]

    def step(self, position: int, index: int, disco: DiscoPredictor | None = None) -> DraftStep:
        """The token at a position as the ``index``-th step of a round, with the prediction of a DISCO head."""
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
            None if self.next_accept_prob is None else self.next_accept_prob[position],
            self.own_accept_prob(position, index, disco),
            None if self.agreement is None else self.agreement[position],
        )

    def own_accept_prob(self, position: int, index: int, disco: DiscoPredictor | None) -> float | None:
        """A DISCO head's prediction for the token at a position as the ``index``-th of a round, computed as live."""
        if disco is None or self.top_probs is None:
            return None
        return disco.own_accept_prob(self.top_probs[position], self.entropy[position], index)


def draft_steps(tokens: list[int], columns: list[list[float]], predictors: Iterable[str]) -> DraftSteps:
    """Draft steps from columns: `DISTRIBUTION_SIGNALS`, each head's predictions, and perhaps the largest probabilities.

    Args:
        tokens: ids.
        columns: each as long as ``tokens``.
        predictors: names of the heads.
    """
    names = list(predictors)
    entropy, top_prob, token_prob, *more = columns
    predictions, tops = more[: len(names)], more[len(names) :]
    assert len(tops) in (0, TOP_PROBS)
    further = dict(zip(names[1:], predictions[1:], strict=True)) or None
    top_probs = list(map(list, zip(*tops, strict=True))) if tops else None
    first = predictions[0] if predictions else None
    return DraftSteps(tokens, entropy, top_prob, token_prob, first, further, top_probs=top_probs)


class Judged(NamedTuple):
    """Draft tokens at consecutive positions with the verdicts on them."""

    steps: DraftSteps  # the tokens with their signals
    accepted: Sequence[bool]  # whether verification accepts each, once it has accepted those before it in the round
    outcomes: Sequence[float]  # the probability of that; in greedy decoding 1 or 0
    # the number of each token in its round, from 1; all 1 where a token does not depend on where its round began, so
    # that any of them may be the first
    indices: Sequence[int]
    predictions: Sequence[float | None]  # what the draft's head predicts for each token; None where that is not known
    own_predictions: Sequence[float | None]  # what a DISCO head predicts

    @classmethod
    def of(
        cls,
        steps: DraftSteps,
        accepted: Sequence[bool],
        outcomes: Sequence[float],
        indices: Sequence[int],
        predictions: Sequence[float | None],
        disco: DiscoPredictor | None,
    ) -> "Judged":
        """Judged tokens with the predictions of a DISCO head, if there is one."""
        own = [steps.own_accept_prob(position, index, disco) for position, index in enumerate(indices)]
        return cls(steps, accepted, outcomes, indices, predictions, own)


@dataclass(frozen=True, slots=True)
class TokenChances:
    """Acceptance probabilities of tokens that are verified one by one, once those before them are accepted."""

    in_blocks: ClassVar[Literal[False]] = False
    along: list[float]  # of the shared token at each position; empty if rounds share none
    # of each branch, of the tokens that verification judges; empty if it judges shared ones only
    branches: list[list[float]]

    def of_round(self, start: int, shared: int, branch: int | None, count: int) -> tuple[float, ...]:
        """Of the judged tokens of a draft of ``count``.

        Args:
            start: where the round begins.
            shared: how many of its tokens stand in ``along``.
            branch: the number of the branch that follows them.
            count: the draft length.
        """
        return tuple(self.as_last(start, shared, branch, count))

    def as_last(self, start: int, shared: int, branch: int | None, count: int) -> list[float]:
        """Of each of the first ``count`` tokens; the draft length makes no difference here."""
        found = self.along[start : start + min(shared, count)]
        return (
            found + self.branches[branch][: max(0, count - shared)] if self.branches and branch is not None else found
        )


@dataclass(frozen=True, slots=True)
class BlockChances:
    """Of n consecutive draft tokens from the first of their round; `rows.host_verdict.passing` explains w and h."""

    weights: list[float]  # w_1 to w_n: given the first i tokens alone, the probability that these or more are accepted
    # h_0 to h_(n-1), h_0 = 1: the probability that the first i tokens pass, if the draft continues
    passing: list[float]

    def of_round(self, count: int) -> tuple[float, ...]:
        """Of each of the first ``count`` tokens, given all of them, the probability that it is accepted after those
        before it are."""
        if not count:
            return ()
        return tuple(kept_in_turn([*self.passing[1:count], self.weights[count - 1]]))

    def as_last(self, count: int) -> list[float]:
        """The same of each of the first ``count`` tokens, as the last of its draft."""
        pairs = zip(self.weights[:count], self.passing, strict=False)
        return [weight / (weight + (1 - weight) * passing) if weight else 0.0 for weight, passing in pairs]

    def __add__(self, after: "BlockChances") -> "BlockChances":
        return BlockChances(self.weights + after.weights, self.passing + after.passing)


@dataclass(frozen=True, slots=True)
class RoundChances:
    """`TokenChances` of tokens that are verified as blocks: they depend on where the round began."""

    in_blocks: ClassVar[Literal[True]] = True
    # of the shared tokens of the round that begins at each position; empty if rounds share none
    starts: list[BlockChances]
    branches: list[BlockChances]  # of the tokens of each branch

    def of_round(self, start: int, shared: int, branch: int | None, count: int) -> tuple[float, ...]:  # noqa: ARG002
        """Of the tokens of a draft of ``count``."""
        return self._of(start, branch).of_round(count)

    def as_last(self, start: int, shared: int, branch: int | None, count: int) -> list[float]:  # noqa: ARG002
        """Of each of the first ``count`` tokens, as the last of its draft."""
        return self._of(start, branch).as_last(count)

    def _of(self, start: int, branch: int | None) -> BlockChances:
        if branch is None:
            return self.starts[start]
        return self.starts[start] + self.branches[branch] if self.starts else self.branches[branch]


@dataclass(frozen=True)
class Recorded:
    """The rounds of a draft along a text of N tokens, written by the target or, in a hierarchy, by the draft above.

    Trace files hold it as it is.
    """

    # of the round that begins at each of the N positions, and at the end, the number of tokens that are accepted before
    # one is rejected, if it is long enough
    accepted_runs: list[int]
    shared: list[int]  # of each of these rounds, how many of its first tokens stand in ``along``
    # of each of these rounds, the number of the branch that follows; None if no further token is recorded
    tails: list[int | None]
    branches: list[DraftSteps]  # consecutive tokens, as many as were recorded
    along: DraftSteps | None = None  # the shared token at each of the N positions; None if rounds share none
    # acceptance probabilities when sampling; None in greedy decoding, for a draft below another one, and where tokens
    # are drawn independently of the text's
    chances: TokenChances | RoundChances | None = None
    # in a hierarchy, what the next draft drafts along ``along``, given the text before each position
    below: "Recorded | None" = None
    # in a hierarchy, what the next draft drafts along each branch; empty if nothing was recorded
    branches_below: "list[Recorded]" = field(default_factory=list)
    longest: int | None = None  # the most tokens that the draft can draft in a round; None for any number
    # whether the draft is a lookup. What it copies follows from the text, so there are no ``branches``, and each start
    # has its own ``chances``. Of a lookup below another draft nothing is recorded.
    copies: bool = False
    # R, where the draft's context ends within the token limit: it drafts no token at position R or after it. What is
    # recorded by position then covers only the first R. None where it does not end.
    reach: int | None = None
    # computes predictions of the steps for policies; files hold it once, in their header
    disco: Annotated[DiscoPredictor | None, Field(exclude=True)] = field(default=None, compare=False)

    def room(self, start: int, budget: int) -> int:
        """The number of tokens that a round can draft from a position within a budget and the draft's context."""
        return budget if self.reach is None else max(0, min(budget, self.reach - start))

    def run(self, start: int) -> int:
        """`accepted_runs` at a position; 0 after the draft's context."""
        return self.accepted_runs[start] if start < len(self.accepted_runs) else 0

    def step(self, start: int, index: int) -> DraftStep:
        """The ``index``-th step of a round that starts at a position.

        Each is made once, because thousands of settings replay the same steps.

        Raises:
            UsageError: the trace was recorded for shorter drafts.
        """
        steps = self._steps.setdefault(start, [])
        while len(steps) < index:
            steps.append(self._make_step(start, len(steps) + 1))
        return steps[index - 1]

    def _make_step(self, start: int, index: int) -> DraftStep:
        shared, tail = self.shared[start], self.tails[start]
        if index <= shared and self.along is not None:
            return self.along.step(start + index - 1, index, self.disco)
        if tail is None or index - shared > len(self.branches[tail]):
            raise UsageError(
                f"the trace was not recorded for drafts of {index} tokens",
                "record a new one, or replay policies with a smaller max_draft",
            )
        return self.branches[tail].step(index - shared - 1, index, self.disco)

    def verified_chances(self, start: int, drafted: int, judged: int) -> tuple[float, ...] | None:
        """`specctl.records.Round.chances` of a round of ``drafted`` tokens, the first ``judged`` judged."""
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
        """Whether tokens and verdicts at a position are the same in every round that reaches it."""
        return self.along is not None and not (self.chances is not None and self.chances.in_blocks)

    def judged(self) -> Iterator[Judged]:
        """The tokens that verification judges: for every start, up to the first that is rejected.

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
            count = min(run + 1, len(row))
            accepted = [number < run for number in range(count)]
            # A head predicts for a token once it is fed, so its prediction stands at the step after.
            after: list[float | None] = [] if row.accept_prob is None else [*row.accept_prob[1 : count + 1]]
            after += [None] * (count - len(after))
            outcomes = self._outcomes(start, count)
            yield Judged.of(row[:count], accepted, outcomes, range(1, count + 1), after, self.disco)

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
        """The next draft's recording along the tokens that this draft generates in a round starting at a position.

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
        """A copy with all steps changed."""
        along = None if self.along is None else change(self.along)
        return replace(self, along=along, branches=[change(branch) for branch in self.branches])

    def of_predictor(self, name: str) -> "Recorded":
        """A copy with the predictions of another head of the draft; itself if no other head has that name."""
        own = self.branches if self.along is None else [self.along]
        if not any(name in (steps.further or {}) for steps in own):
            return self
        if name not in self._by_predictor:
            self._by_predictor[name] = self.each(lambda steps: steps.of_predictor(name))
        return self._by_predictor[name]

    def of_disco(self, levels: Sequence[DiscoPredictor | None]) -> "Recorded":
        """A copy with a DISCO head for each level from its own down; itself if no level has one."""
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
    """The recording of a draft model whose tokens are verified one by one.

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
    """The empty recording of a draft whose context the prompt fills; ``chances`` must be empty."""
    return Recorded([0], [0], [None], [], DraftSteps([], [], [], []), chances, reach=0)


def recorded_by_start(
    rows: list[DraftSteps],
    runs: list[int],
    longest: int | None = None,
    chances: list[list[float]] | None = None,
    blocks: list[BlockChances] | None = None,
) -> Recorded:
    """The recording of a draft head.

    Args:
        rows: for each of the N positions, the tokens of a round that begins there, accepted or not; fewer than were
            asked for where the token limit or an end of sequence comes first.
        runs: for each of the N positions, how many tokens of the row are accepted before the first that is rejected.
        longest: see `Recorded`.
        chances: when sampling, for each position, the acceptance probability of each token of the row up to the first
            that is rejected, this one included, once those before it are accepted.
        blocks: when sampling with block verification, in place of ``chances``.
    """
    one_by_one = None if chances is None else TokenChances([], chances)
    known = one_by_one if blocks is None else RoundChances([], blocks)
    nothing = [0] * (len(rows) + 1)
    return Recorded([*runs, 0], nothing, [*range(len(rows)), None], rows, chances=known, longest=longest)


COPIES = Recorded([], [], [], [], copies=True)
"""The recording of a lookup below another draft."""


def recorded_copies(runs: list[int], chances: list[list[float]] | None = None) -> Recorded:
    """The recording of a lookup that the target verifies.

    Args:
        runs: for each of the N positions, how many tokens of a copy that begins there are accepted before the first
            that is rejected.
        chances: when sampling, for each position, the acceptance probability of each copied token up to the first that
            is rejected, this one included, once those before it are accepted.
    """
    known = None if chances is None else TokenChances([], chances)
    count = len(runs)
    return Recorded([*runs, 0], [0] * (count + 1), [*range(count), None], [], chances=known, copies=True)


def _joined(trunk: Recorded, branch: Recorded, first: int) -> Recorded:
    """The recording of a draft model along the first positions of one text, followed by the whole of another text."""
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


@dataclass(frozen=True, slots=True)
class Trace:
    """One generated sequence with every signal that a policy could have read."""

    # prompt, category, turn: the prompt's id and category, and the number of the turn that was generated
    prompt: str
    category: str
    turn: int
    prompt_tokens: int  # length of the prompt
    limit: int  # the token limit in force
    tokens: list[int]  # N ids, the text that the target wrote
    draft: Recorded  # the first draft's recording along this text
    prefill_ms: float  # time in which all models read the prompt, in milliseconds
    # of the prompt, from which a lookup in a chain copies; empty where they are not known
    prompt_ids: list[int] = field(default_factory=list)

    def of_predictor(self, name: str | None) -> "Trace":
        """A copy with the predictions of another head of the draft; itself for None."""
        return self if name is None else replace(self, draft=self.draft.of_predictor(name))

    def of_disco(self, levels: Sequence[DiscoPredictor | None]) -> "Trace":
        """A copy with a DISCO head for each draft, from the top down; itself if no draft has one."""
        return replace(self, draft=self.draft.of_disco(levels)) if any(levels) else self

    def require_prompt(self) -> None:
        """Raise UsageError if the trace lacks the ids of the prompt."""
        if len(self.prompt_ids) != self.prompt_tokens:
            raise UsageError(
                "the trace lacks the prompts, from which a lookup copies", "record it again, with another --output"
            )


def with_agreement(trace: Trace) -> Recorded:
    """The recorded draft of a trace with the signal ``agreement`` at each step.

    The signal follows from the tokens, so files omit it.

    Raises:
        UsageError: the trace lacks the prompt.
    """
    trace.require_prompt()
    draft, agreement, before = trace.draft, Agreement(), [*trace.prompt_ids]
    along, branches = draft.along, [*draft.branches]
    # The tokens before a shared branch are the same in every round that has it; the last of these rounds has fewest.
    last = {tail: start for start, tail in enumerate(draft.tails) if tail is not None}
    tails = {start: tail for tail, start in last.items()}
    found: list[float] = []
    for start, token in enumerate(trace.tokens if draft.reach is None else trace.tokens[: draft.reach]):
        if along is not None:
            agreement.begin(before)
            found.append(agreement.of(along.tokens[start]))
        if (tail := tails.get(start)) is not None:
            agreement.begin(before)
            for drafted in [] if along is None else along.tokens[start : start + draft.shared[start]]:
                agreement.of(drafted)
            branch = branches[tail]
            branches[tail] = replace(branch, agreement=[agreement.of(drafted) for drafted in branch.tokens])
        before.append(token)
    return replace(draft, along=None if along is None else replace(along, agreement=found), branches=branches)
