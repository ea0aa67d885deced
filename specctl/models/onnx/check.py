"""A graph compared with the model that it was made from, before anybody reads what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.models.onnx.export import watched
from specctl.models.onnx.graph_quantization import BITS, nearest
from specctl.models.onnx.onnx_passes import Passes
from specctl.models.passes.layer_sizes import sizes
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.weights import page_out
from specctl.models.running.rounding import ROUNDING, apart

if TYPE_CHECKING:
    import numpy as np

INPUTS = 0.1
"""The largest difference that rounding what enters products to 8 bits explains, where torch does not: the root of the
mean square of the logits' differences as a share of their standard deviation."""
STEPS = ((1, 0), (5, 3), (1, 0), (8, 8), (2, 1), (16, 4), (1, 0))
"""Passes after the first: tokens, and how many of them are taken back."""
FIRST, ROWS = 24, 8
"""Tokens of the first pass; and of a pass, how many rows of logits are compared at most where states are compared too,
for those of a large vocabulary take much memory. Where weights are rounded, FIRST."""
LONGEST_WINDOW = 512
"""Sliding windows up to here are filled before the comparison."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model computes in a pass of a graph that has to compute the same.

    Attributes:
        block: the pass's T tokens.
        before: how many tokens the pass follows.
        rows: places in the pass whose logits are compared.
        logits: ``(R, V)`` at these places.
        states: ``(T, D)`` by layer; empty where they are not compared.
        seen: ``(T, T)``, of a tree: which of its tokens each sees; None of a chain.
    """

    block: list[int]
    before: int
    rows: range
    logits: torch.Tensor
    states: dict[int, torch.Tensor]
    seen: "np.ndarray | None" = None


def expectations(
    model: PreTrainedModel, vocabulary: int, quantize: str | None = None, *, trees: bool = False
) -> list[Expected]:
    """What passes of a model's graph are compared with: whole passes of the model.

    The passes have several widths, and after some of them tokens are taken back. The model computes with weights that
    are rounded as the graph's are: what rounding weights does to a text differs from model to model.

    Args:
        model: in eval mode; its weights are afterwards what they were.
        vocabulary: V, ids are drawn from below it.
        quantize: how the graph's weights were rounded.
        trees: whether the graph reads trees; none that does is quantised.
    """
    draws = torch.Generator().manual_seed(16)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=draws).tolist()

    windows = [window or 0 for window in sizes(model.config, "sliding_window")]
    first = FIRST + max(window for window in [0, *windows] if window <= LONGEST_WINDOW)
    text: list[int] = []
    found: list[Expected] = []
    with nullcontext() if quantize is None else _rounded(model, BITS[quantize]):
        for width, back in ((first, 0), *STEPS):
            block = tokens(width)
            rows = range(max(0, width - (ROWS if quantize is None else FIRST)), width)
            logits, states = whole_pass(model, [*text, *block], len(rows))
            kept = {} if quantize is not None else {layer: each[-width:] for layer, each in states.items()}
            found.append(Expected(block, len(text), rows, logits[:, :vocabulary], kept))
            text += block
            del text[len(text) - back :]
        if trees:  # two tokens, each right after the text's last one
            two = tokens(2)
            logits = torch.cat([whole_pass(model, [*text, token], 1)[0][:, :vocabulary] for token in two])
            seen = TreeSight().grown([0, 0], 0)
            found.append(Expected([text[-1], *two], len(text) - 1, range(1, 3), logits, {}, seen))
    return found


def difference(passes: Passes, expected: list[Expected], quantize: str | None = None) -> float:
    """The largest difference between a graph's passes and what its model computes, as `apart` measures it.

    Where weights are rounded it is the root of the mean square instead.

    Args:
        passes: over the graph.
        expected: in this order.
        quantize: how the graph's weights were rounded.
    """
    most = max(one.before + len(one.block) for one in expected) + 2
    if most > passes.capacity:
        passes.grow(most, 0)
    worst = 0.0
    for one in expected:
        width, vocabulary = len(one.block), one.logits.shape[-1]
        wanted = width - one.rows.start  # the last rows of a pass
        found = passes.run(one.block, one.before, wanted, tuple(one.states), seen=one.seen)
        pairs = [(torch.as_tensor(found.logits[:, :vocabulary]), one.logits)]
        pairs += [(torch.as_tensor(found.states[layer]), states) for layer, states in one.states.items()]
        worst = max(worst, *(_apart(mine, theirs, quantize) for mine, theirs in pairs))
    return worst


def limit(quantize: str | None, dtype: torch.dtype) -> float:
    """The largest `difference` that rounding explains."""
    return ROUNDING[dtype] if quantize is None else INPUTS


def whole_pass(model: PreTrainedModel, text: list[int], rows: int) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits ``(rows, V)`` of the last tokens, and every layer's states ``(T, D)``, in one pass without a cache."""
    states: dict[int, torch.Tensor] = {}
    with torch.inference_mode(), watched(model, states):
        ids = torch.tensor([text], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0]
    return logits, {layer: each[0] for layer, each in states.items()}


@contextmanager
def _rounded(model: PreTrainedModel, bits: int) -> Iterator[None]:
    """Give a model's linear layers, all but the output layer, the weights that they have in a quantised graph."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not output]
    whole = {layer: layer.weight.data for layer in layers}
    try:
        for layer, weight in whole.items():
            values = nearest(weight.float().cpu().numpy(), bits)
            layer.weight.data = torch.from_numpy(values).to(weight)
            page_out([weight])
        yield
    finally:
        for layer, weight in whole.items():
            layer.weight.data = weight


def _apart(mine: torch.Tensor, theirs: torch.Tensor, quantize: str | None) -> float:
    if quantize is None:
        return apart(mine, theirs)
    found = float((mine.float() - theirs.float()).square().mean().sqrt() / theirs.float().std())
    return found if found == found else float("inf")  # NaN is no rounding
