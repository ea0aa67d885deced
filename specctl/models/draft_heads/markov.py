"""DSpark's sequential heads: what the token drawn last adds to the logits of the next row (arXiv 2607.05147, 3.1)."""

from typing import Literal

import torch
from torch import nn

MarkovKind = Literal["vanilla", "gated", "rnn"]


class MarkovBias(nn.Module):
    """A bias of low rank, ``W2 W1[x]`` for the token x drawn last (``vanilla``).

    Args:
        vocabulary: V, of the tokens drawn.
        draft_vocabulary: D, of the logits.
        rank: R.
        width: H, of the backbone's rows.
    """

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int) -> None:  # noqa: ARG002
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias of one row of the block, and the memory that the row after it reads.

        Args:
            tokens: ``(...)`` int64, the tokens drawn before the rows' own.
            rows: ``(..., H)``, the backbone's.
            memory: ``(..., R)``, zeros at the first row; only ``rnn`` reads and changes it.

        Returns:
            ``(..., D)`` and ``(..., R)``.
        """
        latent, memory = self.latent(self.markov_w1(tokens), rows, memory)
        return self.markov_w2(latent), memory

    def latent(
        self,
        embedded: torch.Tensor,
        rows: torch.Tensor,  # noqa: ARG002 - other kinds read it
        memory: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What W2 reads, of the embedded tokens ``(..., R)``, and the memory after it: ``(..., R)`` each."""
        return embedded, memory


class GatedBias(MarkovBias):
    """``W2 (g * W1[x])`` with a gate g that reads the backbone's row h: ``g = sigmoid(gate_proj [h; W1[x]])``."""

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, draft_vocabulary, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def latent(
        self, embedded: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([rows, embedded], -1))) * embedded, memory


class RecurrentBias(MarkovBias):
    """A gated recurrence over all tokens drawn in the block (``rnn``).

    ``[g; c; o] = joint_proj [s; W1[x]; h]``; the bias is ``W2 tanh(o)`` and the next memory
    ``sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)``.
    """

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, draft_vocabulary, rank, width)
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def latent(
        self, embedded: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([memory, embedded, rows], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * memory + (1 - gate) * torch.tanh(candidate)


MARKOV: dict[MarkovKind, type[MarkovBias]] = {"vanilla": MarkovBias, "gated": GatedBias, "rnn": RecurrentBias}
"""The sequential heads by their names in configurations."""
