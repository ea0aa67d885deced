"""The export of models as ONNX graphs with torch's exporter."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

from specctl.models.onnx.graph import state_name
from specctl.models.onnx.rewriting import MICROSOFT
from specctl.models.onnx.store import first_line
from specctl.models.onnx.weights import LoadedWeights, Weight, Weights
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.watching import LAST, decoder, decoder_layers

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 21
HEAD_MULTIPLE = 8  # onnxruntime requires a head size that is a multiple of this


class CannotExport(Exception):  # noqa: N818 - it is a finding
    """Why a model cannot be exported, as the end of a sentence."""


def as_graph(
    network: nn.Module,
    given: Any,
    sizes: Any,
    inputs: Sequence[str],
    outputs: Sequence[str],
    weights: Weights | None = None,
    within: str = "",
) -> "ir.Model":
    """The graph of a network, from torch's exporter. Parameters of two dimensions and more are `Weight`s in it, and are
    not read.

    Args:
        network: in eval mode.
        given: the arguments of the traced pass.
        sizes: for each argument its dynamic dimensions, a `torch.export.Dim` each, or None.
        inputs, outputs: names of the graph's inputs and outputs.
        weights: has the network's parameters; None for the network itself.
        within: a prefix of the parameters' names in the network that they lack in ``weights``.

    Raises:
        CannotExport: torch cannot export it.
    """
    with _quiet(), torch.no_grad(), _without_numbers(network) as lazy:
        try:
            program: Any = torch.onnx.export(
                network,
                given,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=sizes,
                input_names=list(inputs),
                output_names=list(outputs),
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # whatever fails in the exporter, torch can still run the network
            raise _reason(error) from error
    graph: ir.Model = program.model
    source = weights or LoadedWeights(network)
    for name in lazy & graph.graph.initializers.keys():
        value = graph.graph.initializers[name]
        traced = value.const_value
        assert traced is not None, "it is an initialiser"
        value.const_value = Weight(source, [name.removeprefix(within)], traced.shape.numpy(), traced.dtype)
    return graph


@contextmanager
def _without_numbers(network: nn.Module) -> Iterator[set[str]]:
    """Replace the parameters of two dimensions and more by fakes, which have a shape and a device but no memory.

    Yields:
        Their names.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    lazy: set[str] = set()
    for path, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2:
                continue
            if weight not in fakes:
                with mode:
                    blank = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                    fakes[weight] = nn.Parameter(blank, requires_grad=False)
            replaced.append((module, name, weight))
            lazy.add(f"{path}.{name}" if path else name)
    try:
        for module, name, weight in replaced:
            setattr(module, name, fakes[weight])
        yield lazy
    finally:
        for module, name, weight in replaced:
            setattr(module, name, weight)


def _reason(error: Exception) -> CannotExport:
    """The reason in an exporter's error: the `CannotExport` in its chain, or the first line of the innermost error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotExport):
            return CannotExport(*cause.args)
        last, cause = cause, cause.__cause__ or cause.__context__
    return CannotExport(f"torch cannot export it ({type(last).__name__}: {first_line(last)})")


def attention_node(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    past: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A GroupQueryAttention node that appends to a cache.

    Args:
        rows: queries ``(1, H, T, D)``, keys and values ``(1, K, T, D)``.
        past: the cached keys and values.
        places: ``before`` and ``total`` of `exported`.
        bias: see `exported`.
        scale: the scale of the attention scores; None for the default.
        settings: further attributes of the node.

    Returns:
        The attention output ``(1, T, H, D)``, and the cache afterwards.
    """
    query, key, _ = rows
    _, heads, width, size = query.shape
    settings |= {"num_heads": heads, "kv_num_heads": key.shape[1]}
    settings["scale"] = float(size**-0.5 if scale is None else scale)
    mixed, *present = torch.onnx.ops.symbolic_multi_out(
        f"{MICROSOFT}::GroupQueryAttention",
        # Inputs for rotation, the tables of cosines and sines and the positions, may be added later.
        (
            *(states.transpose(1, 2).reshape(1, width, -1) for states in rows),
            *past,
            *places,
            *([] if bias is None else [None, None, None, bias]),
        ),
        settings,
        dtypes=(query.dtype, past[0].dtype, past[1].dtype),
        shapes=((1, width, heads * size), past[0].shape, past[1].shape),
        version=1,
    )
    return mixed.reshape(1, width, heads, size), present[0], present[1]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and log lines, and those of transformers about its attention."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


ATTENTION = "specctl_onnx"  # The name of the exported models' attention in transformers
TOKENS, ROWS, SEEN = 5, 3, 7
"""Sizes of the traced pass, all different and above 1, so that none is taken for a constant."""
NUMBERED = ("ids", "positions", "rows", "before", "total")


