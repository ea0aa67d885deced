"""The keys and values that a verifier's layers make of their inputs, for draft heads that attend to them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.head_layers import FIXED_FREQUENCIES, Rope, rotated
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import layer_configs, query_heads
from specctl.models.passes.watching import decoder, decoder_layers

_AWAY = 7
"""A place that keys are compared at, to see how a layer turns them."""
_CLOSE = 2e-2
"""By how much keys of 16-bit numbers may differ, as a share of the largest."""


class VerifierKeys:
    """Keys and values of some layers, computed by the verifier's own modules from the layers' inputs.

    A layer caches what follows from its input and its place alone. So a head that knows the input, which every engine
    shows, needs nothing of the cache. The keys are given as they are before they are turned by their places (`rope`).

    Args:
        target: the verifier, in eval mode; on the meta device how its layers turn keys is not checked.
        layers: which of its decoder layers.

    Attributes:
        layers: these.
        state_size: D, the width of their inputs.
        heads: query heads of the verifier's attention.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: d, of keys and of values.

    Raises:
        ModelError: a layer cannot be run on its own, caches something else, or turns its keys in another way than
            Llama's layers do.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        config = target.config.get_text_config(decoder=True)
        self.layers = tuple(layers)
        self._family, self._dtype = str(config.model_type), target.dtype
        self.state_size = int(config.hidden_size)
        self._rotary: Any = getattr(decoder(target), "rotary_emb", None)
        if self._rotary is None or set(inspect.signature(self._rotary.forward).parameters) != {"x", "position_ids"}:
            raise self._refusal("its layers do not all turn keys by the same rotary embedding")
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
        """The verifier's own that it computes with."""
        return [*self._modules, self._rotary]

    @torch.no_grad()
    def __call__(self, layer: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the index-th of `layers` makes of its inputs.

        Args:
            layer: an index into `layers`.
            states: ``(T, D)`` of any floating dtype, the layer's inputs.

        Returns:
            Keys, not turned yet, and values: ``(kv_heads, T, d)`` each, on the device and of the dtype of ``states``.
        """
        cos = torch.ones(1, states.shape[0], self._turned, device=states.device)
        keys, values = self._cached(self._modules[layer], states, (cos, torch.zeros_like(cos)))
        return keys.to(states), values.to(states)

    def rope(self, positions: torch.Tensor) -> Rope:
        """The verifier's cosines and sines ``(1, T, R)`` float32 of positions ``(T,)`` int64."""
        like = torch.empty(0, device=positions.device)  # says which device and dtype are wanted
        cos, sin = self._rotary(like, positions[None])
        return cos, sin

    def _cached(self, layer: nn.Module, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer would cache of its inputs ``(T, D)``: ``(kv_heads, T, d)`` each."""
        device = next(layer.parameters()).device
        given = states[None].to(device, self._dtype)  # (1, T, D)
        places = torch.arange(states.shape[0], device=device)[None]
        name = cache_argument(type(layer))
        if not name:
            raise ValueError("it takes no cache")
        cos, sin = (part.to(device, self._dtype) for part in rope)
        more: dict[str, Any] = {name: _Taking(), "use_cache": True}
        try:
            # Not called as a module: hooks on it keep the inputs of the verifier's own passes.
            layer.forward(given, attention_mask=None, position_ids=places, position_embeddings=(cos, sin), **more)
        except _TakenError as taken:
            return taken.keys[0], taken.values[0]
        raise ValueError("it caches no keys and values")

    @torch.no_grad()
    def _examined(self, module: nn.Module, layer: int) -> tuple[int, int]:
        """Key heads and head size of a layer that turns its keys as `rotated` does."""
        device = next(module.parameters()).device
        state = torch.randn(1, self.state_size, generator=torch.Generator().manual_seed(0)).to(device)
        cos, sin = self.rope(torch.tensor([_AWAY], device=device))  # (1, 1, R)
        self._turned = cos.shape[-1]
        try:
            keys, values = self._cached(module, state, (torch.ones_like(cos), torch.zeros_like(cos)))
            away, _ = self._cached(module, state, (cos, sin))
        except Exception as error:  # whatever a layer of another kind runs into
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self._refusal(f"its layer {layer} gives no keys ({why})") from error
        if keys.shape != values.shape:
            raise self._refusal(f"the keys and values of its layer {layer} differ in size")
        if device.type != "meta":
            off = (rotated(keys[None], (cos, sin))[0] - away).abs().max()
            if float(off) > _CLOSE * float(away.abs().max()):
                raise self._refusal(f"its layer {layer} turns keys in another way than Llama's")
        return int(keys.shape[0]), int(keys.shape[2])

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"A GliDe head cannot read the keys and values of a {self._family} model: {why}.",
            "Use a draft model or a head of another kind, such as EAGLE-3.",
        )


class _TakenError(Exception):
    """Ends a layer's pass where its keys and values, ``(1, kv_heads, T, d)`` each, are known."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__("keys and values were taken")
        self.keys, self.values = keys, values


class _Taking(Cache):
    """A cache that takes keys and values and ends the pass: attention and what follows it are not wanted."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Raises what `VerifierKeys` catches."""
        raise _TakenError(key_states, value_states)
