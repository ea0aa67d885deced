"""A KV cache that grows without copying what it holds."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

SPARE = 256


class BufferedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer over buffers with room to spare.

    transformers' own layer concatenates: every step copies the whole cache. Here a step writes its own entries and
    ``keys`` and ``values`` are views; cropping, inherited, shortens the views.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]  # (1, heads, capacity, head_dim)

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
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._grow(start, end + max(SPARE, end // 4))
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _grow(self, filled: int, capacity: int) -> None:
        for place, old in enumerate(self._buffers):
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, :filled] = old[:, :, :filled]
            self._buffers[place] = new


def empty_cache(config: PreTrainedConfig) -> DynamicCache:
    """A cache for one sequence that can be rolled back."""
    cache = DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = BufferedLayer()  # type: ignore[no-untyped-call]
        elif hasattr(layer, "activate_past_recording"):
            # Sliding-window layers throw old entries away unless told that they may have to come back.
            layer.activate_past_recording()
    return cache
