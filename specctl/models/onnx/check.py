"""A graph compared with the model that it was made from, before anybody reads what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.models.onnx.export import watched
from specctl.models.onnx.graph_quantization import BITS, nearest
from specctl.models.onnx.onnx_passes import Passes
from specctl.models.passes.layer_sizes import sizes
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.running.rounding import ROUNDING, apart

INPUTS = 0.1
"""The largest difference that rounding what enters products to 8 bits explains, where torch does not: the root of the
mean square of the logits' differences as a share of their standard deviation."""
STEPS = ((1, 0), (5, 3), (1, 0), (8, 8), (2, 1), (16, 4), (1, 0))
"""Passes after the first: tokens, and how many of them are taken back."""
FIRST = 24
LONGEST_WINDOW = 512
"""Sliding windows up to here are filled before the comparison."""


def difference(passes: Passes, model: PreTrainedModel, vocabulary: int, quantize: str | None = None) -> float:
    """The largest difference between a graph's passes and whole ones of its model, as `apart` measures it.

    Where weights are rounded it is the root of the mean square instead.

    The passes have several widths, and after some of them tokens are taken back. The model computes with weights that
    are rounded as the graph's are: what rounding weights does to a text differs from model to model.

    Args:
        passes: over the graph.
        model: in eval mode; its weights are afterwards what they were.
        vocabulary: V, ids are drawn from below it.
        quantize: how the graph's weights were rounded.
    """
    draws = torch.Generator().manual_seed(16)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=draws).tolist()

    windows = [window or 0 for window in sizes(model.config, "sliding_window")]
    first = FIRST + max(window for window in [0, *windows] if window <= LONGEST_WINDOW)
    if (most := first + sum(width for width, _ in STEPS) + 2) > passes.capacity:
        passes.grow(most, 0)
    layers = (-1, *range(passes.layers))
    text: list[int] = []
    worst = 0.0
    with nullcontext() if quantize is None else _rounded(model, BITS[quantize]):
        for width, back in ((first, 0), *STEPS):
            block = tokens(width)
            found = passes.run(block, len(text), width, layers)
            text += block
            logits, states = whole_pass(model, text)
            pairs = [(torch.as_tensor(found.logits[:, :vocabulary]), logits[-width:, :vocabulary])]
            pairs += [
                (torch.as_tensor(found.states[layer]), states[layer][-width:])
                for layer in (layers if quantize is None else [])
            ]
            worst = max(worst, *(_apart(mine, theirs, quantize) for mine, theirs in pairs))
            del text[len(text) - back :]
        if passes.trees:
            worst = max(worst, _tree_difference(passes, model, text, tokens(2), vocabulary))
    return worst


def _tree_difference(passes: Passes, model: PreTrainedModel, text: list[int], two: list[int], vocabulary: int) -> float:
    """The same for a tree behind a text: two tokens, each right after the text's last one. No graph that reads trees
    is quantised."""
    found = passes.run([text[-1], *two], len(text) - 1, 3, seen=TreeSight().grown([0, 0], 0))
    worst = 0.0
    for place, token in enumerate(two, start=1):
        logits, _ = whole_pass(model, [*text, token])
        worst = max(worst, apart(torch.as_tensor(found.logits[place, :vocabulary]), logits[-1, :vocabulary]))
    return worst


def limit(quantize: str | None, dtype: torch.dtype) -> float:
    """The largest `difference` that rounding explains."""
    return ROUNDING[dtype] if quantize is None else INPUTS


def whole_pass(model: PreTrainedModel, text: list[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits ``(T, V)`` and the states ``(T, D)`` of every layer in one pass without a cache."""
    states: dict[int, torch.Tensor] = {}
    with torch.inference_mode(), watched(model, states):
        ids = torch.tensor([text], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0]
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
        yield
    finally:
        for layer, weight in whole.items():
            layer.weight.data = weight


def _apart(mine: torch.Tensor, theirs: torch.Tensor, quantize: str | None) -> float:
    if quantize is None:
        return apart(mine, theirs)
    found = float((mine.float() - theirs.float()).square().mean().sqrt() / theirs.float().std())
    return found if found == found else float("inf")  # NaN is no rounding
