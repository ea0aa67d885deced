"""Root mean square norms, and the residual sums before them, as one node each."""

import onnx_ir as ir

from specctl.models.onnx.nodes import MICROSOFT, constant, made_by, only_use, other, replace, same_shape


def fuse_norm(graph: ir.Graph, mean: ir.Node) -> None:
    """x * 1/sqrt(mean(x^2) + eps) * weight."""
    square, axes = mean.inputs[0], constant(mean.inputs[1])
    power = made_by(square, "Pow")
    if power is None or axes is None or constant(power.inputs[1]) != 2:
        return
    source = power.inputs[0]
    if source is None or source.shape is None or axes.tolist() not in ([-1], [len(source.shape) - 1]):
        return
    add = only_use(mean.outputs[0])
    epsilon = constant(other(add, mean.outputs[0])) if add is not None and add.op_type == "Add" else None
    root = only_use(add.outputs[0]) if add is not None else None
    inverse = only_use(root.outputs[0]) if root is not None and root.op_type == "Sqrt" else None
    scaled = only_use(inverse.outputs[0]) if inverse is not None and inverse.op_type == "Reciprocal" else None
    if epsilon is None or scaled is None or inverse is None or scaled.op_type != "Mul":
        return
    weighted = only_use(scaled.outputs[0])
    if other(scaled, inverse.outputs[0]) is not source or weighted is None or weighted.op_type != "Mul":
        return
    weight = other(weighted, scaled.outputs[0])
    values = constant(weight)
    if values is None or values.ndim != 1:
        return
    settings = {"axis": -1, "epsilon": float(epsilon), "stash_type": 1}
    norm = ir.node("SimplifiedLayerNormalization", [source, weight], settings)
    replace(graph, weighted, norm, [(weighted.outputs[0], norm.outputs[0])])


def fuse_sum(graph: ir.Graph, norm: ir.Node) -> None:
    """A residual sum and the norm that reads it, both of which are wanted."""
    add = made_by(norm.inputs[0], "Add")
    if add is None:
        return
    left, right = add.inputs
    if left is None or right is None or not same_shape(left, right, add.outputs[0]):
        return
    settings = {"epsilon": norm.attributes["epsilon"].as_float()}
    fused = ir.node(
        "SkipSimplifiedLayerNormalization", [left, right, norm.inputs[1]], settings, domain=MICROSOFT, num_outputs=4
    )
    pairs = [(norm.outputs[0], fused.outputs[0]), (add.outputs[0], fused.outputs[3])]
    replace(graph, norm, fused, pairs)
    for unused in fused.outputs[1:3]:
        unused.name = ""
