"""Block draft heads: one pass drafts a whole block (DFlash); a light sequential head may link its tokens (DSpark,
DFlash2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding, linear, pad
from transformers import Cache

from specctl.models.draft_heads.head import Borrowed, DraftHead
from specctl.models.draft_heads.head_layers import DecoderLayer, LayerShape, Rope, Rotary

MarkovKind = Literal["vanilla", "gated", "rnn"]
SequentialKind = MarkovKind | Literal["selector"]  # DSpark's sequential heads, and DFlash2's


@dataclass(frozen=True, slots=True)
class BlockSight:
    """What the rows of a block attend to in one layer."""

    window: int = 0  # W, the window; 0 for no limit
    causal: bool = False  # whether a row sees no later position
    # whether the window is the W positions before the block for all rows (speculators); else a row sees the W - 1
    # positions before its own and, unless causal, W - 1 after it (z-lab)
    from_anchor: bool = False

    def seen(self, places: torch.Tensor, anchors: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which of the S positions ``keys`` each of T rows at ``places`` sees: ``(T, S)`` bool.

        ``anchors`` ``(T,)`` are the first positions of the rows' blocks; all are int64.
        """
        ahead = keys - places[:, None]
        found = torch.ones_like(ahead, dtype=torch.bool)
        if self.window and self.from_anchor:
            found = keys >= anchors[:, None] - self.window
        elif self.window:
            found = ahead.abs() < self.window
        return found & (ahead <= 0) if self.causal else found


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """The configuration of a block draft head."""

    shape: LayerShape  # of its decoder layers; H is the verifier's hidden size too
    layers: tuple[int, ...]  # the verifier's layers whose states it reads, in the order in which they are concatenated
    vocabulary: int  # V, the verifier's
    draft_vocabulary: int  # D, the number of the V tokens that it can draft
    num_layers: int  # its decoder layers
    block_size: int  # B, positions in a pass, including the newest token's
    mask_token: int  # the mask token's id, in place of tokens to be drafted
    # whether the newest token's own row predicts the token after it, so that all B rows do (DSpark); else the row of
    # each masked place predicts that place (DFlash)
    from_anchor: bool = False
    markov: SequentialKind | None = None  # the kind of sequential head; None for independent rows
    markov_rank: int = 0  # R
    candidates: int = 0  # K, candidate tokens that a ``selector`` keeps per row
    taps: int = 0  # width of the layers' convolutions (DFlash2); 0 without them
    group: int = 1  # channels that share weights of a convolution
    sights: tuple[BlockSight, ...] = ()  # attention limits by layer; empty if all see the whole text and block
    # factor for the verifier's embedding weights; None to embed as the verifier does
    raw_embeddings: float | None = None
    logit_scale: float = 1.0  # factor for logits
    logit_cap: float = 0.0  # soft limit of logits, ``cap * tanh(x / cap)``; 0 for none
    confidence: bool = False  # whether it predicts acceptance
    # whether this prediction also reads the sequential head's embedding of the last token
    confidence_reads_token: bool = False
    context: int = 2048  # the longest sequence in tokens

    @property
    def first_row(self) -> int:
        """The row that predicts the token after the newest one."""
        return 0 if self.from_anchor else 1


