"""Building blocks of draft heads: rotary positions, grouped attention over a cache, gated networks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specctl.errors import ModelError

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of T positions, ``(..., T, R)`` float32 each, R the rotated part of a head."""

FIXED_FREQUENCIES = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
"""Types of rotary embeddings with one or two fixed sets of frequencies."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a head's decoder layers, named as in transformers' configurations."""

    hidden_size: int  # H
    intermediate_size: int  # width of the gated network
    heads: int  # query heads
    kv_heads: int  # key and value heads; divides ``heads``
    head_dim: int  # d
    norm_eps: float = 1e-6  # of every RMSNorm
    activation: str = "silu"  # a name of transformers' activations
    # qkv_bias, output_bias, mlp_bias: which projections have biases
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether queries and keys go through an RMSNorm over d before rotation (Qwen3)
    # ``rope_parameters`` as in transformers' configurations
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_positions: int = 2048  # ``max_position_embeddings``, from which scaled rotary embeddings are computed

    @property
    def cached_values(self) -> int:
        """Keys and values of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def norm(self, width: int | None = None) -> nn.RMSNorm:
        """An RMSNorm over ``width``, by default H."""
        return nn.RMSNorm(width or self.hidden_size, eps=self.norm_eps)


class Rotary(nn.Module):
    """Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), with the scalings that transformers knows.

    The frequencies stay float32 when the module is cast: in bfloat16 they would be off by whole turns after a few
        hundred
    tokens. LongRoPE has two sets (Ding et al. 2024, arXiv 2402.13753). transformers picks one by the longest position
    in a pass. Here each position has its own set, so that drafts do not depend on how a text is split into passes.

    Raises:
        ModelError: frequencies that change with the sequence's length, or parameters that transformers rejects.
    """

    frequencies: torch.Tensor  # (R / 2,), or (2, R / 2) for positions up to the original length and after it

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        kind = shape.rope.get("rope_type", "default")
        if kind not in FIXED_FREQUENCIES:
            raise ModelError(
                f"Rotary embeddings of type {kind!r} are not known for draft heads.",
                f"Those that are: {', '.join(sorted(FIXED_FREQUENCIES))}.",
            )
        rope = dict(shape.rope)
        self.original = int(rope.get("original_max_position_embeddings") or shape.max_positions)
        if kind == "longrope":
            rope.setdefault("factor", shape.max_positions / self.original)  # as transformers does, after a warning
        try:
            config = LlamaConfig(
                hidden_size=shape.heads * shape.head_dim,
                num_attention_heads=shape.heads,
                head_dim=shape.head_dim,
                max_position_embeddings=shape.max_positions,
                rope_parameters=rope,
            )
            with torch.device("cpu"):  # a head may be built on the meta device, and files hold no frequencies
                made = LlamaRotaryEmbedding(config)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"The rotary embedding {dict(shape.rope)} is incomplete ({error}).") from error
        frequencies: torch.Tensor = made.inv_freq.float()
        if kind == "longrope":
            further, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=self.original + 1)
            frequencies = torch.stack([frequencies, further.float()])
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scaling = float(made.attention_scaling)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Rotary":
        before = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = before.to(self.frequencies.device)
        return self

    def forward(self, positions: torch.Tensor) -> Rope:
        """Cosines and sines of positions ``(..., T)`` int64."""
        frequencies = self.frequencies
        if frequencies.ndim > 1:
            frequencies = torch.where(positions[..., None] < self.original, frequencies[0], frequencies[1])
        angles = positions[..., None].float() * frequencies  # (..., T, R / 2)
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotated(states: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the first R numbers of queries or keys ``(B, heads, T, d)`` by their positions."""
    cos, sin = (part.unsqueeze(-3).to(states.dtype) for part in rope)  # (..., 1, T, R)
    if (size := cos.shape[-1]) < states.shape[-1]:
        return torch.cat([rotated(states[..., :size], rope), states[..., size:]], -1)
    half = states.shape[-1] // 2
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention; ``reads`` is the input width of queries, keys and values, by default H."""

    def __init__(self, shape: LayerShape, reads: int | None = None) -> None:
        super().__init__()
        reads = reads or shape.hidden_size
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(reads, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(reads, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(reads, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = shape.norm(shape.head_dim), shape.norm(shape.head_dim)
        self._grouped = shape.heads != shape.kv_heads
        self._normed = shape.qk_norm

    def keys_values(self, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, ``(B, kv_heads, T, d)`` each, of states ``(B, T, reads)``."""
        keys, values = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        return rotated(self.k_norm(keys) if self._normed else keys, rope), values

    def forward(
        self, states: torch.Tensor, rope: Rope, mask: torch.Tensor | None, cache: Cache, layer: int
    ) -> torch.Tensor:  # (1, T, H)
        """Attend from T states ``(1, T, reads)`` to all S tokens that a layer of the cache then holds.

        The mask is broadcastable to ``(1, heads, T, S)`` bool, True where a token attends; None for all.
        """
        keys, values = cache.update(*self.keys_values(states, rope), layer)
        queries = self._heads(self.q_proj(states))
        queries = rotated(self.q_norm(queries) if self._normed else queries, rope)
        mixture = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=self._grouped)
        output: torch.Tensor = self.o_proj(mixture.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)


class GatedNetwork(nn.Module):
    """The feed-forward part of a Llama or Qwen layer: down(act(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)
        self.activation = ACT2FN[shape.activation]

    def forward(self, states: torch.Tensor) -> torch.Tensor:  # (..., H)
        output: torch.Tensor = self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
        return output


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer, over a cache; EAGLE-1's only layer is not ``normed`` before attention."""

    def __init__(self, shape: LayerShape, *, normed: bool = True) -> None:
        super().__init__()
        if normed:
            self.input_layernorm = shape.norm()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = shape.norm()
        self.mlp = GatedNetwork(shape)
        self._normed = normed

    def forward(self, states: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: Cache, layer: int) -> torch.Tensor:
        """``(1, T, H)`` of the same; ``layer`` is its index in the cache."""
        read = self.input_layernorm(states) if self._normed else states
        states = states + self.self_attn(read, rope, mask, cache, layer)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output
