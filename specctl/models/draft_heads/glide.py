"""GliDe: decoder layers that also attend to the keys and values of the verifier's top layers (arXiv 2402.02082)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache

from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.head_layers import Attention, GatedNetwork, LayerShape, Rope, Rotary, rotated
from specctl.models.draft_heads.verifier_keys import VerifierKeys


@dataclass(frozen=True, slots=True)
class GlideConfig:
    """A GliDe network.

    Attributes:
        shape: of its own layers, H their width, which need not be the verifier's.
        vocabulary: V, the verifier's.
        num_layers: n; layer i reads the verifier's layer L - n + i of L.
        block_size: tokens of a stretch of text in training, as many as a round was to draft; no limit in use.
        context: the most tokens it can read.
    """

    shape: LayerShape
    vocabulary: int
    num_layers: int = 1
    block_size: int = 5
    context: int = 2048


class CrossAttention(nn.Module):
    """Attention to the verifier's keys and values; only the projections of queries and of the output are its own.

    Args:
        shape: of the layer.
        keys: the verifier's, whose heads it has.
    """

    def __init__(self, shape: LayerShape, keys: VerifierKeys) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden_size, keys.heads * keys.head_dim, bias=False)
        self.o_proj = nn.Linear(keys.heads * keys.head_dim, shape.hidden_size, bias=False)
        self._head_dim, self._grouped = keys.head_dim, keys.heads != keys.kv_heads

    def forward(
        self, states: torch.Tensor, rope: Rope, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:  # (1, T, H)
        """What states ``(1, T, H)`` add to themselves: 0 for those that see no place.

        Args:
            states: of T tokens.
            rope: of their places, as the verifier turns its keys.
            keys: ``(1, kv_heads, S, d)``, turned.
            values: ``(1, kv_heads, S, d)``.
            seen: ``(1, 1, T, S)`` bool, True where a token attends to a place.
        """
        queries = self.q_proj(states).view(*states.shape[:-1], -1, self._head_dim).transpose(1, 2)
        any_seen = seen.any(-1, keepdim=True)  # (1, 1, T, 1); attention over nothing would be NaN
        mixture = scaled_dot_product_attention(
            rotated(queries, rope), keys, values, attn_mask=seen | ~any_seen, enable_gqa=self._grouped
        )
        added: torch.Tensor = self.o_proj((mixture * any_seen).transpose(1, 2).flatten(2))
        return added


class GlideLayer(nn.Module):
    """Self-attention, cross-attention without a norm before it, and a gated network; each adds to its input."""

    def __init__(self, shape: LayerShape, keys: VerifierKeys) -> None:
        super().__init__()
        self.input_layernorm = shape.norm()
        self.self_attn = Attention(shape)
        self.cross_attn = CrossAttention(shape, keys)
        self.post_attention_layernorm = shape.norm()
        self.mlp = GatedNetwork(shape)


class GlideHead(ChainHead):
    """A GliDe draft head: a small decoder that also looks at what the verifier cached of the text.

    A row is what the verifier's layers cache of a place: their values, and their keys before they are turned. The token
    behind the place brings them in. A token that the head drafted brings in nothing, for the verifier has not read the
    place before it; so a round's tokens see the places that were known when it began, and each other by self-attention.

    Args:
        config: the network.
        keys: what the verifier's layers make of states, one layer for each of the head's; no module, and so no part of
            the head.
    """

    kind, sees_first = "glide", True

    def __init__(self, config: GlideConfig, keys: VerifierKeys) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.layers, self.state_size, self.width = keys.layers, keys.state_size, shape.hidden_size
        self.vocabulary = self.draft_vocabulary = config.vocabulary
        self.context = config.context
        # Its own keys, the verifier's, and whether there are any of the latter.
        self.num_layers = 2 * config.num_layers + 1
        self._per_place = 2 * keys.kv_heads * keys.head_dim  # numbers of one verifier layer in a row
        self.cached_values = config.num_layers * (shape.cached_values + self._per_place) + 2
        self.keys = keys
        self.embed_tokens = nn.Embedding(config.vocabulary, shape.hidden_size)
        self.rotary = Rotary(shape)
        self.blocks = nn.ModuleList(GlideLayer(shape, keys) for _ in range(config.num_layers))
        self.norm = shape.norm()
        self.lm_head = nn.Linear(shape.hidden_size, config.vocabulary, bias=False)

    @property
    def borrowed(self) -> list[nn.Module]:
        return self.keys.modules

    @property
    def row_size(self) -> int:
        """Keys and values of one place in every layer that is read, and a number that is 1 where they are known."""
        return self.config.num_layers * self._per_place + 1

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        keys = self.keys
        parts = [part for index, layer in enumerate(self.layers) for part in keys(index, states[layer])]
        flat = [part.transpose(0, 1).flatten(1) for part in parts]  # (T, kv_heads * d) each
        return torch.cat([*flat, torch.ones_like(flat[0][:, :1])], -1)

    def brought(
        self, rows: torch.Tensor, places: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """The verifier's turned keys and its values that T tokens bring in.

        Args:
            rows: ``(1, T, R)``.
            places: ``(T,)`` int64, which the rows are of.

        Returns:
            For each of `layers` keys and values, ``(1, kv_heads, T, d)`` each, and ``(1, 1, T, 1)``, 1 where they are
            known.
        """
        keys = self.keys
        rope = keys.rope(places)
        parts = rows[..., :-1].reshape(*rows.shape[:2], -1, keys.kv_heads, keys.head_dim)
        parts = parts.permute(2, 0, 3, 1, 4)  # (2 n, 1, kv_heads, T, d)
        pairs = [(rotated(parts[index], rope), parts[index + 1]) for index in range(0, len(parts), 2)]
        return pairs, rows[:, None, :, -1:]

    def forward(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
        seen: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> ChainPass:
        """As in `ChainHead`; the recursion's rows bring in nothing.

        Args:
            ids, rows, positions, mask, cache, keep: as there.
            seen: ``(1, 1, T, S)`` bool, what the S tokens brought in that each token may see; None for ``mask``.
            places: ``(T,)`` int64, which the rows are of; None for those before the tokens.
        """
        depth = self.config.num_layers
        pairs, known = self.brought(rows, positions - 1 if places is None else places)
        known, _ = cache.update(known, known, 2 * depth)  # (1, 1, S, 1)
        seen = (mask if seen is None else seen) & (known.transpose(-1, -2) > 0)
        rope, crossing = self.rotary(positions), self.keys.rope(positions)
        states = self.embed_tokens(ids)  # (1, T, H)
        for index, (block, pair) in enumerate(zip(self.blocks, pairs, strict=True)):
            assert isinstance(block, GlideLayer)
            states = states + block.self_attn(block.input_layernorm(states), rope, mask, cache, index)
            keys, values = cache.update(*pair, depth + index)
            states = states + block.cross_attn(states, crossing, keys, values, seen)
            states = states + block.mlp(block.post_attention_layernorm(states))
        hidden = self.norm(last_of(states, keep))  # (keep, H)
        return ChainPass(self.lm_head(hidden), hidden, rows.new_zeros(len(hidden), self.row_size))


def top_layers(depth: int, count: int) -> Sequence[int]:
    """The layers that a GliDe head of ``count`` layers reads of a verifier of ``depth`` layers: its last ones."""
    return range(depth - count, depth)
