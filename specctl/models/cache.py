"""A KV cache that grows without copying what it holds."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

SPARE = 256


class BufferedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A full-attention layer over buffers with room to spare.

    transformers' own layer concatenates: every step copies the whole cache. Here a step writes its own entries and
    hands out views; cropping moves a counter.
    """

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
            self._grow(end + max(SPARE, end // 4))
        self.keys.narrow(2, start, width).copy_(key_states)
        self.values.narrow(2, start, width).copy_(value_states)
        self._filled = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        return self._filled

    def crop(self, tokens_to_remove: int) -> None:
        """Remove as many tokens as the number, given negative, says."""
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
