"""The passes of a chain head as ONNX graphs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specctl.models.draft_heads.chain import ChainHead, ChainPass
from specctl.models.draft_heads.glide import GlideHead
from specctl.models.onnx.export import ROWS, TOKENS, as_graph
from specctl.models.onnx_heads.attention_tracing import Appending, Attending, CacheShapes, Pair, numbers, state_names

if TYPE_CHECKING:
    import onnx_ir as ir

SEEN = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A GliDe head's tokens see all that they can: attention that appends hides what comes after them."""


class _ChainPass(nn.Module):
    def __init__(self, head: ChainHead) -> None:
        super().__init__()
        self.head = head
        # The first token of a sequence, to which no other attends, has no slot of its own.
        self._first = 0 if head.sees_first else 1

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
        appending = Appending(past, where, causal=True)
        with appending:
            found = self.head(ids, given, positions[0] + self._first, None, appending.cache, rows, **more)
        written = () if found.rows is found.hidden or places is not None else (found.rows[None],)
        return (found.logits[None], found.hidden[None], *written, *appending.present)


def chain_pass(head: ChainHead) -> "ir.Model":
    """The graph of a pass over T tokens of a chain head.

    Inputs: ``ids`` ``(1, T)`` int64; ``given`` ``(1, T, R)``, their rows; ``positions`` ``(1, T)`` int64, the slots of
    the cache that they go to; ``rows`` ``(R,)``, ``before`` and ``total`` as in `onnx.export.exported`; ``past.I.key``
    and ``past.I.value`` by layer. Of a GliDe head also ``places`` ``(1, T)`` int64, which the rows are of, and
    ``shown.before`` and ``shown.total`` for the layers that attend to what they bring in.

    Outputs: ``logits`` ``(1, R, V)``, ``hidden`` ``(1, R, H)``, and ``present.I.key`` and ``present.I.value``; ``row``
    ``(1, R, R)`` where the head reads another row than its hidden state with the next token.

    Raises:
        CannotExport: the head cannot be exported.
    """
    glide = isinstance(head, GlideHead)
    shapes, found = _tried(head)
    width, rows = torch.export.Dim("tokens", min=2), torch.export.Dim("rows", min=2)
    one = torch.ones(1, dtype=torch.int32)
    row = torch.randn(1, TOKENS, head.row_size)
    # No tensor twice, which would become one input.
    given: Any = numbers(TOKENS), row, numbers(TOKENS), torch.arange(ROWS), one * (TOKENS - 1), one * TOKENS
    sizes: Any = {1: width}, {1: width}, {1: width}, {0: rows}, None, None, shapes.sizes
    names = ["ids", "given", "positions", "rows", "before", "total", *shapes.named("past")]
    given = *given, shapes.past
    if glide:
        given = *given, numbers(TOKENS), one * (TOKENS - 1), one * TOKENS
        sizes, names = (*sizes, {1: width}, None, None), [*names, "places", "shown.before", "shown.total"]
    written = [] if glide or found.rows is found.hidden else ["row"]
    return as_graph(_ChainPass(head), given, sizes, names, ["logits", "hidden", *written, *shapes.named("present")])


def _tried(head: ChainHead) -> tuple[CacheShapes, ChainPass]:
    """The shapes of a head's caches, and what it makes of some tokens."""
    mode, more = Attending(), {"seen": SEEN} if isinstance(head, GlideHead) else {}
    with torch.no_grad(), mode:
        found = head(
            torch.zeros(1, 2, dtype=torch.int64),
            torch.randn(1, 2, head.row_size),
            numbers(2)[0],
            None,
            mode.cache,
            **more,
        )
    return CacheShapes([mode.shapes[layer] for layer in sorted(mode.shapes)]), found


class _Fusing(nn.Module):
    """Rows ``(T, R)`` of states ``(T, D)``, one for each layer that the head reads."""

    def __init__(self, head: ChainHead) -> None:
        super().__init__()
        self.head = head

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
