"""The row of a grid: a draft head's tokens of the round that begins at one position, as they are drawn."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.recording.tails import Tail
from specctl.replay.steps import DraftSteps, draft_steps


@dataclass(slots=True, eq=False)
class Row:
    """The row of one start, as it grows.

    Attributes:
        start: position in the text.
        room: the most tokens that it may have.
        eos: ids behind which no token can follow.
        tokens: the draft tokens so far.
        values: of each token `DISTRIBUTION_SIGNALS`, then each head's prediction, then what DISCO heads read.
        accepted: how many tokens are accepted before the first that is rejected.
        chances: when sampling, the probability of accepting each judged token; of tokens verified as a block, w.
        passing: of tokens verified as a block, h before each.
        rejected: whether a token is rejected.
        tail: of tokens verified as a block, the rejected one and those behind it.
        foreseen: what the draft predicts, after each token, for the next; empty if it does not.
    """

    start: int
    room: int
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    accepted: int = 0
    chances: list[float] = field(default_factory=list)
    passing: list[float] = field(default_factory=list)
    rejected: bool = False
    tail: Tail | None = None
    foreseen: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens) + (0 if self.tail is None else len(self.tail.tokens) + len(self.tail.drafted))

    def __getitem__(self, place: int) -> int:
        if place < len(self.tokens) or self.tail is None:
            return self.tokens[place]
        return [*self.tail.tokens, *self.tail.drafted][place - len(self.tokens)]

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.start + len(self)

    @property
    def full(self) -> bool:
        """Whether no further token may follow."""
        if self.tail is not None:
            return self.tail.full
        return len(self.tokens) == self.room or (bool(self.tokens) and self.tokens[-1] in self.eos)

    @property
    def newest(self) -> list[float]:
        """The values of the newest token."""
        if self.tail is None:
            return self.values[-1]
        return (self.tail.drafted_values or self.tail.values)[-1]

    def draft(self, token: int, values: list[float], logits: torch.Tensor) -> None:
        """Note the next token, which the draft drew from these logits ``(V,)``."""
        if self.tail is not None:
            self.tail.draft(token, values, logits)
        else:
            self.tokens.append(token)
            self.values.append(values)

    def end_block(self) -> None:
        """The newest token is the first that a block does not keep."""
        token, values, weight, passing = self.tokens.pop(), self.values.pop(), self.chances.pop(), self.passing.pop()
        room = self.room - len(self.tokens)
        self.tail = Tail(self.position, room, self.eos, [token], [values], [weight], [passing])

    def finish(self) -> None:
        """Take in the tail."""
        if self.tail is not None:
            self.tokens += self.tail.tokens
            self.values += self.tail.values
            self.chances += self.tail.weights
            self.passing += self.tail.passing
            self.tail = None

    def steps(self, predictors: Iterable[str]) -> DraftSteps:
        """The tokens with their signals and the predictions of heads of these names."""
        names = list(predictors)
        columns = list(map(list, zip(*self.values, strict=True))) or [[] for _ in (*DISTRIBUTION_SIGNALS, *names)]
        return replace(draft_steps(self.tokens, columns, names), next_accept_prob=self.foreseen or None)
