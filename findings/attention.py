"""onnxruntime sessions with one GroupQueryAttention, on one thread of the CPU."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

VERSIONS = f"onnxruntime {ort.__version__}, onnx {onnx.__version__}, numpy {np.__version__}"
INTEGERS = ("lengths", "total", "counts")
COUNTS_PLACE = 16  # query_seqlens is the 17th input


def session(heads, key_heads, size, *, counted=False):
    """A session with the outputs ``mixed``, ``all_keys`` and ``all_values``.

    Args:
        heads, key_heads: numbers of heads.
        size: of a head.
        counted: whether it has query_seqlens, as the input ``counts``.
    """
    inputs = {
        "query": ["rows", "new", heads * size],
        "key": ["rows", "new", key_heads * size],
        "value": ["rows", "new", key_heads * size],
        "past_key": ["rows", key_heads, "past", size],
        "past_value": ["rows", key_heads, "past", size],
        "lengths": ["rows"],
        "total": [1],
    }
    outputs = {"mixed": inputs["query"]}
    outputs |= {name: ["rows", key_heads, "all", size] for name in ("all_keys", "all_values")}
    names = list(inputs)
    if counted:
        names += [""] * (COUNTS_PLACE - len(names)) + ["counts"]
        inputs["counts"] = ["rows"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        list(outputs),
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=key_heads,
    )
    graph = helper.make_graph([node], "attention", _described(inputs), _described(outputs))
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    model = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _described(values):
    return [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name in INTEGERS else TensorProto.FLOAT, dims)
        for name, dims in values.items()
    ]
