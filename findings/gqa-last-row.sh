#!/usr/bin/env bash
# onnxruntime 1.32.0, x86 CPU: a row of GroupQueryAttention has other bits where it is the last of 129 than among 140.
#
# Flash attention, the default, takes query rows in blocks. With head size 64 a block has 128 rows, so of 129 rows one
# is left over and is computed alone, which adds numbers up in another order (about 1e-7 apart). Of 130 rows two are
# left over, and nothing differs. ORT_GQA_DISABLE_FLASH_ATTENTION=1, set before the session is made, removes the
# difference; for a session that exists already, setting it changes nothing.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
unset ORT_GQA_DISABLE_FLASH_ATTENTION
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import os
import sys

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

HEADS, KEY_HEADS, SIZE, MOST = 9, 3, 64, 268
print(f"onnxruntime {ort.__version__}, onnx {onnx.__version__}, numpy {np.__version__}")


def session():
    inputs = {
        "query": ["rows", "new", HEADS * SIZE],
        "key": ["rows", "new", KEY_HEADS * SIZE],
        "value": ["rows", "new", KEY_HEADS * SIZE],
        "past_key": ["rows", KEY_HEADS, "past", SIZE],
        "past_value": ["rows", KEY_HEADS, "past", SIZE],
        "lengths": ["rows"],
        "total": [1],
    }
    kinds = {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
    node = helper.make_node(
        "GroupQueryAttention",
        list(inputs),
        ["mixed", "all_keys", "all_values"],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KEY_HEADS,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(one, kinds.get(one, TensorProto.FLOAT), dims) for one, dims in inputs.items()],
        [helper.make_tensor_value_info("mixed", TensorProto.FLOAT, ["rows", "new", HEADS * SIZE])],
    )
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


chance = np.random.default_rng(0)
query = chance.standard_normal((1, MOST, HEADS * SIZE), np.float32)
key, value = chance.standard_normal((2, 1, MOST, KEY_HEADS * SIZE), np.float32)
nothing = np.zeros((1, KEY_HEADS, 0, SIZE), np.float32)


def attend(made, count):
    given = {"query": query[:, :count], "key": key[:, :count], "value": value[:, :count]}
    given |= {"past_key": nothing, "past_value": nothing}
    given |= {"lengths": np.array([count - 1], np.int32), "total": np.array([count], np.int32)}
    return made.run(["mixed"], given)[0][0]


def differing(made, few, many):
    apart = np.abs(attend(made, few) - attend(made, many)[:few]).max(axis=1)
    rows = np.flatnonzero(apart).tolist()
    print(f"  {few} tokens against {many}: rows that differ: {rows}, by up to {apart.max():.1e}")
    return rows if apart.max() < 1e-5 else None


pairs = [(129, 140), (130, 140), (257, 268)]
flash = session()
print("flash attention, the default:")
seen = [differing(flash, *pair) for pair in pairs]
os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = "1"
print("the same session after ORT_GQA_DISABLE_FLASH_ATTENTION=1:")
late = [differing(flash, *pair) for pair in pairs]
print("a session made after it:")
plain = session()
without = [differing(plain, *pair) for pair in pairs]
as_described = seen == late == [[128], [], [256]] and without == [[], [], []]
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
