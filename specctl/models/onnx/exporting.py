"""torch's exporter of networks to ONNX graphs, and the attention that they get."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specctl.models.onnx.nodes import MICROSOFT

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 21
HEAD_MULTIPLE = 8
"""What onnxruntime wants the size of a head to be a multiple of."""


class CannotExport(Exception):  # noqa: N818 - it is a finding
    """Why a model cannot become a graph, as the end of a sentence."""


def as_graph(network: nn.Module, given: Any, sizes: Any, inputs: Sequence[str], outputs: Sequence[str]) -> "ir.Model":
    """The graph of a network, as torch's exporter makes it.

    Args:
        network: in eval mode.
        given: its arguments in a pass that is traced.
        sizes: by argument, which of its dimensions vary: a `torch.export.Dim` for each, or None.
        inputs, outputs: their names.

    Raises:
        CannotExport: torch cannot export it.
    """
    with _quiet(), torch.no_grad():
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
        except Exception as error:  # whatever the exporter stumbles over, torch can still run the network
            raise _reason(error) from error
    graph: ir.Model = program.model
    return graph


def _reason(error: BaseException) -> CannotExport:
    """What to say of an exporter's error: the finding in its chain, or its first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotExport):
            return CannotExport(*cause.args)
        last, cause = cause, cause.__cause__ or cause.__context__
    line = next(iter(str(last).strip().splitlines()), type(last).__name__)
    return CannotExport(f"torch cannot export it ({type(last).__name__}: {line[:200]})")


def attention_node(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    past: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A GroupQueryAttention node, which appends to a cache.

    Args:
        rows: queries ``(1, H, T, D)``, keys and values ``(1, K, T, D)``.
        past: the cached keys and values.
        places: ``before`` and ``total`` of `exported`.
        bias: as there.
        scale: of products of queries and keys; None for the usual one.
        settings: further ones of the node.

    Returns:
        The mixture of values ``(1, T, H, D)``, and the cache afterwards.
    """
    query, key, _ = rows
    _, heads, width, size = query.shape
    settings |= {"num_heads": heads, "kv_num_heads": key.shape[1]}
    settings["scale"] = float(size**-0.5 if scale is None else scale)
    mixed, *present = torch.onnx.ops.symbolic_multi_out(
        f"{MICROSOFT}::GroupQueryAttention",
        # Rotation by tables of cosines and sines, and the positions for them, may be added later.
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
    """Keep the exporter's warnings and log lines to itself, and those of transformers about its attention."""
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
