"""The passes of a block draft head as ONNX graphs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specctl.models.draft_heads.block import BlockHead
from specctl.models.onnx.export import TOKENS, as_graph
from specctl.models.onnx_heads.attention_tracing import (
    Appending,
    Attending,
    CacheShapes,
    NotingCache,
    Pair,
    numbers,
    state_names,
)

if TYPE_CHECKING:
    import onnx_ir as ir


class _Remembering(nn.Module):
    """Keys and values of T places, ``(1, heads, T, size)`` each, made of their states."""

    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.head = head

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
    """The graph of what a block head keeps of T places.

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


class _BlockPass(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.head = head

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

    Inputs: ``ids`` and ``positions`` ``(1, B)`` int64; ``before`` and ``total`` ``(1,)`` int32, with B places behind
    those that it attends to; ``past.I.key`` and ``past.I.value``. Outputs: ``logits`` ``(B, V)``, or ``(B, D)`` of a
    head with a sequential head, before that adds to them; ``hidden`` ``(B, H)``; and ``present.I.key`` and
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


class _Row(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, base: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, memory = self.head.row(base, hidden, token, memory)
        return logits, memory + 0  # it may be the very one that was given


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


class _Confidence(nn.Module):
    def __init__(self, head: BlockHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return self.head.accept_prob(hidden, token)


def block_confidence(head: BlockHead) -> "ir.Model":
    """The graph of `BlockHead.accept_prob`: ``hidden`` ``(1, H)`` and ``token`` ``(1,)`` int64 to ``prob`` ``(1,)``.

    Raises:
        CannotExport: torch cannot export it.
    """
    given = torch.randn(1, head.width), torch.zeros(1, dtype=torch.int64)
    return as_graph(_Confidence(head), given, None, ["hidden", "token"], ["prob"])
