#!/usr/bin/env bash
# onnxruntime 1.32.0, x86 CPU: session.save_external_prepacked_constant_initializers adds the rearranged weights to the
# saved model and keeps the original ones too, so that its file of weights is about twice as large.
#
# Here for one MatMulNBits with 4 bits: 1.8 times as large with accuracy_level 0, and with 4, whose packed form is
# larger, more than twice. The original weights are in the file byte for byte. Both files give the same results.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
"$python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

FOLDER, SIZE, BLOCK = Path(sys.argv[1]), 2048, 32
print(f"onnxruntime {ort.__version__}, onnx {onnx.__version__}, numpy {np.__version__}")

chance = np.random.default_rng(0)
weights = chance.integers(0, 256, (SIZE, SIZE // BLOCK, BLOCK // 2), dtype=np.uint8)
scales = chance.uniform(0.005, 0.01, (SIZE, SIZE // BLOCK)).astype(np.float32)
rows = chance.standard_normal((3, SIZE), np.float32)


def options():
    made = ort.SessionOptions()
    made.intra_op_num_threads, made.log_severity_level = 1, 3
    return made


def opened(file, settings):
    return ort.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])


def saved(level, prepacked):
    """The bytes of the saved weights, what the saved model says of them, and its result."""
    node = helper.make_node(
        "MatMulNBits",
        ["x", "weights", "scales"],
        ["y"],
        domain="com.microsoft",
        K=SIZE,
        N=SIZE,
        bits=4,
        block_size=BLOCK,
        accuracy_level=level,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", SIZE])],
        [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(scales, "scales")],
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), FOLDER / "model.onnx")
    settings = options()
    file = FOLDER / f"saved-{level}-{prepacked}.onnx"
    settings.optimized_model_filepath = str(file)
    for name, value in {
        "optimized_model_external_initializers_file_name": file.with_suffix(".data").name,
        "optimized_model_external_initializers_min_size_in_bytes": "1024",
        "save_external_prepacked_constant_initializers": str(prepacked),
    }.items():
        settings.add_session_config_entry(f"session.{name}", value)
    opened(FOLDER / "model.onnx", settings)
    initializers = onnx.load(file, load_external_data=False).graph.initializer
    keys = {entry.key for each in initializers for entry in each.external_data}
    return file.with_suffix(".data").read_bytes(), keys, opened(file, options()).run(None, {"x": rows})[0]


print(f"weights and scales: {weights.nbytes + scales.nbytes:,} bytes")
as_described = True
for level in (0, 4):
    (alone, _, expected), (both, keys, result) = saved(level, 0), saved(level, 1)
    print(
        f"accuracy_level {level}: {len(alone):,} bytes without the setting, {len(both):,} with it"
        f" ({len(both) / len(alone):.2f} times), original weights still there: {weights.tobytes() in both}"
    )
    as_described &= "prepacked_0" in keys and weights.tobytes() in both and np.array_equal(result, expected)
    as_described &= 1.7 < len(both) / len(alone) < 2.5
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
