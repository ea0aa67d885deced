"""Block draft heads: one pass drafts a whole block (DFlash), and a light head makes it a chain (DSpark, DFlash2)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import Cache

from specctl.models.draft_heads.block_config import BlockConfig
from specctl.models.draft_heads.dflash2 import CandidateSelector, ConvolvedLayer
from specctl.models.draft_heads.head import Borrowed, DraftHead
from specctl.models.draft_heads.head_layers import DecoderLayer, Rotary
from specctl.models.draft_heads.markov import MARKOV


class BlockPass(NamedTuple):
    """What the backbone makes of a block.

    Attributes:
        logits: ``(B, D)``, before the sequential head adds to them.
        hidden: ``(B, H)``, what the output layer read.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class BlockHead(DraftHead):
    """DFlash (arXiv 2602.06036), DFlash2 and DSpark (arXiv 2607.05147).

    Its decoder layers read the newest token and B - 1 masks behind it. Queries come from these only; keys and values
    also from the fused states of all places before (`context_rows`). Inside the block everything attends to everything,
    unless ``sights`` of a layer say otherwise.

    Args:
        config: the network.
        tokens: ``(D,)`` int64, the verifier's id of each draft token; None if D = V.
        embeddings: the verifier's input embeddings, used as they are and no part of this module; None for embeddings of
            its own.
        output: the same for the output layer.

    Attributes:
        config: the network.
        block_size: B.
        longest: the most tokens that it drafts in one pass.
    """

    longest: int

    def __init__(
        self,
        config: BlockConfig,
        tokens: torch.Tensor | None = None,
        embeddings: nn.Module | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(tokens)
        shape = config.shape
        self.config = config
        self.layers, self.state_size, self.width = config.layers, shape.hidden_size, shape.hidden_size
        self.kind = "dflash" if config.markov is None and not config.confidence else "dspark"
        if config.markov == "selector":
            self.kind = "dflash2"
        self.vocabulary, self.draft_vocabulary = config.vocabulary, config.draft_vocabulary
        self.cached_values = config.num_layers * shape.cached_values
        self.block_size, self.num_layers, self.context = config.block_size, config.num_layers, config.context
        self.longest = config.block_size - config.first_row
        # The output layer's forward method is not called: hooks on it keep the verifier's last states.
        self._embeddings = None if embeddings is None else Borrowed(embeddings)
        self._output = None if output is None else Borrowed(output)
        if embeddings is None:
            self.embed_tokens = nn.Embedding(config.vocabulary, shape.hidden_size)
        self.fc = nn.Linear(len(config.layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = shape.norm()
        self.rotary = Rotary(shape)
        self.decoder = nn.ModuleList(self._layer() for _ in range(config.num_layers))
        self.norm = shape.norm()
        if output is None:
            self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocabulary, bias=False)
        if config.markov == "selector":
            self.candidate_selector = CandidateSelector(
                config.vocabulary, config.markov_rank, shape.hidden_size, config.candidates
            )
        elif config.markov is not None:
            self.markov_head = MARKOV[config.markov](
                config.vocabulary, config.draft_vocabulary, config.markov_rank, shape.hidden_size
            )
        if config.confidence:
            more = config.markov_rank if config.confidence_reads_token else 0
            self.confidence = nn.Linear(shape.hidden_size + more, 1)

    def _layer(self) -> DecoderLayer:
        config = self.config
        if not config.taps:
            return DecoderLayer(config.shape)
        return ConvolvedLayer(config.shape, config.taps, config.group, config.block_size)

    def context_rows(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The fused states ``(..., H)`` of places whose states are given, ``(..., H)`` for each of ``layers``."""
        fused: torch.Tensor = self.hidden_norm(self.fc(torch.cat([states[layer] for layer in self.layers], -1)))
        return fused

    def remember(self, rows: torch.Tensor, positions: torch.Tensor, cache: Cache) -> None:
        """Write the keys and values of T places, which blocks after them attend to.

        Args:
            rows: ``(1, T, H)`` of `context_rows`.
            positions: ``(T,)`` int64, the places.
            cache: whose layers write where the caller points.
        """
        rope = self.rotary(positions)
        for index, layer in enumerate(self.decoder):
            cache.update(*layer.self_attn.keys_values(rows, rope), index)  # type: ignore[operator, union-attr]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``(..., H)`` of ids ``(...)``."""
        embeddings: Any = self._embeddings.module if self._embeddings else self.embed_tokens
        if (scale := self.config.raw_embeddings) is not None:
            return embedding(ids, embeddings.weight) * scale
        found: torch.Tensor = embeddings(ids)
        return found

    @property
    def borrowed_output(self) -> nn.Module | None:
        return self._output.module if self._output else None

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache,
        keys: torch.Tensor | None = None,
    ) -> BlockPass:
        """Read a block, or several.

        Args:
            ids: ``(1, B)`` int64, the newest token and masks.
            positions: ``(B,)`` int64, their places.
            mask: ``(1, 1, B, S)`` bool, which cached places each attends to; None for all.
            cache: whose layers write the block's keys and values where the caller points and return all S of them.
            keys: ``(S,)`` int64, the places of these; read only where ``sights`` are limited.
        """
        config = self.config
        rope = self.rotary(positions)
        states = self.embed(ids)  # (1, B, H)
        masks = [mask] * config.num_layers
        if config.sights:
            assert mask is not None, "there are no exports of such heads"
            assert keys is not None, "there are no exports of such heads"
            anchors = positions.view(-1, config.block_size)[:, :1].expand(-1, config.block_size).flatten()
            masks = [mask & sight.seen(positions, anchors, keys) for sight in config.sights]
        for index, (layer, seen) in enumerate(zip(self.decoder, masks, strict=True)):
            states = layer(states, rope, seen, cache, index)
        hidden = self.norm(states)[0]
        output: Any = self._output.module if self._output else self.lm_head
        logits = linear(hidden, output.weight, output.bias)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_cap:
            logits = torch.tanh(logits / config.logit_cap) * config.logit_cap
        return BlockPass(logits, hidden)

    def blank(self) -> torch.Tensor:
        """The sequential head's memory ``(R,)`` before a block's first row; R = 0 where there is no such head."""
        return self.norm.weight.new_zeros(self.config.markov_rank)

    def row(
        self, base: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of one row of the block, given the token before it.

        Args:
            base: ``(..., D)``, the row of the pass.
            hidden: ``(..., H)``, its hidden state.
            token: ``(...)`` int64, the token at the place before the one it predicts.
            memory: ``(..., R)``, from the row before it, or `blank`.

        Returns:
            ``(..., D)``, and the next row's memory ``(..., R)``.
        """
        if self.config.markov == "selector":
            return self.candidate_selector(base, hidden, token), memory
        if self.config.markov is not None:
            bias, memory = self.markov_head(token, hidden, memory)
            base = base + bias
        return base, memory

    def confidence_logit(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The logit ``(...)`` of c_k, the probability that a row's token is accepted if all before it are.

        It reads the row and the token before it, not the token drawn from the row (arXiv 2607.05147, Eq. 7).

        Args:
            hidden: ``(..., H)``, the row's hidden state.
            token: ``(...)`` int64, the token at the place before the one it predicts.
        """
        if self.config.confidence_reads_token:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(token)], -1)
        found: torch.Tensor = self.confidence(hidden)[..., 0]
        return found

    def accept_prob(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """c_k ``(...)`` float32; see `confidence_logit`."""
        return self.confidence_logit(hidden, token).float().sigmoid()
