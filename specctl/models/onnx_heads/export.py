"""The export of draft heads as ONNX graphs: their attention becomes nodes that append to a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import Cache

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead, ChainPass
from specctl.models.draft_heads.glide import GlideHead
from specctl.models.draft_heads.head import DraftHead
from specctl.models.onnx.export import HEAD_MULTIPLE, ROWS, TOKENS, CannotExport, as_graph, attention_node

if TYPE_CHECKING:
    import onnx_ir as ir

Pair = tuple[torch.Tensor, torch.Tensor]
Head = TypeVar("Head", bound=nn.Module)
CACHED = 64  # Cached slots in the traced pass


class NotingCache(Cache):
    """A cache that stores nothing and records which layer used it last."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layer = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Pair:
        self.layer = layer_idx
        return key_states, value_states


class Attending(TorchFunctionMode):
    """Records the shapes of keys and values in torch's attention calls, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = NotingCache()
        self.shapes: dict[int, tuple[int, int]] = {}  # heads, size

    def __torch_function__(self, func: Any, _: Any, given: Sequence[Any] = (), named: Any = None) -> Any:
        return (
            self.attended(given, named or {}) if func is scaled_dot_product_attention else func(*given, **named or {})
        )

    def attended(self, given: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
        """The attention output ``(1, H, T, D)`` for a call of torch's attention."""
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
    """Replaces each call of torch's attention by a node that appends keys and values to a cache and attends to all of
    it.

    Args:
        past: keys and values by layer.
        places: ``before`` and ``total`` of `attention_node`, by layer.
        causal: whether no token attends to later ones.
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
        """The caches after the pass, keys before values, layer by layer."""
        if sorted(self._present) != list(range(len(self._past))):
            raise CannotExport("its attention is not torch's own")
        return [part for layer in range(len(self._past)) for part in self._present[layer]]


@dataclass(frozen=True, slots=True)
class CacheShapes:
    """The shapes ``(heads, size)`` of a head's caches by layer, and the graph's names derived from them."""

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
    """The names of the inputs with the states for a head's layers."""
    return [f"states.{index}" for index in range(len(head.layers))]


class _OfHead(nn.Module, Generic[Head]):
    """The traced module: a pass of a head."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head


SEEN = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A GliDe head's tokens see everything; the appending attention hides later tokens."""


