"""An exported graph rewritten so that onnxruntime computes it in few nodes."""

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from specctl.models.onnx.by_head import unwrap
from specctl.models.onnx.nodes import MICROSOFT, made_by, replace
from specctl.models.onnx.norms import fuse_norm, fuse_sum
from specctl.models.onnx.projections import pack
from specctl.models.onnx.rotation import PositionTable, Tables, fuse_kept_rotation, fuse_rotation


def fuse(model: ir.Model, table: PositionTable, *, placed: bool = False) -> None:
    """Rewrite a graph of `export.exported` for speed; what it computes stays the same but for rounding.

    Args:
        model: changed in place.
        table: evaluates the sines and cosines of all positions.
        placed: whether a token's position may be another than its place in the cache.
    """
    share_tied(model.graph)
    limit = 1 << 62  # weights of any size are transposed here, once
    optimizer.fold_constants(model, input_size_limit=limit, output_size_limit=limit)
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
    for node in list(graph):
        if node.op_type == "SimplifiedLayerNormalization":
            fuse_sum(graph, node)
    graph.opset_imports[MICROSOFT] = 1
    tidy(model)
    common.TopologicalSortPass()(model)
    for given in list(graph.inputs):
        if given.name == "positions" and not given.uses():
            graph.inputs.remove(given)
    common.ClearMetadataAndDocStringPass()(model)


def share_tied(graph: ir.Graph) -> None:
    """Let an output layer that is tied to the embeddings read these as they are, so that there is one of them."""
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


def _fuse_rows(graph: ir.Graph, gather: ir.Node) -> None:
    """The states of the rows whose logits are wanted, without turning all states around."""
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
