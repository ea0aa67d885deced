"""Checks of a graph: whether it computes the same as its model, and the same in passes of every width."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.errors import of_onnxruntime, out_of_memory
from specctl.models.onnx.blocks import Blocks
from specctl.models.onnx.export import watched
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.onnx.rewriting import BITS
from specctl.models.onnx.store import Unable, first_line
from specctl.models.passes.layer_sizes import sizes
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.weights import page_out
from specctl.models.running.one_function import ROUNDING, apart, widths_apart
from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    import numpy as np

INPUTS = 0.1
"""The largest difference explained by rounding the inputs of products to 8 bits: the root of the mean square of the
logits' differences, as a share of their standard deviation."""
STEPS = ((1, 0), (5, 3), (1, 0), (8, 8), (2, 1), (16, 4), (1, 0))
"""Passes after the first: tokens, and how many of them are taken back."""
FIRST, COMPARED_ROWS = 24, 8
"""Tokens of the first pass, and the most rows of logits of a pass that are compared together with its states: rows of a
large vocabulary take much memory. Where weights are rounded, FIRST."""
LONGEST_WINDOW = 512  # Sliding windows up to this size are filled before the comparison


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference results of a model in one pass, to compare its graph with."""

    block: list[int]  # the pass's T tokens
    before: int  # the number of tokens before the pass
    rows: range  # the indices in the pass to compare logits at
    logits: torch.Tensor  # ``(R, V)`` at these indices
    states: dict[int, torch.Tensor]  # ``(T, D)`` by layer; empty where they are not compared
    seen: "np.ndarray | None" = None  # ``(T, T)``, which of a tree's tokens each token sees; None for a chain


def expectations(
    model: PreTrainedModel, vocabulary: int, quantize: str | None = None, *, trees: bool = False
) -> list[Expected]:
    """The reference passes of a model without a cache, for the comparison with its graph.

    They have several widths, with rollbacks between some of them. The model's weights are rounded like the graph's,
    since the effect of rounding differs from model to model.

    Args:
        model: in eval mode; its weights are restored afterwards.
        vocabulary: V, ids are drawn from below it.
        quantize: how the graph's weights were rounded.
        trees: whether the graph reads trees; quantised graphs never do.
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
            rows = range(max(0, width - (COMPARED_ROWS if quantize is None else FIRST)), width)
            logits, states = whole_pass(model, [*text, *block], len(rows))
            kept = {} if quantize is not None else {layer: each[-width:] for layer, each in states.items()}
            found.append(Expected(block, len(text), rows, logits[:, :vocabulary], kept))
            text += block
            del text[len(text) - back :]
        if trees:  # two tokens, both right after the text's last token
            two = tokens(2)
            logits = torch.cat([whole_pass(model, [*text, token], 1)[0][:, :vocabulary] for token in two])
            seen = TreeSight().grown([0, 0], 0)
            found.append(Expected([text[-1], *two], len(text) - 1, range(1, 3), logits, {}, seen))
    return found


def difference(passes: OnnxPasses, expected: list[Expected], quantize: str | None = None) -> float:
    """The largest difference between a graph's passes and its model's, as `apart` measures it.

    Where weights are rounded it is the root mean square.

    Args:
        passes: over the graph.
        expected: in this order.
        quantize: how the graph's weights were rounded.
    """
    worst = 0.0
    for one in expected:
        width, vocabulary = len(one.block), one.logits.shape[-1]
        wanted = width - one.rows.start  # the last rows of a pass
        found = passes.one(0, one.block, one.before, wanted, tuple(one.states), seen=one.seen)
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
    """Round the weights of a model's linear layers, except the output layer, as in a quantised graph."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not output]
    whole = {layer: layer.weight.data for layer in layers}
    try:
        for layer, weight in whole.items():
            values = Blocks.of(weight.float().cpu().numpy(), bits).values()
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
    return found if found == found else float("inf")  # NaN is not rounding


def require_close(found: float, most: float) -> None:
    """Raise `Unable` if a graph's logits differ from its model's by more than rounding explains."""
    if found > most:
        raise Unable(
            f"what onnxruntime computes differs by {found:.2g} of the logits' spread, and rounding explains {most:g}"
        )


def require_equal(
    open_passes: Callable[[], OnnxPasses],
    model: PreTrainedModel,
    vocabulary: int,
    quantize: str | None,
    *,
    trees: bool,
) -> None:
    """Raise `Unable` unless a graph computes the same as its model, in passes of every width.

    The model runs before the graph is opened, so only one of the two is in memory at a time.
    """
    expected = expectations(model, vocabulary, quantize, trees=trees)
    page_out(model.parameters())
    try:
        passes = open_passes()
        found = difference(passes, expected, quantize)
        widths = widths_apart(Slot(passes), vocabulary)
    except Exception as error:
        if not (isinstance(error, RuntimeError) or of_onnxruntime(error)):
            raise
        why = f"onnxruntime cannot run its graph ({first_line(error)})"
        raise Unable(why, lasting=not out_of_memory(error)) from error
    require_close(found, limit(quantize, model.dtype))
    if widths > (most := ROUNDING[model.dtype]):
        raise Unable(
            "what onnxruntime computes for a token depends on how many are read with it: it differs by "
            f"{widths:.2g} of the logits' spread, and rounding explains {most:g}"
        )
