"""The graph of a model rewritten for the tokens of several sequences, one behind the other."""

from pathlib import Path

import onnx_ir as ir


def packed_graph(path: Path, rows: int) -> bytes:
    """A graph of `export.exported` for chains, whose pass reads the tokens of several sequences.

    Norms, projections and feed-forward layers see the N tokens of all sequences in ``(1, N)``. Only attention knows of
    sequences: it is a node for each, over that sequence's own buffers, so that nothing is padded.

    Inputs: as there, and ``sizes`` ``(rows,)`` int64, how many tokens each sequence has in the pass, at least one;
    ``before``, ``total``, ``past.I.key`` and ``past.I.value`` are there for every sequence r, with ``.r`` at the end.
    Outputs: ``logits``, ``state.I`` and ``state.last`` ``(1, N, D)``, and ``present.I.key.r`` and
    ``present.I.value.r``.

    Args:
        path: of the graph; its weights stay in their file, from whose folder they have to be read.
        rows: how many sequences, at least 2.
    """
    model = ir.load(path)
    graph = model.graph
    given = {value.name: value for value in graph.inputs}
    sizes = ir.val("sizes", dtype=ir.DataType.INT64, shape=ir.Shape([rows]))
    counts = {name: [_like(given[name], f"{name}.{row}") for row in range(rows)] for name in ("before", "total")}
    inputs = [value for name, value in given.items() if name in ("ids", "positions", "rows")]
    inputs += [sizes, *counts["before"], *counts["total"]]
    outputs = [value for value in graph.outputs if value.name and value.name.startswith(("logits", "state."))]
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        projected, caches, more = node.inputs[:3], node.inputs[3:5], node.inputs[7:]
        made: list[ir.Node] = []
        split: list[list[ir.Value | None]] = []
        for states in projected:
            if states is None:
                split.append([None] * rows)
                continue
            made.append(ir.node("Split", [states, sizes], {"axis": 1}, num_outputs=rows))
            split.append(list(made[-1].outputs))
        mixed: list[ir.Value] = []
        for row, of_row in enumerate(zip(*split, strict=True)):
            past = [_like(cache, f"{cache.name}.{row}") for cache in caches if cache is not None]
            own = [*of_row, *past, counts["before"][row], counts["total"][row], *more]
            made.append(ir.Node(node.domain, node.op_type, own, attributes=node.attributes.values(), num_outputs=3))
            result, *present = made[-1].outputs
            for there, cache in zip(present, past, strict=True):
                there.name, there.type, there.shape = _present(cache), cache.type, cache.shape
            inputs += past
            outputs += present
            mixed.append(result)
        made.append(ir.node("Concat", mixed, {"axis": 1}))
        graph.outputs[:] = [value for value in graph.outputs if value not in node.outputs]
        graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(made[-1].outputs[0])
        graph.remove(node, safe=True)
    graph.inputs[:], graph.outputs[:] = inputs, outputs
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.val(name, dtype=value.dtype, shape=value.shape)


def _present(cache: ir.Value) -> str:
    assert cache.name is not None
    return cache.name.replace("past", "present")
