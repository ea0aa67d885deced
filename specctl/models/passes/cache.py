"""Layers of KV caches that append and crop without copying the whole cache."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from specctl.models.passes.tree_sight import gather_path

SPARE = 256
STEP = 512
"""Buffer sizes are multiples of this many tokens, so that the strides between rows take few values."""
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "layer_past")
"""The names of the cache argument of models and layers, the newest first."""
CANNOT_GO_BACK = {
    "blt": "it divides the whole text into patches again in every pass",
    "cpmant": "it numbers positions from the whole text in every pass",
    "diffusion_gemma": "it writes by diffusion, a block of tokens at a time",
    "kosmos-2.5": "generate gives it no positions, and it then numbers tokens again in every pass",
    "minimax": "its linear attention works only with a cache of its own, which cannot be cropped",
    "moshi": "its cache has a window that its attention mask does not know of",
    "paligemma": "it reads a prompt in both directions, and what it writes in one",
    "prophetnet": "over a cache it reads one token at a time",
    "recurrent_gemma": "it keeps its recurrent state inside its layers, outside the cache",
    "rwkv": "it keeps its state outside transformers' caches",
    "unlimited_ocr": "its cache keeps a prompt and a window of its own, which cannot be cropped",
    "xlstm": "it keeps its state in a cache of its own",
}
"""Families of models that cannot forget tokens, by ``model_type``, and why."""


class BufferedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer over buffers with spare capacity.

    transformers' own layer copies the whole cache in every step, since it concatenates. Here a step writes only its own
    entries and returns views; cropping moves a counter.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._filled = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Dimension 2 holds the tokens: (1, heads, capacity, head_dim)
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self._capacity = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the layer's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``(1, heads, T, head_dim)`` states; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        width = key_states.shape[2]
        start, end = self._filled, self._filled + width
        if end > self._capacity:
            self._grow(-(-(end + max(SPARE, end // 4)) // STEP) * STEP)
        self.keys.narrow(2, start, width).copy_(key_states)
        self.values.narrow(2, start, width).copy_(value_states)
        self._filled = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def move(self, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the buffers."""
        gather_path((self.keys, self.values), start, path)

    def get_seq_length(self) -> int:
        return self._filled

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens."""
        self._filled = max(0, self._filled - abs(tokens_to_remove))

    def reset(self) -> None:
        self._filled = 0

    def _grow(self, capacity: int) -> None:
        self.keys, self.values = (self._grown(old, capacity) for old in (self.keys, self.values))
        self._capacity = capacity

    def _grown(self, old: torch.Tensor, capacity: int) -> torch.Tensor:
        new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
        new[:, :, : self._filled] = old[:, :, : self._filled]
        return new


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A sliding-window layer that stores more than the window until it is cropped.

    Several passes may run without a crop. Each sees as much as the mask expects; older versions of transformers would
    pass on everything recorded.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the layer's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``(1, heads, T, head_dim)`` states; returns those that the T tokens may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return self.keys[:, :, -visible:], self.values[:, :, -visible:]


class RecurrentWindowLayer(LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call]
    """A `WindowLayer` with a recurrent state."""

    update = WindowLayer.update


def empty_cache(config: PreTrainedConfig, *, recurrent: bool = False) -> DynamicCache:
    """A cache for one sequence that can be rolled back.

    Args:
        config: the model's configuration.
        recurrent: whether its layers have a recurrent state, which `RecurrentState` copies.
    """
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[index] = BufferedLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            layers[index] = WindowLayer(layer.sliding_window)
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            layers[index] = RecurrentWindowLayer(layer.sliding_window, layer.number_of_states)
        # Sliding windows and convolutions drop old entries, which a rollback may need.
        windowed = isinstance(layer, DynamicSlidingWindowLayer)
        if windowed or (isinstance(layer, LinearAttentionCacheLayerMixin) and not recurrent):
            layers[index].activate_past_recording()
    return cache


def trims_from(cache: DynamicCache) -> int | None:
    """The length from which a crop also drops cache entries that its layers no longer read; None if there is none."""
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    records = any(isinstance(layer, LinearAttentionCacheLayerMixin) and layer.record_past for layer in cache.layers)
    return min([*windows, *([1] if records else [])], default=None)


def cache_argument(module: type) -> str:
    """The parameter of ``forward`` that takes the cache, of a model's or a layer's class; an empty string if none does.

    From 5.24 on, transformers calls it ``cache`` in all models, and warns about the earlier names. A cache that is a
    dictionary (XLM, Flaubert) does not count.
    """
    parameters = inspect.signature(module.forward).parameters  # type: ignore[attr-defined]
    known = [name for name in CACHE_ARGUMENTS if name in parameters]
    return next((name for name in known if "dict[" not in str(parameters[name].annotation)), "")


def cannot_go_back(config: PreTrainedConfig, model: type | None) -> str | None:
    """Why a model cannot roll back, as the end of a sentence; None if it can.

    Args:
        config: the model's.
        model: its class; None if unknown.
    """
    family = config.get_text_config(decoder=True).model_type
    if why := CANNOT_GO_BACK.get(config.model_type) or CANNOT_GO_BACK.get(family):
        return why
    text = config.get_text_config(decoder=True)
    if family == "doge" and text.keep_window_size < text.max_position_embeddings:
        return f"beyond {text.keep_window_size} tokens it chooses between equal ones by how many a pass reads"
    if family == "qwen4_exp_text" and not hasattr(
        DynamicIndexedLayer(),  # type: ignore[no-untyped-call]
        "indexer_position_ids",
    ):
        return "this version of transformers does not keep its indexer's positions; update transformers"
    return "it runs without a cache of past tokens" if model is not None and not cache_argument(model) else None
