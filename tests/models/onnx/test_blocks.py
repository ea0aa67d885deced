"""Weights rounded in blocks: what a block can represent, and that MatMulNBits reads the same numbers."""

import itertools
from typing import Any

import numpy as np
import pytest

from specctl.models.onnx.blocks import PIECE, Blocks, Form, NotFinite, rounded, rounded_nbytes
from tests.support.onnx_models import needs_onnx

FORMS: tuple[Form, ...] = ("symmetric", "zeros", "minima")


def weights(outputs: int = 6, inputs: int = 72, seed: int = 0) -> Any:
    """Weights ``(N, K)`` whose blocks differ in size and in mean."""
    draws = np.random.default_rng(seed)
    found = draws.standard_normal((outputs, inputs)) * draws.uniform(0.1, 3, (outputs, 1))
    return (found + draws.uniform(-0.5, 0.5, (outputs, 1))).astype(np.float32)


@pytest.mark.parametrize(("bits", "form", "block"), [*itertools.product((4, 8), FORMS, (16, 32, 64, 128))])
def test_weights_are_rounded_to_the_nearest_code(bits: int, form: Form, block: int) -> None:
    given = weights(inputs=block + 24)  # the last block is padded

    found = Blocks.of(given, bits, block=block, form=form)

    assert (found.bits, found.block, found.inputs, found.outputs) == (bits, block, block + 24, 6)
    assert found.codes.shape == (6, -(-(block + 24) // block), block * bits // 8)
    assert (found.zeros is None, found.minima is None) == (form != "zeros", form != "minima")
    apart = np.abs(found.values() - given)
    half = np.abs(np.repeat(found.scales, block, axis=1)[:, : given.shape[1]]) / 2
    # An integer zero is rounded too, and one end of a symmetric range is cut off.
    most = {"symmetric": 2, "zeros": 2, "minima": 1}[form]
    assert (apart <= most * half * (1 + 1e-5)).all()
    if form != "symmetric":
        assert (apart.mean(1) < half.mean(1)).all()


@pytest.mark.parametrize(("bits", "form"), [*itertools.product((4, 8), FORMS)])
def test_values_that_a_block_can_represent_are_kept(bits: int, form: Form) -> None:
    once = Blocks.of(weights(), bits, form=form)
    again = Blocks.of(once.values(), bits, form=form)
    np.testing.assert_allclose(again.values(), once.values(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_of_equal_weights(form: Form) -> None:
    given = np.repeat(np.array([[0.0], [0.7], [-1.3]], dtype=np.float32), 40, axis=1)
    for bits in (4, 8):
        np.testing.assert_allclose(Blocks.of(given, bits, form=form).values(), given, rtol=1e-6)


def test_any_float_dtype_and_strides() -> None:
    given = weights().astype(np.float16)
    plain = Blocks.of(given.astype(np.float32), 4)
    turned = Blocks.of(np.ascontiguousarray(given.T).T, 4)
    assert np.array_equal(plain.codes, turned.codes)
    assert np.array_equal(plain.values(), turned.values())


def test_large_weights_are_rounded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights(50).size < PIECE
    whole = [Blocks.of(weights(50), 4, form=form) for form in FORMS]
    monkeypatch.setattr("specctl.models.onnx.blocks.PIECE", 300)  # 3 outputs
    for form, one in zip(FORMS, whole, strict=True):
        again = Blocks.of(weights(50), 4, form=form)
        assert np.array_equal(one.codes, again.codes)
        assert np.array_equal(one.values(), again.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_not_finite_are_refused(bad: float, form: Form) -> None:
    given = weights()
    given[3, 70] = bad
    with pytest.raises(NotFinite, match="NaN or infinity"):
        Blocks.of(given, 4, form=form)


def test_the_largest_floats_are_rounded_too() -> None:
    given = np.array([[2e38, -2e38, 1e38, 0.0] * 8], dtype=np.float32)
    for form in FORMS:
        np.testing.assert_allclose(Blocks.of(given, 8, form=form).values(), given, atol=2e36)


@pytest.mark.parametrize(("bits", "inputs"), [*itertools.product((4, 8), (32, 64, 70))])
def test_the_size_of_rounded_weights_is_known_from_their_shape(bits: int, inputs: int) -> None:
    given = weights(inputs=inputs)
    assert rounded(given, bits).nbytes == rounded_nbytes(given.shape, bits)


def test_outputs_are_joined_and_taken_apart() -> None:
    one, two = weights(5), weights(3, seed=1)
    for form in FORMS:
        parts = [Blocks.of(each, 4, form=form) for each in (one, two)]
        (whole,) = Blocks.joined(parts)
        assert np.array_equal(whole.values(), np.concatenate([part.values() for part in parts]))
        assert np.array_equal(whole.rows(slice(5, 8)).values(), parts[1].values())
        assert np.array_equal(whole.rows(np.array([4, 0])).values(), parts[0].values()[[4, 0]])
        assert whole.nbytes == sum(part.nbytes for part in parts)


def test_blocks_of_different_kinds_are_not_joined() -> None:
    plain = Blocks.of(weights(), 4)
    others = [
        Blocks.of(weights(), 8),
        Blocks.of(weights(), 4, block=16),
        Blocks.of(weights(), 4, form="minima"),
        Blocks.of(weights(), 4, form="symmetric"),
        Blocks.of(weights(inputs=70), 4),
    ]
    assert all(Blocks.joined([plain, other]) == [plain, other] for other in others)
    assert Blocks.joined([plain]) == [plain]


def product(blocks: Blocks, given: Any, level: int) -> Any:
    """``given`` ``(T, K)`` times the blocks' weights by MatMulNBits; minima are left out. (T, N)"""
    import onnx_ir as ir
    import onnxruntime

    zeros = blocks.packed_zeros()
    arrays = [blocks.codes, blocks.scales.reshape(-1), *([] if zeros is None else [zeros])]
    weights = [ir.val(str(index), const_value=ir.tensor(array, name=str(index))) for index, array in enumerate(arrays)]
    source = ir.val("x", shape=ir.Shape(("T", blocks.inputs)), type=ir.TensorType(ir.DataType.FLOAT))
    settings = {"K": blocks.inputs, "N": blocks.outputs, "bits": blocks.bits, "block_size": blocks.block}
    node = ir.node("MatMulNBits", [source, *weights], settings | {"accuracy_level": level}, domain="com.microsoft")
    made = node.outputs[0]
    made.name, made.type, made.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(("T", blocks.outputs))
    graph = ir.Graph([source], [made], nodes=[node], initializers=weights, opset_imports={"": 21, "com.microsoft": 1})
    whole = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(whole, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": given})[0]


@needs_onnx
@pytest.mark.parametrize(("bits", "form", "block"), [*itertools.product((4, 8), FORMS, (16, 32, 64, 128))])
def test_onnxruntime_reads_the_same_numbers(bits: int, form: Form, block: int) -> None:
    blocks = Blocks.of(weights(24, 3 * block - 10), bits, block=block, form=form)  # padded
    given = weights(5, 3 * block - 10, seed=2)
    sums = np.add.reduceat(given, np.arange(0, given.shape[1], block), axis=1)  # (T, B)
    expected = given @ blocks.values().T

    for level, most in ((0, 1e-5), (4, 0.02)):
        found = product(blocks, given, level)
        if blocks.minima is not None:
            found = found + sums @ blocks.minima.T
        assert np.sqrt(np.square(found - expected).mean()) < most * expected.std()
