"""Rewrites exported graphs into the few nodes that onnxruntime runs fast, and rounds their weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common
from onnxscript import optimizer

from specctl.models.onnx.blocks import OUTPUT_BITS, Blocks, rounded
from specctl.models.onnx.graph import NARROWEST
from specctl.models.onnx.weights import Lazy, Weight, weight_of

MICROSOFT = "com.microsoft"  # The domain of onnxruntime's own node types


def constant(value: ir.Value | None) -> "np.ndarray | None":
    """A small constant of the graph; None for a `Weight` and for a computed value."""
    if value is None or value.const_value is None or weight_of(value) is not None:
        return None
    return value.const_value.numpy()


def made_by(value: ir.Value | None, kind: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def only_use(value: ir.Value | None) -> ir.Node | None:
    """The only node that reads a value; None if several do, or if the value is an output."""
    if value is None or value.is_graph_output():
        return None
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 else None


def other(node: ir.Node, one: ir.Value | None) -> ir.Value | None:
    """The other input of a two-input node."""
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
    """Replace a node. Each old value, even an output, becomes a new value of the same name."""
    graph.insert_after(old, new)
    for had, has in pairs:
        take_place(had, has)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Let a value replace another one, even an output, and have its name, type and shape."""
    new.shape, new.type, name = old.shape, old.type, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    new.name = name


