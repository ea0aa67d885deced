"""EAGLE-3: one decoder layer over the fused states of several of the verifier's layers (arXiv 2503.01840)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import Cache

from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.head import Borrowed
from specctl.models.draft_heads.head_layers import Attention, DecoderLayer, GatedNetwork, LayerShape, Rope, Rotary


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 network.

    Attributes:
        shape: of its layers, H their width.
        layers: the verifier's layers whose states it reads, in the order in which they are concatenated.
        vocabulary: V, the verifier's.
        draft_vocabulary: D, how many of the V tokens it can draft.
        num_layers: its decoder layers; all but the first are ordinary ones.
        target_hidden_size: width of the verifier's states.
        norm_before_residual: whether the first layer's residual is the normed row, not the row itself.
        norm_before_fc: whether the concatenated states go through one RMSNorm.
        fc_norm: whether each layer's states go through an RMSNorm of their own.
        norm_output: whether the recursion is the normed output, not the output itself (EAGLE-3.1).
        mask_token: P-EAGLE's id of a token to come; None for EAGLE-3.
        block: tokens that P-EAGLE drafts in a pass.
        window: of its layers, all of them alike; 0 where they see the whole text.
        context: the most tokens it can read.
    """

    shape: LayerShape
    layers: tuple[int, ...]
    vocabulary: int
    draft_vocabulary: int
    target_hidden_size: int
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token: int | None = None
    block: int = 0
    window: int = 0
    context: int = 2048


class FirstLayer(nn.Module):
    """The layer that reads a token's embedding beside a row: queries, keys and values are made from both.

    ``e = input_layernorm(embedding)``, ``h = hidden_norm(row)``; attention reads ``cat(e, h)``, and the residual is the
    row, or h with ``norm_before_residual``.
    """

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.input_layernorm = shape.norm()
        self.hidden_norm = shape.norm()
        self.self_attn = Attention(shape, reads=2 * shape.hidden_size)
        self.post_attention_layernorm = shape.norm()
        self.mlp = GatedNetwork(shape)
        self._norm_before_residual = norm_before_residual

    def joined(self, embeds: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, ``(B, T, 2H)``, and the residual ``(B, T, H)``, of two ``(B, T, H)``."""
        normed = self.hidden_norm(rows)
        read = torch.cat([self.input_layernorm(embeds), normed], -1)
        return read, normed if self._norm_before_residual else rows

    def finished(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output ``(B, T, H)`` of the residual and attention's output."""
        states = residual + attended
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output

    def forward(
        self, embeds: torch.Tensor, rows: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: Cache
    ) -> torch.Tensor:  # (1, T, H)
        read, residual = self.joined(embeds, rows)
        return self.finished(residual, self.self_attn(read, rope, mask, cache, 0))


class Eagle3Head(ChainHead):
    """An EAGLE-3 draft head, or P-EAGLE's (arXiv 2602.01469).

    P-EAGLE has learned states that stand for those that the verifier has not made yet: with them and a mask for a token
    it reads all places of a block in one pass.

    Args:
        config: the network.
        tokens: ``(D,)`` int64, the verifier's id of each draft token; None if D = V.
        embeddings: the verifier's input embeddings ``(V, H)``, whose weight is used as it is, neither trained nor
            saved nor moved with the head; None for embeddings of its own.
    """

    kind = "eagle3"

    def __init__(
        self, config: Eagle3Config, tokens: torch.Tensor | None = None, embeddings: nn.Module | None = None
    ) -> None:
        super().__init__(tokens)
        shape, sources = config.shape, len(config.layers)
        self.config = config
        self.layers, self.state_size, self.width = config.layers, config.target_hidden_size, shape.hidden_size
        self.vocabulary, self.draft_vocabulary = config.vocabulary, config.draft_vocabulary
        self.num_layers, self.context, self.window = config.num_layers, config.context, config.window
        self.cached_values = config.num_layers * shape.cached_values
        self._embeddings = None if embeddings is None else Borrowed(embeddings)
        if embeddings is None:
            self.embed_tokens = nn.Embedding(config.vocabulary, shape.hidden_size)
        if config.norm_before_fc:
            self.input_norm = shape.norm(sources * config.target_hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(shape.norm(config.target_hidden_size) for _ in range(sources))
        if config.mask_token is not None:
            self.kind, self.longest, self.mask_token = "peagle", config.block, config.mask_token
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, sources * config.target_hidden_size))
        self.fc = nn.Linear(sources * config.target_hidden_size, shape.hidden_size, bias=False)
        self.rotary = Rotary(shape)
        self.first = FirstLayer(shape, norm_before_residual=config.norm_before_residual)
        self.further = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers - 1))
        self.norm = shape.norm()
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocabulary, bias=False)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``(..., H)`` of ids ``(...)``.

        The verifier's are read without the factor that some models multiply theirs by: heads are trained on the
        weights.
        """
        return embedding(ids, (self._embeddings.module if self._embeddings else self.embed_tokens).weight)

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        parts = [states[layer] for layer in self.layers]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        together = torch.cat(parts, -1)  # (..., sources * target_hidden_size)
        fused: torch.Tensor = self.fc(self.input_norm(together) if self.config.norm_before_fc else together)
        return fused

    def mask_row(self) -> torch.Tensor | None:
        if self.mask_token is None:
            return None
        parts = self.mask_hidden[0].chunk(len(self.layers), -1)
        return self.fuse(dict(zip(self.layers, parts, strict=True)))

    def output(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What follows the last layer's output ``(..., H)``.

        Returns:
            Logits ``(..., D)`` over the draft vocabulary, what the output layer read ``(..., H)``, and the recursion's
            rows ``(..., H)``.
        """
        normed = self.norm(states)
        return self.lm_head(normed), normed, normed if self.config.norm_output else states

    def forward(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
    ) -> ChainPass:
        rope = self.rotary(positions)
        states = self.first(self.embed(ids), rows, rope, mask, cache)
        for index, layer in enumerate(self.further, start=1):
            states = layer(states, rope, mask, cache, index)
        logits, hidden, further = self.output(last_of(states, keep))
        return ChainPass(logits, hidden, further)
