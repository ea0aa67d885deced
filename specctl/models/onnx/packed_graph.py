"""Graphs derived from an exported one: for the tokens of several sequences, and with signals of the logits."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import onnx_ir as ir


def packed_graph(path: Path, rows: int | None) -> bytes:
    """A graph from `export.exported` for chains, rewritten to read the tokens of several sequences in one pass.

    Norms, projections and feed-forward layers see the N tokens of all sequences in ``(1, N)``. Only attention
    distinguishes sequences. It is one node per sequence, over the sequence's own buffers, so that nothing is padded:
    onnxruntime has no node for several tokens of several sequences. For one token of each it has one, which takes a
    third to two thirds of the time of separate nodes.

    Inputs: those of `export.exported` and `rewriting.read_twice`. A graph for ``rows`` sequences also has ``sizes``
    ``(rows,)`` int64, the number of rows that attention reads of each in the pass, at least 1; it has ``before``,
    ``total``, ``past.I.key`` and ``past.I.value`` for every sequence r, with the suffix ``.r``. In a graph for one
    token of each of N sequences, ``before`` is ``(N,)``, ``total`` the longest sequence's, and caches are
    ``(N, heads, capacity, head_dim)``. Outputs: ``logits``, ``state.I`` and ``state.last`` ``(1, N, D)``, and
    ``present.I.key`` and ``present.I.value``, with the suffix ``.r`` where the caches have it.

    Args:
        path: of the graph; its weights stay in their file, and must be read from that file's folder.
        rows: the number of sequences, at least 2; None for any number with one token each.
    """
    model = ir.load(path)
    graph = model.graph
    numbers = [value for value in graph.inputs if value.name in ("before", "total")]
    twice = any(value.name == "attended" for value in graph.inputs)
    packed = _Together(graph, numbers, 2 if twice else 1) if rows is None else _Apart(numbers, rows)
    shared = ("ids", "positions", "rows", "attended", "kept")
    inputs = [value for value in graph.inputs if value.name in shared] + packed.inputs
    outputs = [value for value in graph.outputs if value.name and value.name.startswith(("logits", "state."))]
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        made, past, present = packed.attention(node)
        inputs += past
        outputs += present
        graph.outputs[:] = [value for value in graph.outputs if value not in node.outputs]
        graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(made[-1].outputs[0])
        graph.remove(node, safe=True)
    graph.inputs[:], graph.outputs[:] = inputs, outputs
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised


Made = tuple[list[ir.Node], list[ir.Value], list[ir.Value]]
"""The nodes that replace an attention node, the last one with its result, and the caches that they read and return."""


class _Apart:
    """Attention with a separate node for each sequence.

    Args:
        numbers: the inputs ``before`` and ``total`` of the original graph.
        rows: the number of sequences.
    """

    def __init__(self, numbers: Sequence[ir.Value], rows: int) -> None:
        self._sizes = ir.val("sizes", dtype=ir.DataType.INT64, shape=ir.Shape([rows]))
        self._numbers = [[_like(value, f"{value.name}.{row}") for value in numbers] for row in range(rows)]
        self.inputs = [self._sizes, *chain.from_iterable(self._numbers)]

    def attention(self, node: ir.Node) -> Made:
        projected, caches, more = node.inputs[:3], node.inputs[3:5], node.inputs[7:]
        rows = len(self._numbers)
        made: list[ir.Node] = []
        split: list[list[ir.Value | None]] = []
        for states in projected:
            if states is None:
                split.append([None] * rows)
                continue
            made.append(ir.node("Split", [states, self._sizes], {"axis": 1}, num_outputs=rows))
            split.append(list(made[-1].outputs))
        mixed: list[ir.Value] = []
        read: list[ir.Value] = []
        given: list[ir.Value] = []
        for row, (of_row, numbers) in enumerate(zip(zip(*split, strict=True), self._numbers, strict=True)):
            past = [_like(cache, f"{cache.name}.{row}") for cache in caches if cache is not None]
            made.append(_attention(node, [*of_row, *past, *numbers, *more], past))
            mixed.append(made[-1].outputs[0])
            read += past
            given += made[-1].outputs[1:]
        made.append(ir.node("Concat", mixed, {"axis": 1}))
        return made, read, given


class _Together:
    """Attention of all sequences in one node, for one token of each.

    Args:
        graph: receives the nodes that turn the tokens of one sequence into those of many, and back.
        numbers: see `_Apart`.
        read: how many rows attention reads of each sequence.
    """

    def __init__(self, graph: ir.Graph, numbers: Sequence[ir.Value], read: int) -> None:
        self._many, self._one = (
            ir.Value(name=name, const_value=ir.tensor(np.array(shape, dtype=np.int64), name=name))
            for name, shape in (("many", [-1, read, 0]), ("one", [1, -1, 0]))
        )
        for value in (self._many, self._one):
            graph.initializers[str(value.name)] = value
        shapes = {"before": ir.Shape(["sequences"]), "total": ir.Shape([1])}
        self.inputs = [ir.val(value.name, dtype=value.dtype, shape=shapes[str(value.name)]) for value in numbers]

    def attention(self, node: ir.Node) -> Made:
        projected, caches, more = node.inputs[:3], node.inputs[3:5], node.inputs[7:]
        made = [ir.node("Reshape", [states, self._many]) for states in projected if states is not None]
        split = iter(made.copy())
        many = [None if states is None else next(split).outputs[0] for states in projected]
        past = [_like(cache, str(cache.name), "sequences") for cache in caches if cache is not None]
        made.append(_attention(node, [*many, *past, *self.inputs, *more], past))
        present = [*made[-1].outputs[1:]]
        made.append(ir.node("Reshape", [made[-1].outputs[0], self._one]))
        return made, past, present


def _attention(node: ir.Node, inputs: Sequence[ir.Value | None], past: Sequence[ir.Value]) -> ir.Node:
    """A node with the same attention over other inputs."""
    made = ir.Node(node.domain, node.op_type, inputs, attributes=node.attributes.values(), num_outputs=3)
    for there, cache in zip(made.outputs[1:], past, strict=True):
        there.name, there.type, there.shape = str(cache.name).replace("past", "present"), cache.type, cache.shape
    return made


def _like(value: ir.Value, name: str, first: str | None = None) -> ir.Value:
    """A value of the same kind with its first dimension renamed to ``first``."""
    shape = value.shape
    if first is not None and shape is not None:
        shape = ir.Shape([first, *shape.dims[1:]])
    return ir.val(name, dtype=value.dtype, shape=shape)


def signals_graph(path: Path) -> bytes:
    """A graph from `export.exported` with two more outputs: ``entropy`` in nats and ``top_prob``, each ``(1, R)``.

    Computed by numpy after a pass they take 30 to 50 microseconds, mostly cache misses; as five more nodes they take
    10.

    Args:
        path: of the graph; its weights stay in their file, and must be read from that file's folder.
    """
    model = ir.load(path)
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == "logits")  # (1, R, V)
    last = ir.Value(name="last_axis", const_value=ir.tensor(np.array([-1], dtype=np.int64), name="last_axis"))
    graph.initializers["last_axis"] = last
    probs, logs = (ir.node(name, [logits], {"axis": -1}) for name in ("Softmax", "LogSoftmax"))
    shares = ir.node("Mul", [probs.outputs[0], logs.outputs[0]])
    surprise = ir.node("ReduceSum", [shares.outputs[0], last], {"keepdims": 0})
    entropy = ir.node("Neg", [surprise.outputs[0]])
    top = ir.node("ReduceMax", [probs.outputs[0], last], {"keepdims": 0})
    for name, node in (("entropy", entropy), ("top_prob", top)):
        signal = node.outputs[0]
        signal.name, signal.type, signal.shape = name, logits.type, ir.Shape([1, "rows"])
        graph.outputs.append(signal)
    graph.extend([probs, logs, shares, surprise, entropy, top])
    serialised: bytes = ir.to_proto(model).SerializeToString()
    return serialised
