"""What DFlash2 adds to DFlash (z-lab 2026): convolutions inside the block, and a selector among candidates."""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import Cache

from specctl.models.draft_heads.head_layers import DecoderLayer, LayerShape, Rope


class DynamicConvolution(nn.Module):
    """Two causal convolutions over a block's rows, one before and one after a part of a layer.

    Each number of a row becomes a weighted sum of those at its place in the last C rows of the block. The weights are
    constants of this number plus what one projection of the row makes for each group of G numbers.

    Args:
        width: H.
        taps: C.
        group: G, a divisor of H.
        block_size: B, rows of a block; nothing is read across its start.
    """

    def __init__(self, width: int, taps: int, group: int, block_size: int) -> None:
        super().__init__()
        self._taps, self._groups, self._block_size = taps, width // group, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self._groups, bias=False)

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``(1, T, H)`` of whole blocks for the part to read, and the weights ``(1, T, C, groups)`` of `after`."""
        found = self.kernel_projection(rows).unflatten(-1, (2, self._taps, self._groups))
        return self._convolved(rows, found[..., 0, :, :], self.base_kernel[0]), found[..., 1, :, :]

    def after(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What becomes of the part's output ``(1, T, H)``."""
        return self._convolved(rows, weights, self.base_kernel[1])

    def _convolved(self, rows: torch.Tensor, weights: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(-1, self._block_size, self._groups, rows.shape[-1] // self._groups)
        own = weights.reshape(-1, self._block_size, self._taps, self._groups, 1)
        total = torch.zeros_like(blocks)
        for tap in range(self._taps):
            earlier = pad(blocks, (0, 0, 0, 0, tap, 0))[:, : self._block_size]
            total = total + earlier * (base[tap].view(self._groups, -1) + own[:, :, tap])
        return total.view_as(rows)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with a `DynamicConvolution` around its attention and one around its network.

    Args:
        shape: of the layer.
        taps, group, block_size: of the convolutions.
    """

    def __init__(self, shape: LayerShape, taps: int, group: int, block_size: int) -> None:
        super().__init__(shape)
        self.attention_conv = DynamicConvolution(shape.hidden_size, taps, group, block_size)
        self.mlp_conv = DynamicConvolution(shape.hidden_size, taps, group, block_size)

    def forward(
        self, states: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: Cache, layer: int
    ) -> torch.Tensor:  # (1, T, H)
        read, weights = self.attention_conv.before(self.input_layernorm(states))
        states = states + self.attention_conv.after(self.self_attn(read, rope, mask, cache, layer), weights)
        read, weights = self.mlp_conv.before(self.post_attention_layernorm(states))
        return states + self.mlp_conv.after(self.mlp(read), weights)


class CandidateSelector(nn.Module):
    """Scores a row's likeliest tokens by the token before them; no other token can be drafted.

    The score of candidate b after token a is its logit plus ``<A[a] * P h, S[b]>`` for the row's hidden state h.

    Args:
        vocabulary: V.
        rank: R, length of the embeddings A and S.
        width: H.
        count: K, candidates of a row.
    """

    def __init__(self, vocabulary: int, rank: int, width: int, count: int) -> None:
        super().__init__()
        self._count = count
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, logits: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Scores ``(..., V)``, -inf for all but K tokens.

        Args:
            logits: ``(..., V)``, the pass's.
            hidden: ``(..., H)``.
            tokens: ``(...)`` int64, those before the rows' own.
        """
        best, ids = logits.topk(self._count, dim=-1)
        context = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)  # (..., R)
        scores = best + (context[..., None, :] * self.successor_codebook[ids]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, scores)
