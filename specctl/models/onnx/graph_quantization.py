"""Weights of matrix products rounded to 8 or 4 bits, in blocks with a scale and a zero each."""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from specctl.models.onnx.nodes import MICROSOFT, constant, replace, weight_value

BITS = {"int8": 8, "int4": 4}
BLOCK = 32
"""Weights of one output that share a scale and a zero."""
INT8_ACTIVATIONS = 4
"""The accuracy level at which each token's inputs are rounded to 8 bits too, in blocks, for integer arithmetic."""


def quantize(model: ir.Model, bits: int) -> int:
    """Round the weights of every product but the output layer's; gives the number of products.

    Args:
        model: a fused graph, changed in place.
        bits: 4 or 8.
    """
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    kept, count = _above(logits), 0
    for node in list(model.graph):
        weight = constant(node.inputs[1]) if node.op_type == "MatMul" and node is not kept else None
        if weight is None or weight.ndim != 2 or weight.dtype not in (np.float32, np.float16):
            continue
        codes, scales, zeros = rounded(weight, bits)
        name = node.inputs[1].name  # type: ignore[union-attr]
        parts = {"codes": codes, "scales": scales, "zeros": zeros}
        given = [
            weight_value(model.graph, f"{name}.{node.outputs[0].name}.{part}", array) for part, array in parts.items()
        ]
        rows, columns = weight.shape
        settings = {"K": rows, "N": columns, "bits": bits, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
        product = ir.node("MatMulNBits", [node.inputs[0], *given], settings, domain=MICROSOFT)
        replace(model.graph, node, product, [(node.outputs[0], product.outputs[0])])
        model.graph.remove(node, safe=True)
        count += 1
    common.RemoveUnusedNodesPass()(model)  # and the weights that were rounded
    return count


def rounded(weight: "np.ndarray", bits: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """``(K, N)`` weights as codes ``(N, B, BLOCK * bits / 8)``, scales ``(N * B,)`` and zeros ``(N * B * bits / 8,)``.

    A weight is about scale * (code - zero), both of them uint8; B is the number of blocks in K, the last one padded.
    """
    codes, scales, zeros = _coded(weight.T, bits)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
        if zeros.shape[1] % 2:
            zeros = np.pad(zeros, ((0, 0), (0, 1)))
        zeros = zeros[:, 0::2] | zeros[:, 1::2] << 4
    return np.ascontiguousarray(codes), scales.astype(weight.dtype).reshape(-1), zeros.reshape(-1)


def nearest(weight: "np.ndarray", bits: int) -> "np.ndarray":
    """The values that ``(N, K)`` weights of N outputs have once they are rounded, float32."""
    codes, scales, zeros = _coded(weight, bits)
    values: np.ndarray = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
    return values.reshape(len(weight), -1)[:, : weight.shape[1]]


def _coded(weight: "np.ndarray", bits: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """``(N, K)`` weights as codes ``(N, B, BLOCK)`` and zeros ``(N, B)``, both uint8, and scales ``(N, B)`` float32."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), dtype=np.float32)
    padded[:, :columns] = weight
    groups = padded.reshape(rows, blocks, BLOCK)
    most = (1 << bits) - 1
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = (high - low) / most
    scales[scales == 0] = 1
    zeros = np.clip(np.rint(-low / scales), 0, most)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, most).astype(np.uint8)
    return codes, scales, zeros.astype(np.uint8)


def _above(value: ir.Value) -> ir.Node | None:
    """The product that a value is made from, directly or through what changes each number alone."""
    node = value.producer()
    while node is not None and node.op_type not in ("MatMul", "FusedMatMul"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node
