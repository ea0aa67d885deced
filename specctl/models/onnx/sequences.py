"""The last rewrites of an exported graph: several sequences in one pass, and signals of the logits."""

import numpy as np
import onnx_ir as ir

from specctl.models.onnx.rewriting import set_inputs

CACHES, PLACES, QUERIES = slice(3, 5), 9, 16
"""Places of GroupQueryAttention's inputs: the two caches, the tokens' positions, and how many tokens of each sequence
are valid."""

MOST_LOGITS = 1 << 17
"""The most logits of a token of which a graph computes signals. With two layers of width 64, that took 0.93 of the
processor time for a written token at 49,152 logits, and 1.03 at 262,144, where numpy is faster."""


def attend_by_sequence(graph: ir.Graph) -> None:
    """Let a graph from `export.exported` read the N tokens of any number of sequences in one pass.

    Norms, projections and feed-forward layers see all N tokens in ``(1, N)``. Only attention distinguishes sequences.
    Its inputs are gathered into ``(sequences, S)``, S the most tokens of one sequence. It computes nothing for the
    padding, and its results are put back in the order of the tokens.

    Changed inputs: ``before`` ``(sequences,)``, the number of cached tokens of each sequence after the pass, minus one;
    ``total`` ``(1,)``, at least one more than the largest of these, and at least S; caches ``(sequences, heads,
    capacity, size)``. A bias for trees has S rows.

    New inputs: ``spread`` ``(sequences, S, 2)`` int64, for each row of attention the place ``(0, n)`` of its token, any
    token for padding; ``packed`` ``(1, N, 2)`` int64, for each token the place ``(sequence, s)`` of its row in
    attention; ``queries`` ``(sequences,)`` int32, how many of the S rows are valid. A sequence with 0 is skipped.

    Args:
        graph: changed in place.
    """
    given = {value.name: value for value in graph.inputs}
    spread = ir.val("spread", ir.DataType.INT64, ir.Shape(["sequences", "longest", 2]))
    packed = ir.val("packed", ir.DataType.INT64, ir.Shape([1, "tokens", 2]))
    queries = ir.val("queries", ir.DataType.INT32, ir.Shape(["sequences"]))
    given["before"].shape = ir.Shape(["sequences"])
    gathered: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        inputs = [*node.inputs, *[None] * (QUERIES - len(node.inputs)), queries]
        for place in (0, 1, 2, PLACES):
            if (value := inputs[place]) is None:
                continue
            if value not in gathered:
                graph.insert_before(node, gather := ir.node("GatherND", [value, spread]))
                gathered[value] = gather.outputs[0]
            inputs[place] = gathered[value]
        for cache in (*inputs[CACHES], *node.outputs[1:]):
            if cache is not None and cache.shape is not None:
                cache.shape = ir.Shape(["sequences", *cache.shape.dims[1:]])
        set_inputs(node, inputs)
        result = node.outputs[0]
        back = ir.node("GatherND", [result, packed])
        result.replace_all_uses_with(back.outputs[0])
        back.replace_input_with(0, result)
        back.outputs[0].type, back.outputs[0].shape, result.shape = result.type, result.shape, None
        graph.insert_after(node, back)
    graph.inputs.extend([spread, packed, queries])


def tell_signals(graph: ir.Graph) -> None:
    """Add two outputs to an exported graph: ``entropy`` in nats and ``top_prob``, each ``(1, R)``.

    They are computed where the new input ``signals`` ``(1,)`` bool is true, else they are ``(1, 0)`` and cost nothing.
    A graph with more than `MOST_LOGITS` stays as it is. The largest logit is left to numpy, which finds it in a tenth
    of onnxruntime's time.

    Args:
        graph: changed in place.
    """
    logits = next(value for value in graph.outputs if value.name == "logits")  # (1, R, V)
    if logits.shape is None or not isinstance(count := logits.shape[2], int) or count > MOST_LOGITS:
        return
    wanted = ir.val("signals", ir.DataType.BOOL, ir.Shape([1]))
    none = np.zeros((1, 0), dtype=np.float32)
    last, *nothing = (ir.node("Constant", [], {"value": ir.tensor(array)}) for array in (np.array([-1]), none, none))
    probs, logs = (ir.node(name, [logits], {"axis": -1}) for name in ("Softmax", "LogSoftmax"))
    shares = ir.node("Mul", [probs.outputs[0], logs.outputs[0]])
    surprise = ir.node("ReduceSum", [shares.outputs[0], last.outputs[0]], {"keepdims": 0})
    entropy = ir.node("Neg", [surprise.outputs[0]])
    top = ir.node("ReduceMax", [probs.outputs[0], last.outputs[0]], {"keepdims": 0})
    computing = [last, probs, logs, shares, surprise, entropy, top]
    for place, node in enumerate((*computing, *nothing)):  # onnx_ir names values without a look at the outer graph
        node.outputs[0].name = f"signals.{place}"
    for node in (entropy, top, *nothing):
        node.outputs[0].type, node.outputs[0].shape = logits.type, ir.Shape([1, "computed"])
    branches = {
        "then_branch": ir.Graph([], [entropy.outputs[0], top.outputs[0]], nodes=computing, name="computed"),
        "else_branch": ir.Graph([], [node.outputs[0] for node in nothing], nodes=nothing, name="skipped"),
    }
    choice = ir.node("If", [wanted], branches, num_outputs=2)
    graph.append(choice)
    graph.inputs.append(wanted)
    for made, name in zip(choice.outputs, ("entropy", "top_prob"), strict=True):
        made.name, made.type, made.shape = name, logits.type, ir.Shape([1, "computed"])
        graph.outputs.append(made)