@dataclass(slots=True)
class _Trace:
    """The inputs of a traced model's attention, and its caches after the pass, by layer."""

    windows: list[int | None]
    past: Sequence[tuple[torch.Tensor, torch.Tensor]]
    before: torch.Tensor
    total: torch.Tensor
    bias: torch.Tensor | None
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_tracing: list[_Trace] = []


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, K, T, D)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface's signature
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention as one GroupQueryAttention node, which appends to the cache and applies its own mask."""
    trace = _tracing[-1]
    layer = module.layer_idx
    if not isinstance(layer, int) or layer in trace.present:
        raise CannotExport("its layers share their attention")
    if sliding_window != trace.windows[layer]:
        raise CannotExport("its attention has a window of a kind that onnxruntime does not know")
    if more.get("s_aux") is not None:
        raise CannotExport("its attention has sinks")
    settings: dict[str, Any] = {"scale": scaling}
    if sliding_window is not None:
        settings["local_window_size"] = sliding_window
    if softcap is not None:
        settings["softcap"] = float(softcap)
    mixed, *present = attention_node(
        (query, key, value), trace.past[layer], (trace.before, trace.total), trace.bias, **settings
    )
    trace.present[layer] = present[0], present[1]
    return mixed, None


class _Traced(nn.Module):
    """The traced module: one pass over ids ``(1, T)``, positions ``(1, T)``, rows ``(R,)`` and attention's inputs.

    It returns the logits ``(1, R, V)`` of the rows, the states ``(1, T, D)`` of every layer and the last ones, and all
    keys and values.
    """

    def __init__(self, model: PreTrainedModel, windows: list[int | None]) -> None:
        super().__init__()
        self.model = model
        self._windows = windows

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        before: torch.Tensor,
        total: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        trace = _Trace(self._windows, past, before, total, bias)
        states: dict[int, torch.Tensor] = {}
        _tracing.append(trace)
        try:
            with watched(self.model, states):
                logits = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows).logits
        finally:
            _tracing.pop()
        if sorted(trace.present) != list(range(len(past))):
            raise CannotExport("its attention is not transformers' own")
        present = [states_of for layer in range(len(past)) for states_of in trace.present[layer]]
        return (logits, *(states[layer] for layer in sorted(states)), *present)


@contextmanager
def watched(model: PreTrainedModel, states: dict[int, torch.Tensor]) -> Iterator[None]:
    """Record the inputs of all decoder layers and the states after the final norm, each ``(1, T, D)``."""

    def keep(layer: int, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[layer] = given[0] if given else named["hidden_states"]

    def keep_last(_: nn.Module, __: Any, output: Any) -> None:
        states[LAST] = output[0]

    handles = [decoder(model).register_forward_hook(keep_last)]
    for index, layer in enumerate(decoder_layers(model)):
        handles.append(layer.register_forward_pre_hook(partial(keep, index), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a layer's keys and values ``(1, heads, capacity, size)``, and its sliding window."""

    heads: int
    size: int
    window: int | None


def cache_shapes(model: PreTrainedModel) -> list[CacheShape]:
    """The shape of each layer's cache.

    Raises:
        CannotExport: a layer does not cache keys and values of one shape.
    """
    cache = DynamicCache(config=model.config)
    device = next(model.parameters()).device
    with _without_numbers(model), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        token = torch.zeros(1, 2, dtype=torch.int64, device=device)
        model(input_ids=token, use_cache=True, **{cache_argument(type(model)): cache})
    shapes = []
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CannotExport("it has layers with a state of their own")
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape != values.shape:
            raise CannotExport("its cache keeps no keys and values of one shape")
        if keys.shape[3] % HEAD_MULTIPLE:
            raise CannotExport(f"its heads have a size of {keys.shape[3]}, and onnxruntime wants multiples of 8")
        shapes.append(CacheShape(keys.shape[1], keys.shape[3], getattr(layer, "sliding_window", None)))
    return shapes


def exported(model: PreTrainedModel, weights: Weights | None = None, *, trees: bool = False) -> "ir.Model":
    """The graph of one pass over T tokens after those in the cache.

    Inputs: ``ids`` and ``positions`` ``(1, T)`` int64; ``rows`` ``(R,)`` int64, the indices in the pass to compute
    logits for; ``total`` ``(1,)`` int32, the number of tokens cached after the pass, and ``before`` ``(1,)`` int32, one
    less; ``past.I.key`` and ``past.I.value`` ``(1, heads, capacity, size)`` for layer I. A graph for trees also has
    ``bias`` ``(1, 1, T, S)``, added to the attention scores of each token and each of the S cached ones.

    Outputs: ``logits`` ``(1, R, V)``; ``state.I`` and ``state.last`` ``(1, T, D)``, as `Slot.watch` numbers them;
    ``present.I.key`` and ``present.I.value``, which may share memory with the inputs.

    Args:
        model: in eval mode, on one device.
        weights: has its parameters; None for the model itself.
        trees: whether the graph should read trees; only for a model with full attention in every layer.

    Raises:
        CannotExport: the model cannot be exported.
    """
    shapes = cache_shapes(model)
    device, dtype = next(model.parameters()).device, model.dtype
    traced = _Traced(model, [shape.window for shape in shapes])

    def numbers(count: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.arange(count, dtype=kind, device=device)

    past = [
        tuple(torch.zeros(1, shape.heads, 64, shape.size, dtype=dtype, device=device) for _ in range(2))
        for shape in shapes
    ]
    one = torch.ones(1, dtype=torch.int32, device=device)
    given: Any = numbers(TOKENS)[None], numbers(TOKENS)[None], numbers(ROWS), one * (TOKENS - 1), one * TOKENS, past
    width, rows, capacity, seen = (torch.export.Dim(name, min=2) for name in ("tokens", "rows", "capacity", "seen"))
    sizes: Any = {1: width}, {1: width}, {0: rows}, None, None, [({2: capacity}, {2: capacity}) for _ in shapes]
    if trees:
        given = *given, torch.zeros(1, 1, TOKENS, SEEN, dtype=dtype, device=device)
        sizes = *sizes, {2: width, 3: seen}
    layers = sorted([LAST, *range(len(decoder_layers(model)))])
    kept = [f".{index}.{part}" for index in range(len(shapes)) for part in ("key", "value")]
    with _attending(model):
        return as_graph(
            traced,
            given,
            sizes,
            [*NUMBERED, *(f"past{name}" for name in kept), *(["bias"] if trees else [])],
            ["logits", *map(state_name, layers), *(f"present{name}" for name in kept)],
            weights or LoadedWeights(model),
            within="model.",
        )


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the node applies its own."""


@contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend through `_attention`."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    usual = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        model.set_attn_implementation(usual)