def set_inputs(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def weight_value(graph: ir.Graph, name: str, numbers: "np.ndarray | Lazy") -> ir.Value:
    value = ir.val(name, const_value=numbers if isinstance(numbers, Lazy) else ir.tensor(numbers, name=name))
    graph.register_initializer(value)
    return value


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
    """A residual sum and the norm that reads it, with both results."""
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


@dataclass(frozen=True, slots=True)
class Projection:
    """``source @ weight + bias``."""

    source: ir.Value
    weight: Weight
    bias: "np.ndarray | None"


def _projected(value: ir.Value | None) -> Projection | None:
    add = made_by(value, "Add")
    bias = None
    if add is not None:
        left, right = add.inputs
        bias, value = (constant(left), right) if constant(left) is not None else (constant(right), left)
        if bias is None:
            return None
    product = made_by(value, "MatMul")
    weight = None if product is None else weight_of(product.inputs[1])
    if product is None or weight is None or product.inputs[0] is None or only_use(product.outputs[0]) is None:
        return None
    return Projection(product.inputs[0], weight, bias)


def pack(graph: ir.Graph, attention: ir.Node) -> None:
    """One projection for queries, keys and values, where all three are plain projections of the same input."""
    found = [_projected(value) for value in attention.inputs[:3]]
    known = [each for each in found if each is not None]
    kinds = {(each.source, each.bias is None, each.weight.turned) for each in known}
    if len(known) < 3 or len(kinds) > 1 or not known[0].weight.turned:
        return
    name = f"packed.{attention.outputs[0].name}"
    weight = weight_value(graph, f"{name}.weight", Weight.joined([each.weight for each in known]))
    last = ir.node("MatMul", [known[0].source, weight])
    graph.insert_before(attention, last)
    if known[0].bias is not None:
        bias = np.concatenate([each.bias for each in known if each.bias is not None])
        last = ir.node("Add", [last.outputs[0], weight_value(graph, f"{name}.bias", bias)])
        graph.insert_before(attention, last)
    set_inputs(attention, [last.outputs[0], None, None, *attention.inputs[3:]])


def fuse_silu(graph: ir.Graph, sigmoid: ir.Node) -> None:
    """x * sigmoid(x)."""
    source, scaled = sigmoid.inputs[0], only_use(sigmoid.outputs[0])
    if source is None or scaled is None or scaled.op_type != "Mul" or other(scaled, sigmoid.outputs[0]) is not source:
        return
    silu = ir.node("QuickGelu", [source], {"alpha": 1.0}, domain=MICROSOFT)
    replace(graph, scaled, silu, [(scaled.outputs[0], silu.outputs[0])])


def fix_shape(graph: ir.Graph, reshape: ir.Node) -> None:
    """A constant in place of nodes that compute the shape of a Reshape, where only the number of tokens varies."""
    shape = reshape.outputs[0].shape
    if shape is None or constant(reshape.inputs[1]) is not None:
        return
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    if sizes.count(-1) > 1 or 0 in sizes:
        return
    wanted = weight_value(graph, f"shape.{reshape.outputs[0].name}", np.array(sizes, dtype=np.int64))
    reshape.replace_input_with(1, wanted)
    reshape.attributes.pop("allowzero", None)


def join_products(graph: ir.Graph) -> None:
    """One product, and a split of its result, for products with the same input, such as gate and up projections."""
    found: dict[tuple[ir.Value | None, ir.DataType], list[ir.Node]] = {}
    for node in graph:
        weight = weight_of(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.turned and len(weight.shape) == 2:
            found.setdefault((node.inputs[0], weight.dtype), []).append(node)
    for (source, _), products in found.items():
        weights = [weight for node in products if (weight := weight_of(node.inputs[1])) is not None]
        if len(products) < 2:
            continue
        first = products[0]
        whole = weight_value(graph, f"joined.{first.outputs[0].name}", Weight.joined(weights))
        sizes = np.array([weight.shape.numpy()[1] for weight in weights], dtype=np.int64)
        product = ir.node("MatMul", [source, whole])
        made = product.outputs[0]
        if (shape := first.outputs[0].shape) is not None:
            made.shape, made.type = ir.Shape([*shape[:-1], int(sizes.sum())]), first.outputs[0].type
        split = ir.node(
            "Split",
            [made, weight_value(graph, f"sizes.{first.outputs[0].name}", sizes)],
            {"axis": -1},
            num_outputs=len(products),
        )
        graph.insert_before(first, [product, split])
        for node, part in zip(products, split.outputs, strict=True):
            take_place(node.outputs[0], part)
            graph.remove(node, safe=True)


def headed(value: ir.Value | None) -> ir.Value | None:
    """The ``(1, H, T, D)`` value that rows ``(1, T, H * D)`` come from."""
    reshape = made_by(value, "Reshape")
    return None if reshape is None else _turned(reshape.inputs[0])


def as_rows(graph: ir.Graph, before: ir.Node, states: ir.Value) -> ir.Value:
    """``(1, H, T, D)`` as rows ``(1, T, H * D)``; directly the original rows where it was made from them."""
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
    """The value before a transposition between heads-first and tokens-first."""
    turn = made_by(states, "Transpose")
    return None if turn is None or tuple(turn.attributes["perm"].as_ints()) != (0, 2, 1, 3) else turn.inputs[0]


def _normed_by_token(graph: ir.Graph, before: ir.Node, states: ir.Value) -> ir.Value | None:
    """The ``(1, T, H, D)`` input of per-head norms, which commute with the transposition."""
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
    """Skip the reshapes of attention's values and of its result that cancel out."""
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
    """The value before a transposition to heads and back."""
    turn = only_use(by_token)
    back = only_use(turn.outputs[0]) if turn is not None and turn.op_type == "Transpose" else None
    if turn is None or back is None or back.op_type != "Transpose":
        return by_token
    perms = {tuple(node.attributes["perm"].as_ints()) for node in (turn, back)}
    return back.outputs[0] if perms == {(0, 2, 1, 3)} else by_token


TREES = 10  # Index of the attention node's input that only graphs for trees have
MULTIPLE = 16  # onnxruntime rotates heads if their size, and the size of the rotated part, is a multiple of this
PositionTable = Callable[[ir.Value], "np.ndarray | None"]
"""The values ``(C, ...)`` at each position, of a value computed from positions alone; None for others."""
Tables = dict[tuple[str | None, str | None], tuple[ir.Value, ir.Value] | None]
"""The tables of cosines and sines ``(C, R/2)`` by the names of what they replace; None where there are none."""


@dataclass(frozen=True, slots=True)
class Rotated:
    """Queries or keys ``(1, H, T, D)`` before the rotation of their first R numbers."""

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
    """Let attention rotate queries and keys with tables for all positions; ``placed`` as in `fuse`."""
    by_head = [headed(value) for value in attention.inputs[:2]]
    query, key = (_rotated_by(value) for value in by_head)
    if query is None or key is None:
        return
    if (query.cosines, query.sines, query.size) != (key.cosines, key.sines, key.size):
        return
    if (last_size(query.source) or 1) % MULTIPLE or query.size % MULTIPLE:
        return
    known = _tables_of(graph, query, table, tables)
    if known is None:
        return
    inputs = [as_rows(graph, attention, value) for value in (query.source, key.source)]
    more = list(attention.inputs[TREES:])
    if placed or more:  # in a tree, a token's position differs from its slot
        more = [_positions(graph), *more]
    set_inputs(attention, [*inputs, *attention.inputs[2:7], *known, *more])
    attention.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)


def fuse_kept_rotation(graph: ir.Graph, add: ir.Node, table: PositionTable, tables: Tables) -> None:
    """Rotate keys that are only a result of the graph, and that no attention in it reads, with one node."""
    kept = add.outputs[0]
    keys = _rotated_by(kept) if kept.is_graph_output() else None
    if keys is None or keys.size != last_size(keys.source):
        return
    known = _tables_of(graph, keys, table, tables)
    if known is not None:
        turned = ir.node("RotaryEmbedding", [keys.source, _positions(graph), *known], domain=MICROSOFT)
        replace(graph, add, turned, [(kept, turned.outputs[0])])


def _positions(graph: ir.Graph) -> ir.Value:
    return next(given for given in graph.inputs if given.name == "positions")


def _tables_of(
    graph: ir.Graph, turned: Rotated, table: PositionTable, tables: Tables
) -> tuple[ir.Value, ir.Value] | None:
    """The tables that a rotation reads; None without them."""
    names = turned.cosines.name, turned.sines.name
    if names not in tables:
        tables[names] = _registered(graph, len(tables), [table(turned.cosines), table(turned.sines)], turned.size)
    return tables[names]


def _registered(
    graph: ir.Graph, index: int, found: "Sequence[np.ndarray | None]", size: int
) -> tuple[ir.Value, ir.Value] | None:
    """Both tables as weights ``(C, R/2)``; None if their two halves differ."""
    weights = []
    for name, rows in zip(("cosines", "sines"), found, strict=True):
        if rows is None or rows.shape[-1] != size:
            return None
        halves = rows.reshape(-1, 2, size // 2)
        if not np.array_equal(halves[:, 0], halves[:, 1]):
            return None
        weights.append(weight_value(graph, f"{name}.{index}", np.ascontiguousarray(halves[:, 0])))
    return weights[0], weights[1]


def _rotated_by(value: ir.Value | None) -> Rotated | None:
    """The input of a rotation by halves: x * cos + (-x2, x1) * sin, over a whole head or its first numbers."""
    partial = made_by(value, "Concat")
    if partial is not None and len(partial.inputs) == 2:
        inner, rest = _rotated_by(partial.inputs[0]), _slice_of(partial.inputs[1])
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
        found = _unrotated(made_by(plain, "Mul"), made_by(turned, "Mul"))
        if found is not None:
            return found
    return None


def _unrotated(plain: ir.Node | None, turned: ir.Node | None) -> Rotated | None:
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
    """The source of a slice along the last dimension, with the slice's start and end."""
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
    """``(places, ...)``: a graph value at each position; None if it depends on anything else.

    Args:
        model: has the input ``positions`` ``(1, T)``; T may be fixed.
        value: ``(1, T, R)`` or ``(1, 1, T, R)``.
        places: the number of positions.
    """
    positions = _positions(model.graph)
    try:
        part = ir.convenience.extract(model.graph, [positions], [value])
    except ValueError:
        return None
    alone = ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString()
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    width = positions.shape[1] if positions.shape is not None else None
    step = width if isinstance(width, int) else places  # the graph's T may be fixed
    numbers = [np.arange(start, start + step, dtype=np.int64) for start in range(0, places, step)]
    found = [session.run(None, {"positions": some[None]})[0] for some in numbers]
    return np.concatenate([rows.reshape(step, rows.shape[-1]) for rows in found])[:places]


def fuse(model: ir.Model, table: PositionTable, *, placed: bool = False) -> None:
    """Rewrite a graph from `export.exported` for speed; its results stay the same up to rounding.

    Args:
        model: changed in place.
        table: evaluates the sines and cosines of all positions.
        placed: whether a token's position may differ from its slot in the cache.
    """
    share_tied(model.graph)
    turn_weights(model.graph)
    limit = 1 << 62  # all constants but weights are small
    optimizer.fold_constants(model, input_size_limit=limit, output_size_limit=limit, should_fold=_without_weights)
    tidy = common.RemoveUnusedNodesPass()
    for step in (
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.IdentityEliminationPass(),
        tidy,
        common.CommonSubexpressionEliminationPass(),
    ):
        step(model)
    graph = model.graph
    for node in list(graph):
        if node.op_type == "ReduceMean":
            fuse_norm(graph, node)
        elif node.op_type == "GatherND":
            _fuse_rows(graph, node)
    attending = [node for node in graph if node.op_type == "GroupQueryAttention"]
    tables: Tables = {}
    for node in attending:
        fuse_rotation(graph, node, table, tables, placed=placed)
        unwrap(graph, node)
    for node in list(graph):
        if node.op_type == "Add":
            fuse_kept_rotation(graph, node, table, tables)
    tidy(model)
    for node in attending:
        pack(graph, node)
    tidy(model)
    join_products(graph)
    for node in list(graph):
        if node.op_type == "SimplifiedLayerNormalization":
            fuse_sum(graph, node)
        elif node.op_type == "Sigmoid":
            fuse_silu(graph, node)
        elif node.op_type == "Reshape":
            fix_shape(graph, node)
    graph.opset_imports[MICROSOFT] = 1
    tidy(model)
    common.TopologicalSortPass()(model)
    for given in list(graph.inputs):
        if given.name == "positions" and not given.uses():
            graph.inputs.remove(given)
    common.ClearMetadataAndDocStringPass()(model)


def share_tied(graph: ir.Graph) -> None:
    """Let an output layer that is tied to the embeddings read their weight directly, so that it exists only once."""
    for turn in [node for node in graph if node.op_type == "Transpose"]:
        weight, turned = turn.inputs[0], turn.outputs[0]
        uses = [use.node for use in turned.uses()]
        products = [node for node in uses if node.op_type == "MatMul" and node.inputs[1] is turned]
        if weight is None or not weight.is_initializer() or turn.attributes["perm"].as_ints() != (1, 0):
            continue
        if turned.is_graph_output() or len(products) < len(uses) or all(use.node is turn for use in weight.uses()):
            continue
        for product in products:
            shared = ir.node("FusedMatMul", [product.inputs[0], weight], {"transB": 1}, domain=MICROSOFT)
            replace(graph, product, shared, [(product.outputs[0], shared.outputs[0])])
            graph.remove(product, safe=True)
        graph.remove(turn, safe=True)


def turn_weights(graph: ir.Graph) -> None:
    """Let weights be transposed when they are written, rather than by nodes."""
    for turn in [node for node in graph if node.op_type == "Transpose"]:
        weight, turned = weight_of(turn.inputs[0]), turn.outputs[0]
        if weight is None or turn.attributes["perm"].as_ints() != (1, 0) or turned.is_graph_output():
            continue
        value = weight_value(graph, f"{weight.name}.{turned.name}", weight.transposed())
        turned.replace_all_uses_with(value)
        graph.remove(turn, safe=True)


def _without_weights(node: ir.Node) -> bool | None:
    """Whether to fold a node: never where a weight would be read, None to let onnxscript decide."""
    return False if any(weight_of(value) is not None for value in node.inputs) else None


def _fuse_rows(graph: ir.Graph, gather: ir.Node) -> None:
    """Select the rows for logits before the transposition, so that it does not run over all states."""
    before = made_by(gather.inputs[0], "Transpose")
    places = made_by(gather.inputs[1], "Unsqueeze")
    spread = None if places is None else made_by(places.inputs[0], "Expand")
    uses = list(gather.outputs[0].uses())
    if before is None or spread is None or len(uses) != 1:
        return
    after, rows = uses[0].node, spread.inputs[0]
    swap = (1, 0, 2)
    turned = after.op_type == "Transpose" and after.attributes["perm"].as_ints() == swap
    if not turned or before.attributes["perm"].as_ints() != swap or rows is None or rows.name != "rows":
        return
    plain = ir.node("Gather", [before.inputs[0], rows], {"axis": 1})
    replace(graph, after, plain, [(after.outputs[0], plain.outputs[0])])


INT8_ACTIVATIONS = 4
"""The accuracy level at which each token's inputs are rounded to 8 bits too, in blocks, for integer arithmetic."""


def quantize(model: ir.Model, bits: int | None) -> int:
    """Round the weights of every product; returns the number of products, with ``bits`` but for the output layer.

    Args:
        model: a fused graph, changed in place.
        bits: 4 or 8, of all but the output layer; None for weights that are in blocks in the model's file, and no
            others.

    Raises:
        NotFinite: a weight is NaN or infinite.
    """
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    output, count = _above(logits), 0
    read: dict[tuple[str, ...], Blocks] = {}
    for node in [node for node in model.graph if node.op_type == "Gather"]:
        _look_up(model.graph, node, bits, read)
    for node in list(model.graph):
        weight = weight_of(node.inputs[1]) if node.op_type in ("MatMul", "FusedMatMul") else None
        if weight is None or len(weight.shape) != 2:
            continue
        if weight.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            continue
        if node.op_type == "FusedMatMul":  # with torch's own layout
            weight = weight.transposed()
        tied = read.get(weight.names)
        blocks = weight.blocks() if tied is None else [tied]
        if not blocks and bits is not None:
            blocks = [rounded(weight.by_output(), OUTPUT_BITS if node is output else bits)]
        if not blocks:
            continue
        weight.done()
        source, result = node.inputs[0], node.outputs[0]
        assert source is not None, "a product has two factors"
        parts = [
            _product(model.graph, node, source, part, f"{result.name}.{index}", weight.dtype)
            for index, part in enumerate(blocks)
        ]
        last = parts[0]
        if len(parts) > 1:
            last = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": -1})
            model.graph.insert_before(node, last)
        take_place(result, last.outputs[0])
        model.graph.remove(node, safe=True)
        count += bits is None or node is not output  # the output layer alone is not worth a graph
    common.CommonSubexpressionEliminationPass()(model)  # sums of the same inputs
    common.RemoveUnusedNodesPass()(model)  # removes the original weights too
    return count


def _look_up(graph: ir.Graph, node: ir.Node, bits: int | None, read: dict[tuple[str, ...], Blocks]) -> None:
    """Look tokens up in rounded embeddings, whose codes a tied output layer shares.

    Args:
        graph, node: what is replaced, if it looks tokens up.
        bits: as in `quantize`; embeddings have `OUTPUT_BITS`.
        read: gets the embeddings by the names of their parameters.
    """
    source, ids = node.inputs
    weight = weight_of(source)
    if weight is None or len(weight.shape) != 2 or weight.turned or not _is_ids(ids):
        return
    found = weight.transposed().blocks()  # of a product that has this weight
    if not found and bits is not None:
        found = [rounded(weight.array(), OUTPUT_BITS)]
    weight.done()
    if len(found) != 1 or found[0].minima is not None or found[0].inputs % found[0].block:
        return
    (blocks,) = found
    read[weight.names] = blocks
    parts = {"codes": blocks.codes, "scales": blocks.scales.astype(weight.dtype.numpy(), copy=False)}
    if (zeros := blocks.packed_zeros()) is not None:
        parts["zeros"] = zeros
    rows = [
        weight_value(graph, f"{weight.name}.{part}", array.reshape(blocks.outputs, -1)) for part, array in parts.items()
    ]
    settings = {"bits": blocks.bits, "block_size": blocks.block, "gather_axis": 0, "quantize_axis": 1}
    looked = ir.node("GatherBlockQuantized", [rows[0], ids, *rows[1:]], settings, domain=MICROSOFT)
    replace(graph, node, looked, [(node.outputs[0], looked.outputs[0])])
    graph.remove(node, safe=True)


def _is_ids(value: ir.Value | None) -> bool:
    """Whether a value is the graph's token ids, in any shape."""
    while (reshape := made_by(value, "Reshape")) is not None:
        value = reshape.inputs[0]
    return value is not None and value.name == "ids"


def _product(
    graph: ir.Graph, before: ir.Node, source: ir.Value, blocks: Blocks, name: str, dtype: ir.DataType
) -> ir.Node:
    """The product of a source ``(1, T, K)`` with rounded weights, ``(1, T, N)``.

    Minima are added as a product of their own, with the sums of the source over each block.

    Args:
        graph, before: where its nodes are inserted.
        source: what is multiplied.
        blocks: the weights; K is a multiple of the block where they have minima.
        name: a prefix of the weights' names in the graph.
        dtype: of the source.
    """

    def inserted(kind: str, inputs: Sequence[ir.Value], settings: dict[str, object], domain: str = "") -> ir.Node:
        node = ir.node(kind, inputs, settings, domain=domain)  # type: ignore[arg-type]
        graph.insert_before(before, node)
        return node

    floats = dtype.numpy()
    scales = blocks.scales.astype(floats, copy=False).reshape(-1)
    parts = {"codes": blocks.codes, "scales": scales, "zeros": blocks.packed_zeros()}
    given = [weight_value(graph, f"{name}.{part}", array) for part, array in parts.items() if array is not None]
    settings: dict[str, object] = {
        "K": blocks.inputs,
        "N": blocks.outputs,
        "bits": blocks.bits,
        "block_size": blocks.block,
        "accuracy_level": INT8_ACTIVATIONS,
    }
    product = inserted("MatMulNBits", [source, *given], settings, MICROSOFT)
    if blocks.minima is None:
        return product
    assert blocks.inputs % blocks.block == 0, "a padded block has no sum here"
    shape = np.array([1, -1, blocks.inputs // blocks.block, blocks.block], dtype=np.int64)
    by_block = inserted("Reshape", [source, weight_value(graph, f"{name}.by_block", shape)], {})
    last = weight_value(graph, f"{name}.last", np.array([-1], dtype=np.int64))
    sums = inserted("ReduceSum", [by_block.outputs[0], last], {"keepdims": 0})  # (1, T, B)
    minima = weight_value(graph, f"{name}.minima", np.ascontiguousarray(blocks.minima.T.astype(floats)))  # (B, N)
    lowest = inserted("MatMul", [sums.outputs[0], minima], {})
    return inserted("Add", [product.outputs[0], lowest.outputs[0]], {})


def _above(value: ir.Value) -> ir.Node | None:
    """The product that a value comes from, directly or through elementwise operations."""
    node = value.producer()
    while node is not None and node.op_type not in ("MatMul", "FusedMatMul"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def round_alike(model: ir.Model) -> None:
    """Note in a graph's file how many tokens its passes read at least, so that a lone one rounds as among others.

    onnxruntime computes a single row otherwise than several, by about 1e-6. Rounding the inputs of products to 8 bits
    makes 0.2 to 0.5 of the logits' spread of it in a model of 30 layers. Passes of two and more tokens agree bit for
    bit. Where products agree for one token too, repeating rows for attention is enough, which passes do.
    """
    model.metadata_props[NARROWEST] = "1" if lone_rows_agree(model) else "2"


TRIED = 256
"""Outputs of a product to try at least: kernels compute them in groups whose size divides this number."""


def lone_rows_agree(model: ir.Model) -> bool:
    """Whether on this machine a rounded product of one row is bit for bit the same as among other rows.

    With AVX-512 it is for blocks of 16 and 32 weights of 4 bits. With AVX2 only it is for blocks of 16.
    """
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    kinds = {str(_tried(node)): node for node in products}
    return all(_lone_row_agrees(node) for node in kinds.values())


def _tried(product: ir.Node) -> dict[str, int]:
    """The attributes of a rounded product with fewer outputs that its kernel computes the same way."""
    settings = {name: attribute.as_int() for name, attribute in product.attributes.items()}
    outputs = settings["N"]
    return settings | {"N": min(outputs, TRIED + outputs % TRIED), "zeros": len(product.inputs) - 3}


def _lone_row_agrees(product: ir.Node) -> bool:
    settings = _tried(product)
    inputs, outputs, bits = (settings[name] for name in ("K", "N", "bits"))
    draws, blocks = np.random.default_rng(0), -(-inputs // settings["block_size"])
    weights: dict[str, np.ndarray] = {
        "codes": draws.integers(256, size=(outputs, blocks, settings["block_size"] * bits // 8), dtype=np.uint8),
        "scales": draws.standard_normal((outputs * blocks,), dtype=np.float32),
    }
    if settings.pop("zeros"):
        weights["zeros"] = draws.integers(256, size=outputs * -(-blocks * bits // 8), dtype=np.uint8)
    constants = [ir.val(name, const_value=ir.tensor(numbers, name=name)) for name, numbers in weights.items()]
    source = ir.val("source", dtype=ir.DataType.FLOAT, shape=ir.Shape(["tokens", inputs]))
    node = ir.node("MatMulNBits", [source, *constants], settings, domain=MICROSOFT)
    made = node.outputs[0]
    made.name, made.type, made.shape = "made", source.type, ir.Shape(["tokens", outputs])
    imports = {"": 21, MICROSOFT: 1}
    graph = ir.Graph([source], [made], nodes=[node], initializers=constants, opset_imports=imports, name="product")
    alone = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    rows = draws.standard_normal((4, inputs), dtype=np.float32)
    (whole,) = session.run(None, {"source": rows})
    return all(np.array_equal(session.run(None, {"source": rows[row : row + 1]})[0][0], whole[row]) for row in range(4))
