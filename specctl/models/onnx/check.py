"""Checks of a graph: whether it computes the same as its model, and the same in passes of every width.

What rounding explains is measured on the model itself, in torch: `jittered` moves every result by one unit in the last
place, and `coarse` rounds the inputs of products to 8 bits, as onnxruntime does where weights are rounded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.errors import of_onnxruntime, out_of_memory
from specctl.models.onnx.blocks import BITS, OUTPUT_BITS, rounded
from specctl.models.onnx.export import watched
from specctl.models.onnx.graph import state_name
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.onnx.skeletons import lent
from specctl.models.onnx.store import Unable, first_line
from specctl.models.onnx.weights import Weights
from specctl.models.passes.layer_sizes import sizes
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.watching import LAST
from specctl.models.passes.weights import page_out
from specctl.models.running.one_function import FACTOR, LOW_FACTOR, jittered, row_errors, widths_apart
from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    import numpy as np

TEXTS = ((0, (24, 1, 5)), (3, (1, 8)), (8, (2, 16, 1)))
"""How many of the last tokens are taken back, and the widths of the passes after that."""
COMPARED_ROWS = 8
"""The most rows of logits of a pass that are compared together with its states: rows of a large vocabulary take much
memory."""
LONGEST_WINDOW = 512  # Sliding windows up to this size are filled before the comparison
COARSE, UNRELATED = 4.0, 1.0
"""How many times further than `coarse` results those of a graph with rounded weights may be off, and the most of their
spread. Unrelated results are off by 1.4 spreads.

Measured in 4 and 8 bits: 1.0 to 1.3 times in the worst layer of SmolLM2 135M, with 13 texts; 1.1 to 1.3 times in that
of Gemma 3 270M in Q4_K_M with three texts, and by chance in few rows 2.1 times with a fourth. Faults are found by the
comparison without that rounding, where the same graphs were at 0.05 to 0.43 of the limit.
"""
FLOAT_ACTIVATIONS = 1  # The accuracy level of products that do not round their inputs
LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference results of a model in one pass, to compare its graph with."""

    block: list[int]  # the pass's T tokens
    before: int  # the number of tokens before the pass
    rows: range  # the indices in the pass to compare logits at
    results: dict[str, torch.Tensor]  # logits ``(R, V)`` at these indices and states ``(T, D)``, by the graph's names
    seen: "np.ndarray | None" = None  # ``(T, T)``, which of a tree's tokens each token sees; None for a chain


def expectations(
    model: PreTrainedModel, vocabulary: int, *, trees: bool = False, texts: int = len(TEXTS)
) -> list[Expected]:
    """The reference passes of a model without a cache, for the comparison with its graph.

    They have several widths, with rollbacks between some of them.

    Args:
        model: in eval mode.
        vocabulary: V, ids are drawn from below it.
        trees: whether the graph reads trees; quantised graphs never do.
        texts: how many of `TEXTS` to read.
    """
    draws = torch.Generator().manual_seed(16)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocabulary, (count,), generator=draws).tolist()

    windows = [window or 0 for window in sizes(model.config, "sliding_window")]
    text = tokens(max(window for window in [0, *windows] if window <= LONGEST_WINDOW))
    found: list[Expected] = []
    known = 0  # tokens of the text that have been read
    for back, widths in TEXTS[:texts]:
        del text[len(text) - back :]
        known -= back
        places: list[tuple[int, int, range]] = []  # where each pass begins and ends, and its rows of logits
        for width in widths:
            text += tokens(width)
            start, known = max(known, 0), len(text)
            places.append((start, known, range(max(0, known - start - COMPARED_ROWS), known - start)))
        wanted = [start + row for start, _, rows in places for row in rows]
        whole = whole_pass(model, text, wanted)
        logits = iter(torch.split(whole.pop(LOGITS)[:, :vocabulary], [len(rows) for *_, rows in places]))
        for start, end, rows in places:
            states = {name: each[start:end] for name, each in whole.items()}
            found.append(Expected(text[start:end], start, rows, {LOGITS: next(logits), **states}))
    if trees:  # two tokens, both right after the text's last token
        two = tokens(2)
        rows_of = [whole_pass(model, [*text, token], [len(text)])[LOGITS][:, :vocabulary] for token in two]
        seen = TreeSight().grown([0, 0], 0)
        branches = {LOGITS: torch.cat(rows_of)}
        found.append(Expected([text[-1], *two], len(text) - 1, range(1, 3), branches, seen))
    return found


