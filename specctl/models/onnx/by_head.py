"""Queries, keys and values by head, ``(1, H, T, D)``, and as rows, ``(1, T, H * D)``."""

import numpy as np
import onnx_ir as ir

from specctl.models.onnx.nodes import made_by, only_use, same_shape, set_inputs, weight_value


def headed(value: ir.Value | None) -> ir.Value | None:
    """The ``(1, H, T, D)`` of which a value is the rows ``(1, T, H * D)``."""
    reshape = made_by(value, "Reshape")
    return None if reshape is None else _turned(reshape.inputs[0])


def as_rows(graph: ir.Graph, before: ir.Node, states: ir.Value) -> ir.Value:
    """``(1, H, T, D)`` as rows ``(1, T, H * D)``, without a detour where it was made of them."""
    perm = [0, 2, 1, 3]
    by_token = _turned(states)
    if by_token is not None:
        split = made_by(by_token, "Reshape")
        if split is not None and split.inputs[0] is not None and _is_rows(split.inputs[0], by_token):
            return split.inputs[0]
    elif (normed := _normed_by_token(graph, before, states)) is not None:
        by_token = normed
    else:
        turn = ir.node("Transpose", [states], {"perm": perm})
        graph.insert_before(before, turn)
        by_token = turn.outputs[0]
    shape = states.shape
    assert shape is not None
    heads, size = shape[1], shape[3]
    assert isinstance(heads, int), "only the number of tokens varies"
    assert isinstance(size, int), "only the number of tokens varies"
    numbers = np.array([1, -1, heads * size], dtype=np.int64)
    joined = weight_value(graph, f"rows.{len(graph.initializers)}", numbers)
    join = ir.node("Reshape", [by_token, joined])
    graph.insert_before(before, join)
    return join.outputs[0]


def _turned(states: ir.Value | None) -> ir.Value | None:
    """What was turned from heads before tokens to tokens before heads, or the other way round."""
    turn = made_by(states, "Transpose")
    return None if turn is None or tuple(turn.attributes["perm"].as_ints()) != (0, 2, 1, 3) else turn.inputs[0]


def _normed_by_token(graph: ir.Graph, before: ir.Node, states: ir.Value) -> ir.Value | None:
    """The ``(1, T, H, D)`` of heads that go through a norm each, which is the same before they are turned."""
    norm = made_by(states, "SimplifiedLayerNormalization")
    by_token = None if norm is None else _turned(norm.inputs[0])
    if norm is None or by_token is None:
        return None
    again = ir.node(norm.op_type, [by_token, norm.inputs[1]], norm.attributes)
    graph.insert_before(before, again)
    again.outputs[0].shape, again.outputs[0].type = by_token.shape, by_token.type
    return again.outputs[0]


def _is_rows(rows: ir.Value, by_token: ir.Value) -> bool:
    """Whether ``(1, T, H * D)`` holds the same rows as ``(1, T, H, D)``."""
    one, other = rows.shape, by_token.shape
    if one is None or other is None or len(one) != 3 or len(other) != 4 or str(one[1]) != str(other[1]):
        return False
    return isinstance(other[2], int) and isinstance(other[3], int) and one[2] == other[2] * other[3]


def unwrap(graph: ir.Graph, attention: ir.Node) -> None:
    """Skip what changes the shape of attention's values and of its result, and back again."""
    inputs = list(attention.inputs)
    for index, value in enumerate(inputs[:3]):
        states = headed(value)
        if states is not None:
            inputs[index] = as_rows(graph, attention, states)
    set_inputs(attention, inputs)
    mixed = attention.outputs[0]
    for use in list(mixed.uses()):
        again = only_use(_turned_back(use.node.outputs[0])) if use.node.op_type == "Reshape" else None
        if again is not None and again.op_type == "Reshape" and same_shape(again.outputs[0], mixed):
            again.outputs[0].replace_all_uses_with(mixed)


def _turned_back(by_token: ir.Value) -> ir.Value:
    """What is left of a value that is turned to heads and back to tokens again."""
    turn = only_use(by_token)
    back = only_use(turn.outputs[0]) if turn is not None and turn.op_type == "Transpose" else None
    if turn is None or back is None or back.op_type != "Transpose":
        return by_token
    perms = {tuple(node.attributes["perm"].as_ints()) for node in (turn, back)}
    return back.outputs[0] if perms == {(0, 2, 1, 3)} else by_token
