"""Looking up and rewriting nodes of an ONNX graph."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"
"""The domain of the nodes that only onnxruntime knows."""


def constant(value: ir.Value | None) -> "np.ndarray | None":
    """A weight or number of the graph; None for what a pass computes."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def made_by(value: ir.Value | None, kind: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def only_use(value: ir.Value | None) -> ir.Node | None:
    """The single node that reads a value; None if several do, or if it is an output."""
    if value is None or value.is_graph_output():
        return None
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 else None


def other(node: ir.Node, one: ir.Value | None) -> ir.Value | None:
    """The other input of a node with two."""
    first, second = node.inputs
    return second if first is one else first


def same_shape(*values: ir.Value) -> bool:
    shapes = {None if value.shape is None else tuple(map(str, value.shape)) for value in values}
    return len(shapes) == 1 and None not in shapes


def last_size(value: ir.Value) -> int | None:
    """The size of a value's last dimension."""
    size = None if value.shape is None else value.shape[-1]
    return size if isinstance(size, int) else None


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node, pairs: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Put a node in the place of one, each old value (also of an output) becoming a new one of the same name."""
    graph.insert_after(old, new)
    for had, has in pairs:
        has.shape, has.type = had.shape, had.type
        name = had.name
        had.replace_all_uses_with(has, replace_graph_outputs=True)
        had.name = None
        has.name = name


def set_inputs(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def weight_value(graph: ir.Graph, name: str, numbers: "np.ndarray") -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(numbers, name=name))
    graph.register_initializer(value)
    return value
