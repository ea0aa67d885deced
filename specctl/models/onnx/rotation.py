"""Rotary position embeddings as a part of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime

from specctl.models.onnx.by_head import as_rows, headed
from specctl.models.onnx.nodes import MICROSOFT, constant, last_size, made_by, other, replace, set_inputs, weight_value

TREES = 10
"""The number of the input of an attention node that only graphs for trees have."""
MULTIPLE = 16
"""onnxruntime rotates heads whose size, and the rotated part of it, is a multiple of this."""
PositionTable = Callable[[ir.Value], "np.ndarray | None"]
"""The values ``(C, ...)`` that something computed from the positions alone takes at each of them; None if it
reads more."""
Tables = dict[tuple[str | None, str | None], tuple[ir.Value, ir.Value] | None]
"""The tables of cosines and sines ``(C, R/2)`` by the names of what they replace; None where there are none."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """Queries or keys ``(1, H, T, D)`` before their first R numbers were turned by their position's angles."""

    source: ir.Value
    cosines: ir.Value
    sines: ir.Value
    size: int


def fuse_rotation(
    graph: ir.Graph,
    attention: ir.Node,
    table: PositionTable,
    tables: Tables,
    *,
    placed: bool,
) -> None:
    """Let attention rotate queries and keys by the tables of all positions; ``placed`` as in `fusions.fuse`."""
    by_head = [headed(value) for value in attention.inputs[:2]]
    query, key = (_rotation(value) for value in by_head)
    if query is None or key is None:
        return
    if (query.cosines, query.sines, query.size) != (key.cosines, key.sines, key.size):
        return
    if (last_size(query.source) or 1) % MULTIPLE or query.size % MULTIPLE:
        return
    known = _known(graph, query, table, tables)
    if known is None:
        return
    inputs = [as_rows(graph, attention, value) for value in (query.source, key.source)]
    more = list(attention.inputs[TREES:])
    if placed or more:  # a token's position in a tree is another than its place
        more = [_positions(graph), *more]
    set_inputs(attention, [*inputs, *attention.inputs[2:7], *known, *more])
    attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)


def fuse_kept_rotation(graph: ir.Graph, add: ir.Node, table: PositionTable, tables: Tables) -> None:
    """Rotate keys that no attention of the graph reads, since they are a result of it, by one node."""
    kept = add.outputs[0]
    keys = _rotation(kept) if kept.is_graph_output() else None
    if keys is None or keys.size != last_size(keys.source):
        return
    known = _known(graph, keys, table, tables)
    if known is not None:
        turned = ir.node("RotaryEmbedding", [keys.source, _positions(graph), *known], domain=MICROSOFT)
        replace(graph, add, turned, [(kept, turned.outputs[0])])


def _positions(graph: ir.Graph) -> ir.Value:
    return next(given for given in graph.inputs if given.name == "positions")


def _known(graph: ir.Graph, turned: Rotated, table: PositionTable, tables: Tables) -> tuple[ir.Value, ir.Value] | None:
    """The tables of what a rotation reads; None where there are none."""
    names = turned.cosines.name, turned.sines.name
    if names not in tables:
        tables[names] = _registered(graph, len(tables), [table(turned.cosines), table(turned.sines)], turned.size)
    return tables[names]


def _registered(
    graph: ir.Graph, index: int, found: "Sequence[np.ndarray | None]", size: int
) -> tuple[ir.Value, ir.Value] | None:
    """Both tables as weights ``(C, R/2)``; None if they are not the same in both halves."""
    weights = []
    for name, rows in zip(("cosines", "sines"), found, strict=True):
        if rows is None or rows.shape[-1] != size:
            return None
        halves = rows.reshape(-1, 2, size // 2)
        if not np.array_equal(halves[:, 0], halves[:, 1]):
            return None
        weights.append(weight_value(graph, f"{name}.{index}", np.ascontiguousarray(halves[:, 0])))
    return weights[0], weights[1]


def _rotation(value: ir.Value | None) -> Rotated | None:
    """What was rotated by halves: x * cos + (-x2, x1) * sin, in all or in the first numbers of a head."""
    partial = made_by(value, "Concat")
    if partial is not None and len(partial.inputs) == 2:
        inner, rest = _rotation(partial.inputs[0]), _slice_of(partial.inputs[1])
        first = None if inner is None else _slice_of(inner.source)
        if inner is None or rest is None or first is None or first[0] is not rest[0]:
            return None
        if first[1:] != (0, inner.size) or rest[1] != inner.size or rest[2] != last_size(rest[0]):
            return None
        return Rotated(rest[0], inner.cosines, inner.sines, inner.size)
    add = made_by(value, "Add")
    if add is None:
        return None
    for plain, turned in (add.inputs, add.inputs[::-1]):
        found = _turned(made_by(plain, "Mul"), made_by(turned, "Mul"))
        if found is not None:
            return found
    return None


def _turned(plain: ir.Node | None, turned: ir.Node | None) -> Rotated | None:
    if plain is None or turned is None:
        return None
    for halves, sines in (turned.inputs, turned.inputs[::-1]):
        joined = made_by(halves, "Concat")
        if joined is None or len(joined.inputs) != 2:
            continue
        negative = made_by(joined.inputs[0], "Neg")
        upper = None if negative is None else _slice_of(negative.inputs[0])
        lower = _slice_of(joined.inputs[1])
        if upper is None or lower is None or upper[0] is not lower[0]:
            continue
        source, size = lower[0], last_size(lower[0])
        if source not in plain.inputs or size is None:
            continue
        if lower[1:] != (0, size // 2) or upper[1:] != (size // 2, size):
            continue
        cosines = other(plain, source)
        if cosines is not None and sines is not None:
            return Rotated(source, cosines, sines, size)
    return None


def _slice_of(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """What a value is a part of, along the last dimension, and from where to where."""
    node = made_by(value, "Slice")
    if node is None or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    size = last_size(source)
    numbers = [constant(given) for given in node.inputs[1:]]
    if size is None or any(given is None or given.size != 1 for given in numbers):
        return None
    start, end, axis, step = (int(given.item()) for given in numbers if given is not None)
    if step != 1 or source.shape is None or axis % len(source.shape) != len(source.shape) - 1:
        return None
    return source, start, min(end, size)


def position_table(model: ir.Model, value: ir.Value, places: int) -> "np.ndarray | None":
    """``(places, ...)``, what a value of the graph is at each position; None if it depends on anything else.

    Args:
        model: has the input ``positions`` ``(1, T)``, of which T may be fixed.
        value: ``(1, T, R)`` or ``(1, 1, T, R)``.
        places: how many positions there are.
    """
    positions = _positions(model.graph)
    try:
        part = ir.convenience.extract(model.graph, [positions], [value])
    except ValueError:
        return None
    alone = ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString()
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    width = positions.shape[1] if positions.shape is not None else None
    step = width if isinstance(width, int) else places  # a graph may be of passes over one number of tokens
    numbers = [np.arange(start, start + step, dtype=np.int64) for start in range(0, places, step)]
    found = [session.run(None, {"positions": some[None]})[0] for some in numbers]
    return np.concatenate([rows.reshape(step, rows.shape[-1]) for rows in found])[:places]