class _ChainPass(_OfHead[ChainHead]):
    def forward(
        self,
        ids: torch.Tensor,
        given: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        before: torch.Tensor,
        total: torch.Tensor,
        past: list[Pair],
        places: torch.Tensor | None = None,
        shown_before: torch.Tensor | None = None,
        shown_total: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        where, more = [(before, total)] * len(past), {}
        if places is not None and shown_before is not None and shown_total is not None:
            depth = len(past) // 2
            where[depth:] = [(shown_before, shown_total)] * depth
            more = {"seen": SEEN, "places": places[0]}
        # A sequence's first token, to which no other token attends, has no slot.
        first = 0 if self.head.sees_first else 1
        appending = Appending(past, where, causal=True)
        with appending:
            found = self.head(ids, given, positions[0] + first, None, appending.cache, rows, **more)
        written = () if found.features is found.hidden or places is not None else (found.features[None],)
        return (found.logits[None], found.hidden[None], *written, *appending.present)


def chain_pass(head: ChainHead) -> "ir.Model":
    """The graph of a pass over T tokens of a chain head.

    Inputs: ``ids`` ``(1, T)`` int64; ``given`` ``(1, T, R)``, their rows; ``positions`` ``(1, T)`` int64, their slots
    in the cache; ``rows`` ``(R,)``, ``before`` and ``total`` as in `onnx.export.exported`; ``past.I.key`` and
    ``past.I.value`` by layer. A GliDe head also has ``places`` ``(1, T)`` int64, the positions of the rows, and
    ``shown.before`` and ``shown.total`` for the layers that attend to the rows.

    Outputs: ``logits`` ``(1, R, V)``, ``hidden`` ``(1, R, H)``, and ``present.I.key`` and ``present.I.value``; ``row``
    ``(1, R, R)`` where the row for the next token is not the head's hidden state.

    Raises:
        CannotExport: the head cannot be exported.
    """
    glide = isinstance(head, GlideHead)
    shapes, found = _tried(head)
    width, rows = torch.export.Dim("tokens", min=2), torch.export.Dim("rows", min=2)
    one = torch.ones(1, dtype=torch.int32)
    row = torch.randn(1, TOKENS, head.feature_size)
    # No tensor twice: the exporter would merge them into one input.
    given: Any = numbers(TOKENS), row, numbers(TOKENS), torch.arange(ROWS), one * (TOKENS - 1), one * TOKENS
    sizes: Any = {1: width}, {1: width}, {1: width}, {0: rows}, None, None, shapes.sizes
    names = ["ids", "given", "positions", "rows", "before", "total", *shapes.named("past")]
    given = *given, shapes.past
    if glide:
        given = *given, numbers(TOKENS), one * (TOKENS - 1), one * TOKENS
        sizes, names = (*sizes, {1: width}, None, None), [*names, "places", "shown.before", "shown.total"]
    written = [] if glide or found.features is found.hidden else ["row"]
    return as_graph(_ChainPass(head), given, sizes, names, ["logits", "hidden", *written, *shapes.named("present")])


def _tried(head: ChainHead) -> tuple[CacheShapes, ChainPass]:
    """The shapes of a head's caches, and its output for some tokens."""
    mode, more = Attending(), {"seen": SEEN} if isinstance(head, GlideHead) else {}
    with torch.no_grad(), mode:
        found = head(
            torch.zeros(1, 2, dtype=torch.int64),
            torch.randn(1, 2, head.feature_size),
            numbers(2)[0],
            None,
            mode.cache,
            **more,
        )
    return CacheShapes([mode.shapes[layer] for layer in sorted(mode.shapes)]), found


class _Fusing(_OfHead[ChainHead]):
    """Rows ``(T, R)`` of states ``(T, D)``, one for each layer that the head reads."""

    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        return self.head.fuse(dict(zip(self.head.layers, states, strict=True)))


def fusing(head: ChainHead) -> "ir.Model":
    """The graph of `ChainHead.fuse`: ``states.I`` ``(T, D)`` for the I-th of its layers to ``rows`` ``(T, R)``.

    Raises:
        CannotExport: torch cannot export it.
    """
    width = torch.export.Dim("tokens", min=2)
    states = [torch.randn(TOKENS, head.state_size) for _ in head.layers]
    return as_graph(_Fusing(head), (states,), ([{0: width} for _ in states],), state_names(head), ["rows"])


class _Remembering(_OfHead[BlockHead]):
    """Keys and values of T positions, ``(1, heads, T, size)`` each, from their states."""

    def forward(self, positions: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []

        class Keeping(NotingCache):
            def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
                kept.extend((key_states, value_states))
                return key_states, value_states

        rows = self.head.context_rows(dict(zip(self.head.layers, states, strict=True)))
        self.head.remember(rows[None], positions[0], Keeping())
        return tuple(kept)


def remembering(head: BlockHead) -> "ir.Model":
    """The graph of what a block head caches of T positions.

    Inputs: ``positions`` ``(1, T)`` int64; ``states.I`` ``(T, D)``. Outputs: ``present.I.key`` and ``present.I.value``
    ``(1, heads, T, size)`` by layer.

    Raises:
        CannotExport: torch cannot export it.
    """
    width = torch.export.Dim("tokens", min=2)
    states = [torch.randn(TOKENS, head.state_size) for _ in head.layers]
    given, sizes = (numbers(TOKENS), states), ({1: width}, [{0: width} for _ in states])
    names = [f"kept.{layer}.{part}" for layer in range(head.num_layers) for part in ("key", "value")]
    return as_graph(_Remembering(head), given, sizes, ["positions", *state_names(head)], names)


class _BlockPass(_OfHead[BlockHead]):
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, before: torch.Tensor, total: torch.Tensor, past: list[Pair]
    ) -> tuple[torch.Tensor, ...]:
        appending = Appending(past, [(before, total)] * len(past), causal=False)
        with appending:
            logits, hidden = self.head(ids, positions[0], None, appending.cache)
        if self.head.config.markov is None:
            logits, _ = self.head.row(logits, hidden, ids[0], self.head.blank())
        return (logits, hidden, *appending.present)


def block_pass(head: BlockHead) -> "ir.Model":
    """The graph of a pass over a block of B tokens.

    Inputs: ``ids`` and ``positions`` ``(1, B)`` int64; ``before`` and ``total`` ``(1,)`` int32, with B slots after
    those that the block attends to; ``past.I.key`` and ``past.I.value``. Outputs: ``logits`` ``(B, V)``, or ``(B, D)``
    without the contribution of a sequential head, if there is one; ``hidden`` ``(B, H)``; and ``present.I.key`` and
    ``present.I.value``.

    Raises:
        CannotExport: the head cannot be exported.
    """
    mode, size = Attending(), head.block_size
    one = torch.ones(1, dtype=torch.int32)
    with torch.no_grad(), mode:
        head(torch.zeros(1, size, dtype=torch.int64), numbers(size)[0], None, mode.cache)
    shapes = CacheShapes([mode.shapes[layer] for layer in sorted(mode.shapes)])
    given = numbers(size), numbers(size), one * (size - 1), one * size, shapes.past
    sizes = None, None, None, None, shapes.sizes
    names = ["ids", "positions", "before", "total", *shapes.named("past")]
    made = ["logits", "hidden", *shapes.named("present")]
    return as_graph(_BlockPass(head), given, sizes, names, made)


class _Row(_OfHead[BlockHead]):
    def forward(
        self, base: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, memory = self.head.row(base, hidden, token, memory)
        return logits, memory + 0  # a new tensor, since an output must not be the input itself


def block_row(head: BlockHead) -> "ir.Model":
    """The graph of `BlockHead.row` with a sequential head.

    Inputs: ``base`` ``(1, D)``, ``hidden`` ``(1, H)``, ``token`` ``(1,)`` int64, ``memory`` ``(1, R)``; outputs:
    ``logits`` ``(1, V)`` and ``next`` ``(1, R)``.

    Raises:
        CannotExport: torch cannot export it.
    """
    token = torch.zeros(1, dtype=torch.int64)
    base, hidden = torch.randn(1, head.draft_vocabulary), torch.randn(1, head.width)
    given = base, hidden, token, head.blank()[None].clone()
    return as_graph(_Row(head), given, None, ["base", "hidden", "token", "memory"], ["logits", "next"])


class _Confidence(_OfHead[BlockHead]):
    def forward(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return self.head.accept_prob(hidden, token)


def block_confidence(head: BlockHead) -> "ir.Model":
    """The graph of `BlockHead.accept_prob`: ``hidden`` ``(1, H)`` and ``token`` ``(1,)`` int64 to ``prob`` ``(1,)``.

    Raises:
        CannotExport: torch cannot export it.
    """
    given = torch.randn(1, head.width), torch.zeros(1, dtype=torch.int64)
    return as_graph(_Confidence(head), given, None, ["hidden", "token"], ["prob"])