def whole_pass(model: PreTrainedModel, text: list[int], rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Logits ``(R, V)`` after some tokens, and every layer's states ``(T, D)``, in one pass without a cache."""
    states: dict[int, torch.Tensor] = {}
    with torch.inference_mode(), watched(model, states):
        ids = torch.tensor([text], device=next(model.parameters()).device)
        kept = torch.tensor(rows, device=ids.device)
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0]
    return {LOGITS: logits, **{state_name(layer): each[0] for layer, each in states.items()}}


def results(passes: OnnxPasses, one: Expected) -> dict[str, torch.Tensor]:
    """What a graph computes in a pass."""
    vocabulary = one.results[LOGITS].shape[-1]
    layers = {
        name: layer for layer in (LAST, *range(passes.graph.layers)) if (name := state_name(layer)) in one.results
    }
    wanted = len(one.block) - one.rows.start  # the last rows of a pass
    found = passes.one(0, one.block, one.before, wanted, tuple(layers.values()), seen=one.seen)
    states = {name: torch.as_tensor(found.states[layer]) for name, layer in layers.items()}
    return {LOGITS: torch.as_tensor(found.logits[:, :vocabulary]), **states}


Differences = dict[str, float]
"""By result: the root mean square of the rows' differences, each as a share of the row's spread."""


def differences(found: Iterable[dict[str, torch.Tensor]], expected: Sequence[Expected]) -> Differences:
    """How far results are from the reference.

    Args:
        found: the results of the first passes of ``expected``, or of all.
        expected: the reference.
    """
    rows: dict[str, list[torch.Tensor]] = {}
    for mine, one in zip(found, expected, strict=False):
        for name, theirs in one.results.items():
            rows.setdefault(name, []).append(row_errors(mine[name].float(), theirs.float()).cpu())
    return {name: float(torch.cat(each).square().mean().sqrt()) for name, each in rows.items()}


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model computes, and how far from that rounding may take a graph.

    Attributes:
        expected: the passes to compare.
        exact: the limits of a graph that rounds as torch does.
        limits: those of a graph whose products round their inputs to 8 bits; None where weights are not rounded.
    """

    expected: list[Expected]
    exact: Differences
    limits: Differences | None


def reference(
    model: PreTrainedModel,
    vocabulary: int,
    quantize: str | None = None,
    *,
    trees: bool = False,
    weights: Weights | None = None,
) -> Reference:
    """The reference of a graph, from torch.

    The model's weights are rounded like the graph's, since the effect of rounding differs from model to model.

    Args:
        model: in eval mode; its weights are restored afterwards.
        vocabulary: V, ids are drawn from below it.
        quantize: how the graph's weights were rounded.
        trees: whether the graph reads trees; quantised graphs never do.
        weights: of a `packed_model`.
    """

    def moved(texts: int = len(TEXTS)) -> Differences:
        return differences((one.results for one in expectations(model, vocabulary, texts=texts)), expected)

    blocks: dict[nn.Module, int] = {}
    with ExitStack() as stack:
        if weights is not None:
            stack.enter_context(lent(model, weights))
            blocks = _packed(model, weights)
        elif quantize is not None:
            blocks = stack.enter_context(_rounded(model, BITS[quantize]))
        expected = expectations(model, vocabulary, trees=trees)
        if any(each.isnan().any() for one in expected for each in one.results.values()):
            raise Unable("torch computes NaN with its weights")
        with jittered(model):
            own = moved(texts=1)
        factor, least = FACTOR.get(model.dtype, LOW_FACTOR), torch.finfo(model.dtype).eps
        exact = {name: factor * max(found, least) for name, found in own.items()}
        if not blocks:
            return Reference(expected, exact, None)
        with coarse(blocks):
            own = moved()
    limits = {name: max(min(COARSE * found, UNRELATED), exact[name]) for name, found in own.items()}
    return Reference(expected, exact, limits)


@contextmanager
def _rounded(model: PreTrainedModel, bits: int) -> Iterator[dict[nn.Module, int]]:
    """Round the weights of a model's embeddings and linear layers as in a quantised graph; yields the sizes of the
    blocks by linear layer.
    """
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) or layer is embeddings]
    whole: dict[nn.Module, nn.Parameter] = {layer: layer.weight for layer in layers}  # type: ignore[misc]
    sizes_of: dict[nn.Module, int] = {}
    made: dict[tuple[nn.Parameter, int], tuple[int, nn.Parameter]] = {}  # tied weights are rounded once
    try:
        for layer, weight in whole.items():
            own = OUTPUT_BITS if layer in (output, embeddings) else bits
            if (weight, own) not in made:
                blocks = rounded(weight.detach().float().cpu().numpy(), own)
                values = torch.from_numpy(blocks.values()).to(weight.detach())
                made[weight, own] = blocks.block, nn.Parameter(values, requires_grad=False)
            block, new = made[weight, own]
            if layer is embeddings and weight.shape[1] % block:  # onnxruntime looks up whole blocks only
                continue
            layer.weight = new
            if layer is not embeddings:
                sizes_of[layer] = block
            page_out([weight.data])
        yield sizes_of
    finally:
        for layer, weight in whole.items():
            layer.weight = weight


def _packed(model: PreTrainedModel, weights: Weights) -> dict[nn.Module, int]:
    """The sizes of a file's own blocks, by the layer of a `packed_model` whose product rounds its inputs."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    found = {layer: weights.blocks(f"{path}.weight") for path, layer in layers.items()}
    return {layer: blocks.block for layer, blocks in found.items() if blocks is not None}


