"""Which differences between a graph and its model are rounding, and which are faults."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.models.running.one_function import widths_apart
from tests.support.onnx_models import needs_onnx, one_layer, onnx_runner

FORMS = [None, "int8", "int4"]


@cache
def uneven() -> PreTrainedModel:
    """A model whose norms differ from channel to channel, so that a missing one shows."""
    model = deepcopy(one_layer(rope_theta=5000.0))
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=draws)
    return model


class Stored:
    """A graph in its file, whose numbers and attributes a test changes."""

    def __init__(self, path: Path) -> None:
        import onnx

        self._path, self.model = path, onnx.load(path)  # with its weights
        self.nodes: list[Any] = list(self.model.graph.node)

    def of(self, *kinds: str) -> list[Any]:
        """The nodes of some kinds in the order of the graph."""
        return [node for node in self.nodes if node.op_type in kinds]

    def change(self, name: str, how: Callable[["np.ndarray"], "np.ndarray"]) -> None:
        """Change the numbers of a constant."""
        from onnx import numpy_helper

        (weight,) = (weight for weight in self.model.graph.initializer if weight.name == name)
        weight.CopyFrom(numpy_helper.from_array(how(numpy_helper.to_array(weight).copy()), name))

    def write(self) -> None:
        import onnx

        (self._path.parent / "weights.bin").unlink()
        onnx.save(self.model, self._path, save_as_external_data=True, location="weights.bin", size_threshold=256)


def scaled_block(graph: Stored) -> None:
    """One block of one output of a product is 1.3 times as large."""
    product = graph.of("MatMulNBits", "MatMul")[1]
    rounded = product.op_type == "MatMulNBits"

    def larger(numbers: "np.ndarray") -> "np.ndarray":
        numbers[(2,) if rounded else (slice(32), 1)] *= 1.3
        return numbers

    graph.change(product.input[2 if rounded else 1], larger)


def later_positions(graph: Stored) -> None:
    (attention,) = graph.of("GroupQueryAttention")
    for table in attention.input[7:9]:
        graph.change(table, lambda numbers: np.roll(numbers * 1.001, 1, axis=0))


def missing_norm(graph: Stored) -> None:
    norm = graph.of("SkipSimplifiedLayerNormalization")[0]
    graph.change(norm.input[2], np.ones_like)


def other_scores(graph: Stored) -> None:
    (attention,) = graph.of("GroupQueryAttention")
    (scale,) = (setting for setting in attention.attribute if setting.name == "scale")
    scale.f *= 1.01


def said(monkeypatch: pytest.MonkeyPatch, folder: Path, quantize: str | None, fault: Any = None) -> list[str]:
    """The notices on making a graph with a fault."""
    from specctl.models.onnx import engine

    usual = engine._write

    def write(*given: Any) -> None:
        usual(*given)
        (path,) = (each for each in given if isinstance(each, Path))
        graph = Stored(path)
        if fault is not None:
            fault(graph)
        graph.write()

    monkeypatch.setattr(engine, "cache_folder", lambda: folder)
    monkeypatch.setattr(engine, "_write", write)
    heard: list[str] = []
    onnx_runner(uneven(), 64, quantize, notice=heard.append)
    return heard


@needs_onnx
@pytest.mark.parametrize("quantize", FORMS)
def test_a_right_graph_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str | None) -> None:
    assert said(monkeypatch, tmp_path, quantize) == []
    assert {path.name for path in tmp_path.glob("*/*")} == {"manifest.json", "model.onnx", "weights.bin"}


@needs_onnx
@pytest.mark.parametrize("fault", [scaled_block, later_positions, missing_norm, other_scores])
@pytest.mark.parametrize("quantize", FORMS)
def test_a_fault_is_found_although_rounding_does_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str | None, fault: Any
) -> None:
    """Rounding the inputs of products to 8 bits changes the logits by more than some of these faults."""
    (line,) = said(monkeypatch, tmp_path, quantize, fault)
    assert line.startswith("it runs on torch: what onnxruntime computes differs by ")
    assert not list(tmp_path.glob("*/manifest.json"))
    assert said(monkeypatch, tmp_path, quantize, pytest.fail) == [line], "it is remembered"


@needs_onnx
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_graph_in_use_differs_by_no_more_than_rounding_its_inputs_to_8_bits_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str
) -> None:
    """Where torch rounds nothing, what onnxruntime rounds is a fault."""
    monkeypatch.setattr("specctl.models.onnx.check._eight_bits", lambda rows, _: rows)
    (line,) = said(monkeypatch, tmp_path, quantize)
    assert line.startswith("it runs on torch: what onnxruntime computes differs by 0.0")


@needs_onnx
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_passes_of_all_widths_agree_bit_for_bit(quantize: str) -> None:
    runner = onnx_runner(uneven(), 64, quantize, notice=pytest.fail)
    assert runner is not None
    assert widths_apart(runner, 64) == 0


@needs_onnx
@pytest.mark.parametrize("quantize", FORMS)
def test_sides_need_not_be_multiples_of_a_block(quantize: str | None) -> None:
    sizes = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 1, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=61, num_hidden_layers=1, head_dim=24, max_position_embeddings=80, **sizes)
        model = LlamaForCausalLM(config).eval()
    runner = onnx_runner(model, 61, quantize, notice=pytest.fail)
    assert runner is not None
    assert widths_apart(runner, 61) < (1e-5 if quantize is None else 1e-30)


@needs_onnx
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantize", FORMS)
def test_weights_that_are_no_numbers_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str | None, number: float
) -> None:
    model = deepcopy(one_layer(rope_theta=5000.0))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = number
    monkeypatch.setattr("specctl.models.onnx.engine.cache_folder", lambda: tmp_path)
    heard: list[str] = []
    assert onnx_runner(model, 64, quantize, notice=heard.append) is None
    why = "torch computes NaN with its weights" if quantize is None else "its weights contain NaN or infinity"
    assert heard == [f"it runs on torch: {why}"]


@needs_onnx
@pytest.mark.parametrize("quantize", FORMS)
def test_a_full_disk_leaves_the_model_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str | None
) -> None:
    """Files may grow to a size in the middle of the weights."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("specctl.models.onnx.engine.cache_folder", lambda: tmp_path / "graphs")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    onnx_runner(one_layer(), 64, quantize)  # its export is stored
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard: list[str] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, hard))
    try:
        runner = onnx_runner(one_layer(seed=1), 64, quantize, notice=heard.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert runner is None
    assert heard == [
        f"it: its graph cannot be kept in {tmp_path / 'graphs'} (File too large)",
        f"it runs on torch: there is no room for its graph in {tmp_path} either (File too large)",
    ]
    assert len(list(tmp_path.glob("graphs/*/*"))) == 3, "the first graph alone"
    assert onnx_runner(one_layer(seed=1), 64, quantize, notice=pytest.fail) is not None, "it is tried again"


@needs_onnx
@pytest.mark.parametrize("block", [16, 32])
def test_inputs_are_rounded_in_blocks(block: int) -> None:
    from specctl.models.onnx.check import _eight_bits

    rows = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows[1, :block] = 0
    found = _eight_bits(rows, block)
    for start in range(0, 40, block):
        part, theirs = rows[:, start : start + block], found[:, start : start + block]
        steps = part.abs().amax(-1, keepdim=True) / 127
        assert ((part - theirs).abs() <= steps * 0.5001).all()
        torch.testing.assert_close(theirs, (theirs / steps.clamp_min(1e-9)).round() * steps)
