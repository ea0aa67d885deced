"""Blocks of GGUF's types, with the codes, scales and minima that a file has."""

from collections.abc import Callable

import numpy as np

from specctl.models.onnx.blocks import Blocks

_HALF = "<f2"
_NIBBLES = ("codes", "u1", (16,))  # byte j has code j in its low half and code j + 16 in its high half
_HIGH = ("high", "u1", (4,))  # bit j is the fifth bit of code j
_K_SCALES = ("packed", "u1", (12,))  # 8 scales and 8 minima of 6 bits each
_LAYOUTS: dict[str, list[tuple[str, str] | tuple[str, str, tuple[int, ...]]]] = {
    "Q4_0": [("scale", _HALF), _NIBBLES],
    "Q4_1": [("scale", _HALF), ("minimum", _HALF), _NIBBLES],
    "Q5_0": [("scale", _HALF), _HIGH, _NIBBLES],
    "Q5_1": [("scale", _HALF), ("minimum", _HALF), _HIGH, _NIBBLES],
    "Q8_0": [("scale", _HALF), ("codes", "i1", (32,))],
    "Q4_K": [("scale", _HALF), ("minimum", _HALF), _K_SCALES, ("codes", "u1", (4, 1, 32))],
    "Q5_K": [("scale", _HALF), ("minimum", _HALF), _K_SCALES, ("high", "u1", (1, 32)), ("codes", "u1", (4, 1, 32))],
    "Q6_K": [("codes", "u1", (2, 1, 64)), ("high", "u1", (2, 1, 32)), ("scales", "i1", (16,)), ("scale", _HALF)],
}
"""The bytes of a block, from llama.cpp's ggml-common.h."""
TYPES = tuple(_LAYOUTS)
"""The types that `of_type` reads."""


def of_type(kind: str, data: "np.ndarray") -> Blocks:
    """The blocks of a tensor as they stand: the same codes, and scales and minima in float32.

    Types of 5 and 6 bits get 8. The values are those of ``gguf.dequantize``, bit for bit where a block has no minimum;
    else they may differ in float32's rounding, since `Blocks` counts codes from the middle of their range.

    Args:
        kind: one of `TYPES`.
        data: ``(N, bytes)`` uint8, a tensor's rows in the file.
    """
    rows = np.ascontiguousarray(data).view(np.dtype(_LAYOUTS[kind]))  # (N, B) or (N, superblocks)
    return _READERS[kind](rows)


def _of_32(rows: "np.ndarray") -> Blocks:
    """Types with a scale for 32 weights."""
    given = rows.dtype.names or ()
    scales = rows["scale"].astype(np.float32)  # (N, B)
    codes = rows["codes"]
    if codes.dtype == np.int8:
        return Blocks.from_codes(codes.view(np.uint8) ^ 128, scales, bits=8)
    codes = np.concatenate((codes & 15, codes >> 4), -1)  # (N, B, 32)
    bits, half = 4, 8
    if "high" in given:
        codes |= np.unpackbits(rows["high"], axis=-1, bitorder="little") << 4
        bits, half = 8, 16
    minima = rows["minimum"].astype(np.float32) + half * scales if "minimum" in given else None
    return _centred(codes, scales, minima, bits, half)


def _of_k(rows: "np.ndarray") -> Blocks:
    """Types with 8 scales and minima in 256 weights."""
    first, second, both = np.split(rows["packed"], 3, -1)  # (N, S, 4) each
    factors = [
        np.concatenate((part & 63, nibbles | part >> 6 << 4), -1).astype(np.float32)  # (N, S, 8)
        for part, nibbles in ((first, both & 15), (second, both >> 4))
    ]
    scales, lowest = (
        (rows[name].astype(np.float32)[..., None] * each).reshape(len(rows), -1)  # (N, B)
        for name, each in zip(("scale", "minimum"), factors, strict=True)
    )
    codes = rows["codes"]  # (N, S, 4, 1, 32)
    codes = np.concatenate((codes & 15, codes >> 4), -2).reshape(*rows.shape, 8, 32)
    bits, half = 4, 8
    if "high" in (rows.dtype.names or ()):
        codes |= (rows["high"] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
        bits, half = 8, 16
    return _centred(codes.reshape(*scales.shape, 32), scales, half * scales - lowest, bits, half)


def _of_6_bits(rows: "np.ndarray") -> Blocks:
    """Q6_K: 16 scales in 256 weights."""
    scales = rows["scale"].astype(np.float32)[..., None] * rows["scales"].astype(np.float32)  # (N, S, 16)
    codes = rows["codes"]  # (N, S, 2, 1, 64)
    codes = np.concatenate((codes & 15, codes >> 4), -2).reshape(*rows.shape, 2, 4, 32)
    codes |= (rows["high"] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    scales = scales.reshape(len(rows), -1)
    return _centred(codes.reshape(*scales.shape, 16), scales, None, 8, 32)


def _centred(codes: "np.ndarray", scales: "np.ndarray", minima: "np.ndarray | None", bits: int, half: int) -> Blocks:
    """Blocks of codes counted from ``half``, instead of the middle of ``bits`` bits."""
    codes += np.uint8((1 << bits - 1) - half)
    return Blocks.from_codes(codes, scales, minima=minima, bits=bits)


_READERS: dict[str, Callable[["np.ndarray"], Blocks]] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), _of_32),
    **dict.fromkeys(("Q4_K", "Q5_K"), _of_k),
    "Q6_K": _of_6_bits,
}