@contextmanager
def coarse(blocks: dict[nn.Module, int]) -> Iterator[None]:
    """Round the inputs of linear layers to 8 bits in blocks, each with a scale, as onnxruntime does.

    Args:
        blocks: the size of the blocks by layer.
    """

    def rounded(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return _eight_bits(given[0], blocks[layer]), *given[1:]

    handles = [layer.register_forward_pre_hook(rounded) for layer in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _eight_bits(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Rows ``(..., K)`` rounded to 8 bits in blocks."""
    inputs = rows.shape[-1]
    padded = nn.functional.pad(rows, (0, -inputs % block))
    groups = padded.reshape(*rows.shape[:-1], -1, block)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scales > 0, groups / scales, 0).round()
    return (codes * scales).reshape(padded.shape)[..., :inputs]


def require_close(found: float, most: float, what: str = LOGITS) -> None:
    """Raise `Unable` if a graph's results differ from its model's by more than rounding explains.

    Args:
        found: the difference as a share of the results' spread.
        most: what rounding explains.
        what: the name of the result.
    """
    if not found <= most:
        layer = what.removeprefix("state.")
        spreads = {LOGITS: "the logits' spread", state_name(LAST): "the last states' spread"}
        spread = spreads.get(what, f"the spread of the states before layer {layer}")
        raise Unable(f"what onnxruntime computes differs by {found:.2g} of {spread}, and rounding explains {most:.2g}")


def require_all_close(found: Differences, limits: Differences) -> None:
    """Raise `Unable` if one of a graph's results differs from its model's by more than rounding explains."""
    worst = max(found, key=lambda name: found[name] / limits[name])
    require_close(found[worst], limits[worst], worst)


def require_equal(
    open_passes: Callable[[Path], OnnxPasses],
    path: Path,
    model: PreTrainedModel,
    vocabulary: int,
    quantize: str | None,
    *,
    trees: bool,
    weights: Weights | None = None,
) -> None:
    """Raise `Unable` unless a graph computes the same as its model, in passes of every width.

    Where weights are rounded, products round their inputs too, and its effect hides small faults. So the graph is first
    compared with products that do not.

    The model runs before the graph is opened, so only one of the two is in memory at a time.

    Args:
        open_passes: opens a graph.
        path: of the graph.
        model: in eval mode.
        vocabulary: V.
        quantize: how the graph's weights were rounded.
        trees: whether the graph reads trees.
        weights: of a `packed_model`.
    """
    try:
        known = reference(model, vocabulary, quantize, trees=trees, weights=weights)
        page_out(model.parameters())
        if known.limits is not None:
            with _float_activations(path) as strict:
                found = compared(open_passes(strict), known.expected)
            require_all_close(found, known.exact)
        passes = open_passes(path)
        found = compared(passes, known.expected)
        widths = widths_apart(Slot(passes), vocabulary)
    except Exception as error:
        if isinstance(error, Unable) or not (isinstance(error, RuntimeError) or of_onnxruntime(error)):
            raise
        why = f"onnxruntime cannot run its graph ({first_line(error)})"
        raise Unable(why, lasting=not out_of_memory(error)) from error
    require_all_close(found, known.limits or known.exact)
    most = known.exact[LOGITS] if quantize is None else 0.0
    if widths > most:
        raise Unable(
            "what onnxruntime computes for a token depends on how many are read with it: it differs by "
            f"{widths:.2g} of the logits' spread, and rounding explains {most:.2g}"
        )


def compared(passes: OnnxPasses, expected: Sequence[Expected]) -> Differences:
    """How far a graph's passes are from its model's."""
    return differences((results(passes, one) for one in expected), expected)


@contextmanager
def _float_activations(path: Path) -> Iterator[Path]:
    """The same graph next to the first, but with products that do not round their inputs."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    for node in graph.graph.node:
        for setting in node.attribute:
            if setting.name == "accuracy_level":
                setting.i = FLOAT_ACTIVATIONS
    strict = path.with_name(f"float-{path.name}")
    try:
        strict.write_bytes(graph.SerializeToString())
        yield strict
    finally:
        strict.unlink(missing_ok=True)
