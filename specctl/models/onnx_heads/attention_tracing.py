"""How the passes of draft heads are traced: their attention becomes a node that appends to a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import Cache

from specctl.models.draft_heads.head import DraftHead
from specctl.models.onnx.export import HEAD_MULTIPLE, CannotExport, attention_node

Pair = tuple[torch.Tensor, torch.Tensor]
CACHED = 64
"""Places of the caches in the pass that is traced."""


class NotingCache(Cache):
    """A cache that keeps nothing and knows which layer asked last."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layer = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Pair:
        self.layer = layer_idx
        return key_states, value_states


class Attending(TorchFunctionMode):
    """Notes the shapes of keys and values that torch's attention is given, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = NotingCache()
        self.shapes: dict[int, tuple[int, int]] = {}  # heads, size

    def __torch_function__(self, func: Any, _: Any, given: Sequence[Any] = (), named: Any = None) -> Any:
        return (
            self.attended(given, named or {}) if func is scaled_dot_product_attention else func(*given, **named or {})
        )

    def attended(self, given: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
        """The mixture ``(1, H, T, D)`` of a call of torch's attention."""
        _, keys, values = given[:3]
        if keys.shape != values.shape:
            raise CannotExport("its cache keeps no keys and values of one shape")
        if keys.shape[3] % HEAD_MULTIPLE:
            raise CannotExport(f"its heads have a size of {keys.shape[3]}, and onnxruntime wants multiples of 8")
        if self.cache.layer in self.shapes:
            raise CannotExport("its layers share their attention")
        self.shapes[self.cache.layer] = int(keys.shape[1]), int(keys.shape[3])
        return scaled_dot_product_attention(*given, **named)


class Appending(Attending):
    """Makes of each call of torch's attention a node that appends its keys and values to a cache, and attends to all.

    Args:
        past: keys and values by layer.
        places: by layer ``before`` and ``total`` of `attention_node`.
        causal: whether no token attends to those behind it.
    """

    def __init__(self, past: Sequence[Pair], places: Sequence[Pair], *, causal: bool) -> None:
        super().__init__()
        self._past, self._places, self._causal = past, places, causal
        self._present: dict[int, Pair] = {}

    def attended(self, given: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
        layer = self.cache.layer
        queries, keys, values = given[:3]
        settings: dict[str, Any] = {} if self._causal else {"causal": 0}
        settings["scale"] = named.get("scale")
        mixed, *present = attention_node((queries, keys, values), self._past[layer], self._places[layer], **settings)
        self._present[layer] = present[0], present[1]
        return mixed.transpose(1, 2)

    @property
    def present(self) -> list[torch.Tensor]:
        """The caches afterwards, keys before values, layer by layer."""
        if sorted(self._present) != list(range(len(self._past))):
            raise CannotExport("its attention is not torch's own")
        return [part for layer in range(len(self._past)) for part in self._present[layer]]


@dataclass(frozen=True, slots=True)
class CacheShapes:
    """The caches of a head, ``(heads, size)`` by layer, and what is named after them."""

    layers: Sequence[tuple[int, int]]

    @property
    def past(self) -> list[Pair]:
        return [
            (torch.zeros(1, heads, CACHED, size), torch.zeros(1, heads, CACHED, size)) for heads, size in self.layers
        ]

    @property
    def sizes(self) -> Any:
        capacity = torch.export.Dim("capacity", min=2)
        return [({2: capacity}, {2: capacity}) for _ in self.layers]

    def named(self, first: str) -> list[str]:
        return [f"{first}.{layer}.{part}" for layer in range(len(self.layers)) for part in ("key", "value")]


def numbers(count: int) -> torch.Tensor:  # (1, count)
    return torch.arange(count)[None]


def state_names(head: DraftHead) -> list[str]:
    """The inputs that a head's layers go to."""
    return [f"states.{index}" for index in range(len(head.layers))]
