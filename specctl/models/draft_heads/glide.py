"""GliDe: decoder layers that also attend to the keys and values of the verifier's top layers (arXiv 2402.02082)."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, DynamicCache, PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.file_layout import (
    ROPE_THETA,
    HeadConfig,
    HeadFile,
    Verifier,
    layer_shape,
    published_weights,
    transformer_table,
)
from specctl.models.draft_heads.head_layers import (
    FIXED_FREQUENCIES,
    Attention,
    GatedNetwork,
    LayerShape,
    Rope,
    Rotary,
    rotated,
)
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import layer_configs, query_heads
from specctl.models.passes.watching import decoder, decoder_layers

if TYPE_CHECKING:
    from specctl.models.draft_heads.kinds import Recipe
    from specctl.models.draft_heads.training import Given, Lesson, Step

_AWAY = 7  # A position at which rotated keys are compared
_CLOSE = 2e-2  # Tolerance for keys in 16-bit dtypes, relative to the largest


class VerifierKeys:
    """Keys and values cached by some verifier layers, recomputed from the layers' inputs by the verifier's modules.

    A layer's keys and values depend only on its input and position. So a head needs only the input, which every engine
    provides, and no access to the cache. Keys are returned before rotation (`rope`).

    Args:
        target: the verifier, in eval mode; on the meta device the rotation of keys is not checked.
        layers: which of its decoder layers.

    Attributes:
        state_size: D, the width of their inputs.
        heads: query heads of the verifier's attention.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: d, of keys and of values.

    Raises:
        ModelError: a layer cannot be run alone, caches something else, or does not rotate keys as Llama does.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        config = target.config.get_text_config(decoder=True)
        self.layers = tuple(layers)
        self._family, self._dtype = str(config.model_type), target.dtype
        self.state_size = int(config.hidden_size)
        self._rotary: Any = getattr(decoder(target), "rotary_emb", None)
        if self._rotary is None or set(inspect.signature(self._rotary.forward).parameters) != {"x", "position_ids"}:
            raise self._refusal("its layers do not share one rotary embedding")
        if (kind := getattr(self._rotary, "rope_type", "default")) not in FIXED_FREQUENCIES:
            raise self._refusal(f"its rotary embedding is of type {kind!r}, which changes with the text's length")
        try:
            every = decoder_layers(target)
        except IndexError as error:
            raise self._refusal(str(error)) from error
        self._modules = [every[layer] for layer in self.layers]
        shapes = {self._examined(module, layer) for module, layer in zip(self._modules, self.layers, strict=True)}
        its = layer_configs(config)
        heads = {query_heads(its[layer]) for layer in self.layers}
        if len(shapes) > 1 or len(heads) > 1:
            raise self._refusal(f"layers {', '.join(map(str, self.layers))} have keys of different shapes")
        (self.heads,) = heads
        ((self.kv_heads, self.head_dim),) = shapes

    @property
    def modules(self) -> list[nn.Module]:
        """The verifier's modules that it uses."""
        return [*self._modules, self._rotary]

    @torch.no_grad()
    def __call__(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unrotated keys, and values, ``(kv_heads, T, d)`` each, from a layer's inputs ``(T, D)``.

        ``layer`` is an index into `layers`. The results have the device and the floating dtype of ``states``.
        """
        cos = torch.ones(1, states.shape[0], self._turned, device=states.device)
        keys, values = self._cached(self._modules[layer], states, (cos, torch.zeros_like(cos)))
        return keys.to(states), values.to(states)

    def rope(self, positions: torch.Tensor) -> Rope:
        """The verifier's cosines and sines ``(1, T, R)`` float32 of positions ``(T,)`` int64."""
        like = torch.empty(0, device=positions.device)  # gives the device and dtype
        cos, sin = self._rotary(like, positions[None])
        return cos, sin

    def _cached(self, layer: nn.Module, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values a layer would cache for inputs ``(T, D)``: ``(kv_heads, T, d)`` each."""
        device = next(layer.parameters()).device
        given = states[None].to(device, self._dtype)  # (1, T, D)
        places = torch.arange(states.shape[0], device=device)[None]
        name = cache_argument(type(layer))
        if not name:
            raise ValueError("it takes no cache")
        cos, sin = (part.to(device, self._dtype) for part in rope)
        more: dict[str, Any] = {name: _Taking(), "use_cache": True}
        try:
            # Not called as a module, because hooks on it store the inputs of the verifier's own passes.
            layer.forward(given, attention_mask=None, position_ids=places, position_embeddings=(cos, sin), **more)
        except _TakenError as taken:
            return taken.keys[0], taken.values[0]
        raise ValueError("it caches no keys and values")

    @torch.no_grad()
    def _examined(self, module: nn.Module, layer: int) -> tuple[int, int]:
        """Check that a layer rotates keys as `rotated` does; returns its number of key heads and head size."""
        device = next(module.parameters()).device
        state = torch.randn(1, self.state_size, generator=torch.Generator().manual_seed(0)).to(device)
        cos, sin = self.rope(torch.tensor([_AWAY], device=device))  # (1, 1, R)
        self._turned = cos.shape[-1]
        try:
            keys, values = self._cached(module, state, (torch.ones_like(cos), torch.zeros_like(cos)))
            away, _ = self._cached(module, state, (cos, sin))
        except Exception as error:  # layers of other kinds fail in many ways
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self._refusal(f"its layer {layer} gives no keys ({why})") from error
        if keys.shape != values.shape:
            raise self._refusal(f"the keys and values of its layer {layer} differ in size")
        if device.type != "meta":
            off = (rotated(keys[None], (cos, sin))[0] - away).abs().max()
            if float(off) > _CLOSE * float(away.abs().max()):
                raise self._refusal(f"its layer {layer} rotates keys differently from Llama's layers")
        return int(keys.shape[0]), int(keys.shape[2])

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"A GliDe head cannot read the keys and values of a {self._family} model: {why}.",
            "Use a draft model or a head of another kind, such as EAGLE-3.",
        )


class _TakenError(Exception):
    """Stops a layer's pass once its keys and values, ``(1, kv_heads, T, d)`` each, are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__("keys and values were taken")
        self.keys, self.values = keys, values


class _Taking(Cache):
    """A cache that captures keys and values and stops the pass before attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Raise `_TakenError`, which `VerifierKeys` catches."""
        raise _TakenError(key_states, value_states)


@dataclass(frozen=True, slots=True)
class GlideConfig:
    """A GliDe network."""

    shape: LayerShape  # of its own layers, H their width, which need not be the verifier's
    vocabulary: int  # V, the verifier's
    num_layers: int = 1  # n; layer i reads the verifier's layer L - n + i of L
    block_size: int = 5  # stretch length in training, in tokens; no limit in use
    context: int = 2048  # the most tokens it can read


class CrossAttention(nn.Module):
    """Attention to the verifier's keys and values; it has only query and output projections."""

    def __init__(self, shape: LayerShape, keys: VerifierKeys) -> None:
        super().__init__()
        self.q_proj = nn.Linear(shape.hidden_size, keys.heads * keys.head_dim, bias=False)
        self.o_proj = nn.Linear(keys.heads * keys.head_dim, shape.hidden_size, bias=False)
        self._head_dim, self._grouped = keys.head_dim, keys.heads != keys.kv_heads

    def forward(
        self, states: torch.Tensor, rope: Rope, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:  # (1, T, H)
        """The residual update of states ``(1, T, H)``: 0 for tokens that attend to nothing.

        Args:
            states: of T tokens.
            rope: the verifier's rotation at their positions.
            keys, values: ``(1, kv_heads, S, d)``, keys rotated.
            seen: ``(1, 1, T, S)`` bool, True where a token attends to a position.
        """
        queries = self.q_proj(states).view(*states.shape[:-1], -1, self._head_dim).transpose(1, 2)
        any_seen = seen.any(-1, keepdim=True)  # (1, 1, T, 1); attention over nothing would be NaN
        mixture = scaled_dot_product_attention(
            rotated(queries, rope), keys, values, attn_mask=seen | ~any_seen, enable_gqa=self._grouped
        )
        added: torch.Tensor = self.o_proj((mixture * any_seen).transpose(1, 2).flatten(2))
        return added


class GlideLayer(nn.Module):
    """Self-attention, cross-attention without pre-norm, and a gated network, each with a residual connection."""

    def __init__(self, shape: LayerShape, keys: VerifierKeys) -> None:
        super().__init__()
        self.input_layernorm = shape.norm()
        self.self_attn = Attention(shape)
        self.cross_attn = CrossAttention(shape, keys)
        self.post_attention_layernorm = shape.norm()
        self.mlp = GatedNetwork(shape)


class GlideHead(ChainHead):
    """A GliDe draft head: a small decoder that also attends to the verifier's cached keys and values.

    A position's features are the verifier layers' values and unrotated keys there. The next token contributes them.
    After a drafted token nothing is contributed, because the verifier has not read it yet. So a round's tokens attend
    to the positions known at its start, and to each other by self-attention.

    Args:
        config: the network.
        keys: the verifier's, one layer for each of the head's; not part of the head.
    """

    kind, sees_first = "glide", True

    def __init__(self, config: GlideConfig, keys: VerifierKeys) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.layers, self.state_size, self.width = keys.layers, keys.state_size, shape.hidden_size
        self.vocabulary = self.draft_vocabulary = config.vocabulary
        self.context = config.context
        # Its own keys, the verifier's, and whether the latter are known.
        self.num_layers = 2 * config.num_layers + 1
        self._per_place = 2 * keys.kv_heads * keys.head_dim  # numbers of one verifier layer per position
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
    def feature_size(self) -> int:
        """Keys and values of one position in every layer read, and a flag that is 1 if they are known."""
        return self.config.num_layers * self._per_place + 1

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        keys = self.keys
        parts = [part for index, layer in enumerate(self.layers) for part in keys(index, states[layer])]
        flat = [part.transpose(0, 1).flatten(1) for part in parts]  # (T, kv_heads * d) each
        return torch.cat([*flat, torch.ones_like(flat[0][:, :1])], -1)

    def brought(
        self, features: torch.Tensor, places: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """The verifier's rotated keys and values contributed by T tokens.

        Args:
            features: ``(1, T, F)``.
            places: ``(T,)`` int64, of the features.

        Returns:
            For each of `layers` keys and values, ``(1, kv_heads, T, d)`` each, and ``(1, 1, T, 1)``, 1 where they are
            known.
        """
        keys = self.keys
        rope = keys.rope(places)
        parts = features[..., :-1].reshape(*features.shape[:2], -1, keys.kv_heads, keys.head_dim)
        parts = parts.permute(2, 0, 3, 1, 4)  # (2 n, 1, kv_heads, T, d)
        pairs = [(rotated(parts[index], rope), parts[index + 1]) for index in range(0, len(parts), 2)]
        return pairs, features[:, None, :, -1:]

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
        seen: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> ChainPass:
        """See `ChainHead`; the head's own features contribute nothing.

        Args:
            ids, features, positions, mask, cache, keep: see `ChainHead`.
            seen: ``(1, 1, T, S)`` bool, which of the S tokens' contributions each token may attend to; None for
                ``mask``.
            places: ``(T,)`` int64, of the features; None for those before the tokens.
        """
        depth = self.config.num_layers
        pairs, known = self.brought(features, positions - 1 if places is None else places)
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
        return ChainPass(self.lm_head(hidden), hidden, features.new_zeros(len(hidden), self.feature_size))


def top_layers(depth: int, count: int) -> Sequence[int]:
    """The verifier layers that a GliDe head of ``count`` layers reads: the last ones of ``depth``."""
    return range(depth - count, depth)


NAMES = {"lm_head.": "lm_head.", "blocks.": "model.layers.", "": "model."}
"""Prefixes of weight names in files, by prefix in the network."""


def read(file: HeadFile) -> GlideHead:
    """A GliDe head; see `read_head`."""
    table = HeadConfig(file.config, file.subject)
    table.demand("use_remap", (False,))
    table.demand("attention_bias", (False,))
    shape = layer_shape(table, qk_norm=False, rope_theta=ROPE_THETA)
    parsed = GlideConfig(
        shape=shape,
        vocabulary=table.take("vocab_size", int),
        num_layers=table.take("num_hidden_layers", int, 1),
        block_size=table.take("block_size", int, 5),
        context=file.context(shape),
    )
    wide, heads, size = (
        table.take(key, int) for key in ("large_hidden_size", "large_num_attention_heads", "large_head_dim")
    )
    table.end(["target_model_name_or_path"])
    layers = top_layers(file.text.num_hidden_layers, parsed.num_layers)
    file.require_layers(layers)
    keys = VerifierKeys(file.target, layers)
    file.require_fit(wide, parsed.vocabulary)
    file.require_same("attention heads, in number", heads, keys.heads)
    file.require_same("attention heads of width", size, keys.head_dim)
    return file.filled(lambda: GlideHead(parsed, keys), NAMES)


def describe(head: GlideHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A GliDe head as the paper's code writes it; see `HeadKind`."""
    config, keys = head.config, head.keys
    described = {
        "architectures": ["smallLlamaForCausalLM"],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "block_size": config.block_size,
        "large_hidden_size": keys.state_size,
        "large_num_attention_heads": keys.heads,
        "large_head_dim": keys.head_dim,
        "target_model_name_or_path": verifier.name,
    }
    return described, published_weights(head, NAMES)


def new(recipe: "Recipe", given: "Given") -> GlideHead:
    """A head to train, initialised with the target's embeddings and output layer."""
    from specctl.models.draft_heads.training import drawn

    if recipe.depth > given.depth:
        raise ModelError(
            f"A GliDe head of {recipe.depth} layers reads as many layers of the target, which has {given.depth}.",
            f"Set --depth to {given.depth} at most.",
        )
    config = GlideConfig(given.shape, given.vocabulary, recipe.depth, recipe.steps, given.shape.max_positions)
    head = drawn(GlideHead(config, VerifierKeys(given.target, top_layers(given.depth, recipe.depth))))
    head.embed_tokens.weight.data.copy_(given.embeddings.weight)
    head.lm_head.weight.data.copy_(given.output.weight)
    return head


def loss(head: GlideHead, lesson: "Lesson", recipe: "Recipe", generator: torch.Generator) -> torch.Tensor:
    """Cross-entropy with the answer's tokens (arXiv 2402.02082); see `HeadKind`."""
    from specctl.models.draft_heads.training import text_loss

    offset = int(torch.randint(recipe.steps, (), generator=generator))
    return text_loss(stretched(head, lesson, recipe.steps, offset), lesson)


def stretched(head: GlideHead, lesson: "Lesson", size: int, offset: int) -> "Step":
    """The head's logits of all A tokens of an answer, in stretches of ``size`` tokens.

    The tokens of a stretch attend to the target's keys before the stretch only. The first whole stretch begins at
    ``offset``, from 0 to ``size - 1``.
    """
    from specctl.models.draft_heads.training import Step

    ids, device = lesson.ids[:-1], lesson.ids.device
    true = head.fuse({layer: states[:-2] for layer, states in lesson.states.items()})
    features = torch.cat([true.new_zeros(1, true.shape[1]), true])  # (T, R): the token at p contributes position p - 1
    places = torch.arange(len(ids), device=device)
    begins = (places - (places - offset) % size).clamp(min=0)  # (T,) where each token's stretch begins
    mask, seen = (head.causal(places, last)[None, None] for last in (places, begins))
    found: ChainPass = head(ids[None], features[None], places, mask, DynamicCache(), lesson.length, seen)
    return Step(0, torch.arange(lesson.length, device=device), found.logits, found.features)