class MarkovBias(nn.Module):
    """DSpark's sequential head: a bias on a row's logits from the previous token (arXiv 2607.05147, 3.1).

    ``vanilla`` is a low-rank bias of rank R, ``W2 W1[x]``, for the token x before the row's own.
    """

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int) -> None:  # noqa: ARG002
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)

    def forward(
        self, tokens: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias ``(..., D)`` of one row, and the recurrent state ``(..., R)`` for the next row.

        Args:
            tokens: ``(...)`` int64, those before the rows' own.
            rows: ``(..., H)``, the backbone's.
            memory: ``(..., R)``, zeros at the first row; only ``rnn`` reads and changes it.
        """
        latent, memory = self.latent(self.markov_w1(tokens), rows, memory)
        return self.markov_w2(latent), memory

    def latent(
        self,
        embedded: torch.Tensor,
        rows: torch.Tensor,  # noqa: ARG002 - other kinds read it
        memory: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of W2 for embedded tokens ``(..., R)``, and the next recurrent state: ``(..., R)`` each."""
        return embedded, memory


class GatedBias(MarkovBias):
    """``W2 (g * W1[x])`` with a gate on the backbone's row h: ``g = sigmoid(gate_proj [h; W1[x]])``."""

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int, width: int) -> None:
        super().__init__(vocabulary, draft_vocabulary, rank, width)
        self.gate_proj = nn.Linear(width + rank, rank)

    def latent(
        self, embedded: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(self.gate_proj(torch.cat([rows, embedded], -1))) * embedded, memory


class RecurrentBias(MarkovBias):
    """A gated recurrence over all earlier tokens of the block (``rnn``).

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


class DynamicConvolution(nn.Module):
    """DFlash2's causal convolutions over a block's rows, before and after a sublayer (z-lab 2026).

    Each channel of a row becomes a weighted sum over the last C rows of its block of B. The weights are the channel's
    constants plus a projection of the row, shared by each group of G channels; G divides H.
    """

    def __init__(self, width: int, taps: int, group: int, block_size: int) -> None:
        super().__init__()
        self._taps, self._groups, self._block_size = taps, width // group, block_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self._groups, bias=False)

    def before(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sublayer's input ``(1, T, H)`` for rows of whole blocks, and the weights ``(1, T, C, groups)`` for
        `after`.
        """
        found = self.kernel_projection(rows).unflatten(-1, (2, self._taps, self._groups))
        return self._convolved(rows, found[..., 0, :, :], self.base_kernel[0]), found[..., 1, :, :]

    def after(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The convolution of the sublayer's output ``(1, T, H)``."""
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
    """A decoder layer of DFlash2, with a `DynamicConvolution` around its attention and one around its network."""

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
    """DFlash2's scores of a row's K likeliest tokens, given the previous token; no other token can be drafted.

    The score of candidate b after token a is its logit plus ``<A[a] * P h, S[b]>`` for the row's hidden state h, with
    embeddings A and S of length R.
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


class BlockPass(NamedTuple):
    """The backbone's logits ``(B, D)`` of a block, and the hidden states ``(B, H)`` that its output layer read."""

    logits: torch.Tensor
    hidden: torch.Tensor


class BlockHead(DraftHead):
    """DFlash (arXiv 2602.06036), DFlash2 and DSpark (arXiv 2607.05147).

    Its decoder layers read the newest token followed by B - 1 masks. Queries come from these only; keys and values also
    from the fused states of all earlier positions (`context_rows`). Attention within the block is bidirectional unless
    a layer's ``sights`` limit it.

    Args:
        config: the network.
        tokens: ``(D,)`` int64, the verifier's id of each draft token; None if D = V.
        embeddings: the verifier's input embeddings, used as they are and not part of this module; None for embeddings
            of its own.
        output: the same for the output layer.

    Attributes:
        block_size: B.
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
        # The output layer's forward method is not called: hooks on it catch the verifier's last states.
        self._output = None if output is None else Borrowed(output)
        self._take_embeddings(embeddings)
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

    @property
    def no_graphs(self) -> str | None:
        return "its layers have windows or convolutions" if self.config.sights or self.config.taps else None

    def _layer(self) -> DecoderLayer:
        config = self.config
        if not config.taps:
            return DecoderLayer(config.shape)
        return ConvolvedLayer(config.shape, config.taps, config.group, config.block_size)

    def context_rows(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The fused states ``(..., H)`` of given states, ``(..., H)`` for each of ``layers``."""
        fused: torch.Tensor = self.hidden_norm(self.fc(torch.cat([states[layer] for layer in self.layers], -1)))
        return fused

    def remember(self, rows: torch.Tensor, positions: torch.Tensor, cache: Cache) -> None:
        """Cache the keys and values of T positions, for later blocks to attend to.

        Args:
            rows: ``(1, T, H)`` of `context_rows`.
            positions: ``(T,)`` int64, the places.
            cache: its layers store them at the caller's slots.
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

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache,
        keys: torch.Tensor | None = None,
    ) -> BlockPass:
        """Read one or several blocks.

        Args:
            ids: ``(1, B)`` int64, the newest token and masks.
            positions: ``(B,)`` int64, their places.
            mask: ``(1, 1, B, S)`` bool, which cached places each attends to; None for all.
            cache: its layers write the block's keys and values where the caller wants them and return all S of them.
            keys: ``(S,)`` int64, the positions of these; used only if ``sights`` limit attention.
        """
        config = self.config
        rope = self.rotary(positions)
        states = self.embed(ids)  # (1, B, H)
        masks = [mask] * config.num_layers
        if config.sights:
            assert mask is not None, "such heads are not exported"
            assert keys is not None, "such heads are not exported"
            anchors = positions.view(-1, config.block_size)[:, :1].expand(-1, config.block_size).flatten()
            masks = [mask & sight.seen(positions, anchors, keys) for sight in config.sights]
        for index, (layer, seen) in enumerate(zip(self.decoder, masks, strict=True)):
            states = layer(states, rope, seen, cache, index)
        hidden = self.norm(states)[0]
        output = self.output_layer
        logits = linear(hidden, output.weight, output.bias)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_cap:
            logits = torch.tanh(logits / config.logit_cap) * config.logit_cap
        return BlockPass(logits, hidden)

    def from_anchors(
        self, newest: torch.Tensor, anchors: torch.Tensor, known: int, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a block from each of R positions of one text; each attends to earlier positions and to itself.

        Args:
            newest: ``(R,)`` int64, the tokens there.
            anchors: ``(R,)`` int64, the places.
            known: the number of cached positions, from 0 on.
            cache: see `forward`.

        Returns:
            The rows' logits ``(R, B, D)`` and hidden states ``(R, B, H)``.
        """
        size, device = self.block_size, anchors.device
        places = anchors[:, None] + torch.arange(size, device=device)  # (R, B)
        ids = torch.full_like(places, self.config.mask_token)
        ids[:, 0] = newest
        cached = torch.arange(known, device=device)
        own = torch.eye(len(anchors), dtype=torch.bool, device=device).repeat_interleave(size, 1)
        mask = torch.cat([cached < anchors[:, None], own], 1).repeat_interleave(size, 0)  # (R B, known + R B)
        keys = torch.cat([cached, places.flatten()])
        found = self(ids.flatten()[None], places.flatten(), mask[None, None], cache, keys)
        return found.logits.unflatten(0, ids.shape), found.hidden.unflatten(0, ids.shape)

    def blank(self) -> torch.Tensor:
        """The sequential head's state ``(R,)`` before a block's first row; R = 0 without such a head."""
        return self.norm.weight.new_zeros(self.config.markov_rank)

    def row(
        self, base: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits ``(..., D)`` of one row, given the previous token, and the recurrent state for the next row.

        Args:
            base: ``(..., D)``, the pass's logits of this row.
            hidden: ``(..., H)``, its hidden state.
            token: ``(...)`` int64, the token at the place before the one it predicts.
            memory: ``(..., R)``, from the row before it, or `blank`.
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
