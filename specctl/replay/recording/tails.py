"""The draft tokens of a block from the first that is not kept on, as they are drawn."""

from dataclasses import dataclass, field

import torch

from specctl.decoding.rows.draws import sibling
from specctl.decoding.rows.token_columns import token_row
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.recording.block_coupling import draw_unkept

HELD = 512
"""Distributions of the draft that are held at once, while it goes on alone."""


@dataclass(slots=True, eq=False)
class Tail:
    """Tokens that stand, and behind them tokens as the draft alone goes on, which the verifier has not read yet.

    Attributes:
        position: of the first token in the text that it departs from.
        room: the most tokens.
        eos: ids behind which no token can follow.
        tokens: those that stand, at least one.
        values: of each `DISTRIBUTION_SIGNALS`, then each head's prediction.
        weights, passing: of each, see `specctl.replay.recording.block_coupling.InBlocks`.
        drafted: tokens behind them.
        drafted_values: of each of these.
        logits: ``(V,)`` of each of these.
    """

    position: int
    room: int
    eos: frozenset[int]
    tokens: list[int]
    values: list[list[float]]
    weights: list[float]
    passing: list[float]
    drafted: list[int] = field(default_factory=list)
    drafted_values: list[list[float]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether no further token may follow."""
        newest = (self.drafted or self.tokens)[-1]
        return len(self.tokens) + len(self.drafted) >= self.room or newest in self.eos

    def draft(self, token: int, values: list[float], logits: torch.Tensor) -> None:
        """Note the token with which the draft goes on."""
        self.drafted.append(token)
        self.drafted_values.append(values)
        self.logits.append(logits)

    @property
    def to_read(self) -> list[int]:
        """What the verifier has to read behind the text, so as to give a distribution for each drafted token."""
        return [*self.tokens, *self.drafted[:-1]]

    def settle(self, verifier_probs: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """Draw which of the drafted tokens stand, and the one in the place of the first that does not.

        Args:
            verifier_probs: ``(C, V)`` at each of the C drafted tokens.
            sampling: of both models.
            generator: draws.
        """
        device = verifier_probs.device
        logits = torch.stack(self.logits)  # (C, V)
        drafted = torch.tensor(self.drafted, device=device)  # (C,)
        draft_probs = sampling.probs(logits).to(device)
        found = draw_unkept(drafted, draft_probs, verifier_probs, self.weights[-1], sibling(generator, device))
        count = len(found.tokens)
        self.values += self.drafted_values[:count]
        if found.tokens[-1] != self.drafted[count - 1]:
            changed = token_row(Forward(logits[count - 1 : count]), found.tokens[-1])
            self.values[-1][: len(DISTRIBUTION_SIGNALS)] = changed
        self.tokens += found.tokens
        self.weights += found.weights
        self.passing += found.passing
        self.drafted, self.drafted_values, self.logits = [], [], []
