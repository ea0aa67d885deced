#!/usr/bin/env bash
# onnx_ir 1.1.0: each graph counts for itself when it names its nameless values, so that those of a branch of If are
# called like those outside (val_0, val_1 ...), and onnxruntime 1.32.0 rejects the saved file.
#
# A branch sees the values of the graph around it, so names must be unique across both. Saving gives no warning; the
# error comes when the file is opened: "Graph must be in single static assignment (SSA) form". onnx_ir's own NameFixPass
# repairs the model before it is saved, and names given by hand avoid the clash.
#
# Exits 0 if that is what happens, 1 if not.
set -eu
here=$(dirname "$0")
. "$here/environment.sh" ml_dtypes==0.6.0 numpy==2.4.6 onnx==1.23.2 onnx_ir==1.1.0 onnxruntime==1.32.0
"$python" - "$folder/model.onnx" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import NameFixPass

FILE = sys.argv[1]
print(f"onnx_ir {ir.__version__}, onnxruntime {ort.__version__}, onnx {onnx.__version__}, numpy {np.__version__}")


def model():
    """abs(-x) plus exp(-x) or sin(-x), where only what goes in and out has a name."""
    x, choice = ir.val("x", ir.DataType.FLOAT, ir.Shape([2])), ir.val("choice", ir.DataType.BOOL, ir.Shape([1]))
    minus = ir.node("Neg", [x])
    size = ir.node("Abs", minus.outputs)

    def branch(operator):
        inner = ir.node("Neg", [x])
        last = ir.node(operator, inner.outputs)
        return ir.Graph([], last.outputs, nodes=[inner, last], name=operator)

    chosen = ir.node("If", [choice], {"then_branch": branch("Exp"), "else_branch": branch("Sin")})
    total = ir.node("Add", [size.outputs[0], chosen.outputs[0]])
    y = total.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([2])
    graph = ir.Graph([x, choice], [y], nodes=[minus, size, chosen, total], name="main", opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


def names():
    """The names in the file, of the graph and of its branches."""
    graph = onnx.load(FILE).graph
    branches = [each.g for node in graph.node for each in node.attribute if each.HasField("g")]
    return [[name for node in each.node for name in node.output] for each in (graph, *branches)]


def answer():
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    made = ort.InferenceSession(FILE, options, providers=["CPUExecutionProvider"])
    return made.run(None, {"x": np.array([1, -2], np.float32), "choice": np.array([True])})[0]


ir.save(model(), FILE)
outer, *inner = names()
print("names outside and in the branches:", outer, *inner)
as_described = all(set(outer) & set(each) for each in inner)
try:
    answer()
    as_described = False
    print("the file was opened")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    as_described &= "Graph must be in single static assignment (SSA) form" in str(error)

mended = model()
NameFixPass()(mended)
ir.save(mended, FILE)
print("after NameFixPass:", *names(), answer())
as_described &= np.allclose(answer(), [1 + np.exp(-1), 2 + np.exp(2)])
print("as described" if as_described else "THE BEHAVIOUR HAS CHANGED")
sys.exit(not as_described)
PYTHON
