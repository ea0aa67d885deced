"""The projections to queries, keys and values as one."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specctl.models.onnx.nodes import constant, made_by, only_use, set_inputs, weight_value


@dataclass(frozen=True, slots=True)
class Projection:
    """``source @ weight + bias``."""

    source: ir.Value
    weight: "np.ndarray"
    bias: "np.ndarray | None"


def _projection(value: ir.Value | None) -> Projection | None:
    add = made_by(value, "Add")
    bias = None
    if add is not None:
        left, right = add.inputs
        bias, value = (constant(left), right) if constant(left) is not None else (constant(right), left)
        if bias is None:
            return None
    product = made_by(value, "MatMul")
    weight = None if product is None else constant(product.inputs[1])
    if product is None or weight is None or product.inputs[0] is None or only_use(product.outputs[0]) is None:
        return None
    return Projection(product.inputs[0], weight, bias)


def pack(graph: ir.Graph, attention: ir.Node) -> None:
    """One projection for queries, keys and values, where all three are plain ones of one input."""
    found = [_projection(value) for value in attention.inputs[:3]]
    known = [each for each in found if each is not None]
    if len(known) < 3 or len({each.source for each in known}) > 1 or len({each.bias is None for each in known}) > 1:
        return
    name = f"packed.{attention.outputs[0].name}"
    weight = weight_value(graph, f"{name}.weight", np.concatenate([each.weight for each in known], axis=1))
    last = ir.node("MatMul", [known[0].source, weight])
    graph.insert_before(attention, last)
    if known[0].bias is not None:
        bias = np.concatenate([each.bias for each in known if each.bias is not None])
        last = ir.node("Add", [last.outputs[0], weight_value(graph, f"{name}.bias", bias)])
        graph.insert_before(attention, last)
    set_inputs(attention, [last.outputs[0], None, None, *attention.inputs[3:]])
