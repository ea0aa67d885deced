"""What a graph computes from positions alone, computed once for all of them."""

import numpy as np
import onnx_ir as ir
import onnxruntime


def position_table(model: ir.Model, value: ir.Value, places: int) -> "np.ndarray | None":
    """``(places, ...)``, what a value of the graph is at each position; None if it depends on anything else.

    Args:
        model: has the input ``positions`` ``(1, T)``.
        value: ``(1, T, R)`` or ``(1, 1, T, R)``.
        places: how many positions there are.
    """
    positions = next(given for given in model.graph.inputs if given.name == "positions")
    try:
        part = ir.convenience.extract(model.graph, [positions], [value])
    except ValueError:
        return None
    alone = ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString()
    session = onnxruntime.InferenceSession(alone, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"positions": np.arange(places, dtype=np.int64)[None]})[0]
    return found.reshape(places, found.shape[-1])
