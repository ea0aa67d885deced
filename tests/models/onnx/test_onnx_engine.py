"""Which models onnxruntime runs, what is said of the others, and what is exported when."""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)
from transformers.utils.quantization_config import QuantizationMethod

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import load_model
from specctl.models.placing.engine_table import ENGINES
from specctl.models.placing.memory import DeviceMemory
from specctl.models.running.engines import EngineSettings
from specctl.models.running.one_function import widths_apart
from specctl.models.running.transforms import CheckedPasses
from specctl.profile import resolve
from tests.support.onnx_models import graphs, needs_onnx, one_layer, onnx_runner, small_pair, sure_runner
from tests.support.toys import random_model, seeded

TOKENS: list[int] = torch.randint(0, 60, (40,), generator=seeded(3)).tolist()

BFLOAT16 = "onnxruntime computes in float32 on cpu, and its dtype is bfloat16"


def moving() -> PreTrainedModel:
    config = deepcopy(one_layer().config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return LlamaForCausalLM(config).eval()


def said(model: PreTrainedModel, quantize: str | None = None, *, trees: bool = False) -> str:
    """The one line that is said of a model that torch has to run."""
    heard: list[str] = []
    assert onnx_runner(model, 60, quantize, notice=heard.append, trees=trees) is None
    (line,) = heard
    return line


def no_graph_is_kept_yet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("specctl.models.onnx.engine.cache_folder", lambda: folder)


@needs_onnx
def test_a_graph_is_made_once_and_made_again_when_it_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    heard: list[str] = []
    first = sure_runner(one_layer(), 60, progress=heard.append)
    assert heard == ["preparing it for onnxruntime, once"]
    assert first.preparing_seconds is not None
    assert first.preparing_seconds
    again = sure_runner(one_layer(), 60, progress=heard.append)
    assert len(heard) == 1
    assert again.preparing_seconds is None
    (damaged,) = tmp_path.glob("*/weights.bin")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    mended = sure_runner(one_layer(), 60, progress=heard.append)
    assert len(heard) == 2
    expected = first.extend(TOKENS, keep=3).logits
    assert all(torch.equal(runner.extend(TOKENS, keep=3).logits, expected) for runner in (again, mended))
    assert {runner.engine for runner in (first, again, mended)} == {"onnx"}


@needs_onnx
def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("specctl.models.onnx.engine.cache_folder", lambda: tmp_path / "file" / "onnx")
    heard: list[str] = []
    runner = onnx_runner(one_layer(), 60, notice=heard.append)
    assert runner is not None
    assert runner.extend(TOKENS, keep=1).logits.shape == (1, 60)
    (line,) = heard
    assert line.startswith(f"it: its graph cannot be kept in {tmp_path / 'file' / 'onnx'} (")


@needs_onnx
def test_torch_runs_a_model_whose_graph_has_no_room_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specctl.models.onnx import engine

    def full(*_: Any) -> None:
        raise OSError("problem writing element 1024 to file")

    no_graph_is_kept_yet(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(engine, "_write", full)
    heard: list[str] = []
    assert onnx_runner(one_layer(), 60, notice=heard.append) is None
    why = "problem writing element 1024 to file"
    assert heard == [
        f"it: its graph cannot be kept in {tmp_path / 'cache'} ({why})",
        f"it runs on torch: there is no room for its graph in {tmp_path} either ({why})",
    ]


@pytest.mark.exhaustive
@needs_onnx
def test_a_graph_that_computes_something_else_for_one_token_or_for_branches_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither where single tokens are read as they are, nor where trees are read."""
    profile = resolve("embedded").profile
    model = load_model(profile.target, role="target").model
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    with monkeypatch.context() as unmended:
        unmended.setattr("specctl.models.onnx.passes.ATTENDED", 1)
        lines = [said(model, "int4")]
    with monkeypatch.context() as unmended:
        unmended.setattr("specctl.models.onnx.engine.tree_graph_obstacle", lambda *_: None)
        lines.append(said(model, "int4", trees=True))
    for line in lines:
        assert line.startswith(
            "it runs on torch: what onnxruntime computes for a token depends on how many are read with"
        )
        assert line.endswith(" of the logits' spread, and rounding explains 0")
    no_graph_is_kept_yet(monkeypatch, tmp_path / "another")  # the refusals above are remembered
    runner = onnx_runner(model, 60, "int4")
    assert runner is not None
    assert widths_apart(runner, 60) < 1e-5


@needs_onnx
def test_a_graph_that_computes_no_numbers_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specctl.models.onnx import rewriting

    def no_numbers(_: Any, node: Any) -> None:
        node.attributes["epsilon"] = type(node.attributes["epsilon"])(
            "epsilon", node.attributes["epsilon"].type, float("nan")
        )

    monkeypatch.setattr(rewriting, "fuse_sum", no_numbers)
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    assert said(one_layer(), "int8").startswith(
        "it runs on torch: what onnxruntime computes differs by inf of the logits' spread"
    )


@needs_onnx
def test_a_graph_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specctl.models.onnx import rewriting

    def wrong(_: Any, node: Any) -> None:
        node.attributes["epsilon"] = type(node.attributes["epsilon"])("epsilon", node.attributes["epsilon"].type, 0.5)

    monkeypatch.setattr(rewriting, "fuse_sum", wrong)
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    line = said(one_layer())
    assert line.startswith("it runs on torch: what onnxruntime computes differs by ")
    assert not list(tmp_path.glob("*/manifest.json"))


@needs_onnx
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_what_cannot_run_is_found_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str | None) -> None:
    """Nor is the graph of another form of the weights held to be unable."""
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    with monkeypatch.context() as off:
        off.setattr("specctl.models.onnx.check.compared", lambda *_: {"logits": 7.0})
        line = said(one_layer(), quantize)
    assert "differs by 7 of the logits' spread" in line
    with monkeypatch.context() as counted:
        counted.setattr("specctl.models.onnx.engine._write", lambda *_: pytest.fail("the graph was made again"))
        assert said(one_layer(), quantize) == line
    assert onnx_runner(one_layer(), 60, "int4", notice=pytest.fail) is not None


@needs_onnx
def test_what_memory_did_not_allow_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> float:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    no_graph_is_kept_yet(monkeypatch, tmp_path)
    with monkeypatch.context() as off:
        off.setattr("specctl.models.onnx.check.compared", full)
        assert "onnxruntime cannot run its graph (DefaultCPUAllocator" in said(one_layer())
    sure_runner(one_layer(), 60)


@needs_onnx
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (lambda: deepcopy(one_layer()).bfloat16(), BFLOAT16),
        (lambda: one_layer(head_dim=4), "its heads have a size of 4, and onnxruntime wants multiples of 8"),
        (
            lambda: moving(),
            "the angles of its positions depend on the length of the text (dynamic)",
        ),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).eval(),
            "it has layers with a state of their own",
        ),
    ],
    ids=["bfloat16", "small heads", "moving angles", "recurrent"],
)
def test_what_onnxruntime_cannot_run(model: Any, line: str) -> None:
    assert said(model()) == f"it runs on torch: {line}"


@pytest.mark.slow
@needs_onnx
def test_attention_of_a_model_of_its_own_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deepcopy(one_layer(rms_norm_eps=1e-4))  # of which no graph is kept
    attention = model.model.layers[0].self_attn
    usual = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *given, **named: (usual(*given, **named)[0] * 0 + 1, None))
    monkeypatch.setattr(model, "set_attn_implementation", lambda _: None)
    assert said(model) == "it runs on torch: its attention is not transformers' own"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.onnx.engine.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="needs onnxruntime, which is not installed") as error:
        load_pair(resolve("embedded", overrides=["engine=onnx"]).profile)
    assert 'pip install "onnxruntime' in str(error.value.hint)


@needs_onnx
@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.05), ("int4", 0.4)])
def test_rounded_weights(quantize: str, bound: float) -> None:
    whole, rounded = sure_runner(one_layer(), 60), onnx_runner(one_layer(), 60, quantize)
    assert rounded is not None
    assert rounded.engine == f"onnx, {quantize}"
    expected, found = (runner.extend(TOKENS, keep=20).logits for runner in (whole, rounded))
    apart = float((found - expected).square().mean().sqrt() / expected.std())
    assert 1e-5 < apart < bound
    # A token's numbers do not depend on how many others are read with it.
    for width in range(1, 20):
        rounded.rollback(20)
        parts = [TOKENS[start : start + width] for start in range(20, 40, width)]
        rows = torch.cat([torch.as_tensor(rounded.extend(part, keep=len(part)).logits) for part in parts])
        torch.testing.assert_close(rows, torch.as_tensor(found), atol=1e-5, rtol=1e-5)


@needs_onnx
def test_single_tokens_up_to_the_last_place_of_the_context() -> None:
    model = one_layer()
    one_by_one, whole = (onnx_runner(model, 60, "int4") for _ in range(2))
    assert one_by_one is not None
    assert whole is not None
    one_by_one.watch([0])
    whole.watch([0])
    found = []
    for token in 2 * TOKENS:
        read = one_by_one.extend([token], keep=1, hidden=True)
        found.append((read.logits, read.hidden, torch.as_tensor(read.states[0].copy())))
    expected = whole.extend(2 * TOKENS, keep=80, hidden=True)
    for rows, wanted in zip(
        zip(*found, strict=True), (expected.logits, expected.hidden, torch.as_tensor(expected.states[0])), strict=True
    ):
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-5, rtol=1e-5)


def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_torchao_available", lambda: False)


@needs_onnx
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_that_were_rounded_otherwise_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quantize: str
) -> None:
    from specctl.models.onnx import check, rewriting

    right = check.rounded  # imported before rewriting has another one

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return replace(found, scales=found.scales * 1.3)

    monkeypatch.setattr(rewriting, "rounded", wrong)
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    model = one_layer()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert said(model, quantize).startswith("it runs on torch: what onnxruntime computes differs by 0.3")
    assert not list(tmp_path.glob("*/manifest.json"))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
@needs_onnx
def test_a_model_that_rounding_changes_much_is_run_all_the_same() -> None:
    model = deepcopy(one_layer(rope_theta=8000.0))
    layer = model.model.layers[0]
    with torch.no_grad():  # weights that no input reaches make the others' codes coarse
        model.model.embed_tokens.weight[:, 0] = 0
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = 2
        layer.mlp.up_proj.weight[:, 0] = 2
        layer.mlp.down_proj.weight *= 100
    whole, rounded = sure_runner(model, 60), onnx_runner(model, 60, "int4")
    assert rounded is not None
    expected, found = (runner.extend(TOKENS, keep=20).logits for runner in (whole, rounded))
    assert float((found - expected).square().mean().sqrt() / expected.std()) > 0.5


@needs_onnx
def test_a_quantised_target_is_compared_with_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    without_torchao(monkeypatch)
    profile = small_pair(tmp_path, "target.quantize=int8", "check=true")
    pair = load_pair(profile)
    assert pair.target.engine == "onnx, int8"
    assert [draft.engine for draft in pair.drafts] == ["onnx"]
    assert isinstance(pair.target.passes, CheckedPasses)
    with torch.inference_mode():
        pair.target.extend([1, 2, 3, 4, 5], keep=3)
        pair.target.rollback(3)
        pair.target.extend([7, 8], keep=2)
    assert pair.target.passes.difference is not None
    assert pair.target.passes.difference < 1e-3


@needs_onnx
def test_doctor_tells_what_onnxruntime_quantises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_torchao(monkeypatch)
    report = diagnose(small_pair(tmp_path, "target.quantize=int4"))
    assert report.ready
    facts = report.models[0]
    assert (facts.quantize, facts.dtype) == ("int4", "float32")
    assert facts.devices == {"cpu": facts.weights_by_dtype["float32"]}, "it is loaded whole"
    monkeypatch.setattr("specctl.models.onnx.engine.find_spec", lambda _: None)
    (problem,) = diagnose(small_pair(tmp_path, "target.quantize=int4")).problems
    assert "needs onnxruntime, which is not installed" in problem.message


@needs_onnx
@pytest.mark.parametrize(
    ("products", "advice"),
    [
        ("AVX2", ["int4 weights are multiplied with AVX2."]),
        ("", ["int4 weights are unpacked in every pass: this processor has no integer products for onnxruntime."]),
        (None, []),
    ],
)
def test_doctor_names_the_instructions_of_integer_products(
    products: str | None, advice: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.doctor.diagnosis.integer_products", lambda: products)
    report = diagnose(small_pair(tmp_path, "target.quantize=int4"))
    assert [line.partition("': ")[2] for line in report.advice if "int4 weights" in line] == advice
    assert not any("int4 weights" in line for line in diagnose(small_pair(tmp_path)).advice)
    monkeypatch.setattr("specctl.doctor.diagnosis.rounded_graph", lambda *_: (None, "torch runs it"))
    report = diagnose(small_pair(tmp_path, "target.quantize=int4"))
    assert not any("int4 weights" in line for line in report.advice)


@needs_onnx
def test_doctor_counts_the_memory_that_making_a_graph_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small_pair(tmp_path)
    weights = sum(facts.devices["cpu"] for facts in diagnose(profile).models)

    def advice(free: int, engine: str) -> str:
        device = DeviceMemory("cpu", "CPU", free, free)
        monkeypatch.setattr("specctl.doctor.diagnosis.device_memory", lambda: [device])
        report = diagnose(profile.model_copy(update={"engine": engine}))
        assert report.ready
        return "\n".join(report.advice)

    assert "making its graph" in advice(3 * weights // 2, "onnx")
    assert "making its graph" not in advice(3 * weights // 2, "auto")
    assert "making its graph" not in advice(20 * weights, "onnx")


@needs_onnx
def test_torchao_quantises_what_onnxruntime_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = small_pair(tmp_path, "target.quantize=int8", "target.dtype=bfloat16")
    heard: list[str] = []
    pair = load_pair(profile, engines=EngineSettings.of(profile, notice=heard.append))
    assert heard[1:] == [f"{tmp_path / 'target'} runs on torch: {BFLOAT16}"], "the first is about the draft's size"
    assert pair.target.engine == "eager"
    assert pair.models[0].quantization_method == QuantizationMethod.TORCHAO
    without_torchao(monkeypatch)
    with pytest.raises(ModelError, match="needs torchao"):
        load_pair(profile)


@needs_onnx
def test_where_neither_can_quantise_a_target_doctor_says_what_loading_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model is right, and so torch quantises it; that form is checked too. Each finding is remembered."""
    pytest.importorskip("torchao")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("specctl.models.onnx.check.compared", lambda *_: {"logits": 7.0})
    monkeypatch.setattr("specctl.models.running.one_function.widths_apart", lambda *_: 0.4)
    monkeypatch.setattr("specctl.models.onnx.check.widths_apart", lambda *_: 0.4)
    profile = small_pair(tmp_path, "target.quantize=int8")

    (problem,) = diagnose(profile, tries=True).problems

    assert "its quantised weights compute something else in passes over one token" in problem.message
    alone = profile.model_copy(update={"draft": None})
    monkeypatch.setattr("specctl.models.onnx.engine._write", lambda *_: pytest.fail("the graph was made again"))
    with pytest.raises(ModelError) as caught:
        load_pair(alone)
    assert (caught.value.message, caught.value.hint) == (problem.message, problem.hint)


@needs_onnx
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_doctor_tells_what_runs_a_quantised_target_and_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = small_pair(tmp_path, f"target.quantize={form}")
    before = diagnose(profile).models
    load_pair(profile)
    after = diagnose(profile).models

    assert before[1].graph is None, "the draft's weights are not rounded"
    expected, stored = before[0].graph, after[0].graph
    assert expected is not None
    assert stored is not None
    assert (expected.form, expected.stored, expected.refused) == (form, False, None)
    assert (stored.form, stored.stored, stored.refused) == (form, True, None)
    made = list(tmp_path.glob("cache/specctl/onnx/*/weights.bin"))
    assert stored.bytes in [sum(file.stat().st_size for file in path.parent.iterdir()) for path in made]
    assert 0 < stored.bytes - expected.bytes < 1 << 18, "its nodes, and the angles of its positions"


@needs_onnx
def test_doctor_tells_why_torch_quantises_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("specctl.models.onnx.check.compared", lambda *_: {"logits": 7.0})
    profile = small_pair(tmp_path, "target.quantize=int8")
    load_pair(profile)
    graph = diagnose(profile).models[0].graph
    assert graph is not None
    assert not graph.stored
    assert str(graph.refused).startswith("what onnxruntime computes differs by 7 of the logits' spread")
    graph = diagnose(small_pair(tmp_path, "target.quantize=int8", "target.dtype=bfloat16")).models[0].graph
    assert graph is not None
    assert graph.refused == BFLOAT16


@needs_onnx
def test_doctor_does_not_ask_for_torchs_packages_where_onnxruntime_quantises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torchao(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = diagnose(small_pair(tmp_path, "target.quantize=int8"), tries=True)
    assert report.ready
    assert report.models[0].checked


@needs_onnx
def test_a_graph_without_products_to_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnx_ir as ir

    text = '<ir_version: 10, opset_import: ["" : 21]> graph (float[1] x) => (float[1] logits) { logits = Add(x, x) }'
    monkeypatch.setattr("specctl.models.onnx.export.exported", lambda *_, **__: ir.from_onnx_text(text))
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    assert said(one_layer(), "int8") == "it runs on torch: none of its products has weights that int8 rounds"


@pytest.mark.slow
@needs_onnx
def test_a_model_without_products_to_round() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    assert said(model, "int8") == "it runs on torch: none of its products has weights that int8 rounds"


@needs_onnx
def test_every_value_that_onnxruntime_has_a_form_for_is_known() -> None:
    from specctl.models.onnx.blocks import BITS

    assert tuple(BITS) == ENGINES["onnx"].forms


@needs_onnx
def test_tied_embeddings_are_stored_once_and_compute_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specctl.models.onnx import rewriting
    from specctl.models.onnx.store import Store, key_of

    model = one_layer(tie_word_embeddings=True)
    tied = sure_runner(model, 64)
    path = Store(graphs()).find(key_of(model, None))
    assert path is not None
    own = sum(weight.numel() for weight in model.parameters()) * 4
    tables = (80 + 64) * 16 * 4  # sines and cosines of all places and of padding
    assert (path.parent / "weights.bin").stat().st_size < own + tables + 64 * 32 * 4
    no_graph_is_kept_yet(monkeypatch, tmp_path)
    monkeypatch.setattr(rewriting, "share_tied", lambda _: None)
    apart = sure_runner(model, 64)
    text = torch.randint(1, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for width in (1, 2, 5, 40):
        for start in range(0, 40, width):
            rows = [torch.as_tensor(each.extend(text[start : start + width], width).logits) for each in (tied, apart)]
            assert torch.equal(*rows)
        for each in (tied, apart):
            each.rollback(0)


@needs_onnx
@pytest.mark.parametrize(("quantize", "bits"), [("int8", 8), ("int4", 4)])
def test_a_quantised_graph_keeps_no_weights_that_it_rounded(quantize: str, bits: int) -> None:
    from specctl.models.onnx.store import Store, key_of

    sure_runner(one_layer(), 60, quantize=quantize)
    path = Store(graphs()).find(key_of(one_layer(), quantize))
    assert path is not None
    model = one_layer()
    whole = {id(layer.weight): layer.weight.numel() for layer in (model.get_input_embeddings(), model.lm_head)}
    products = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2) - sum(whole.values())
    most = 4 * sum(whole.values()) + products * bits // 8 + products // 32 * 5 + (80 + 64) * 16 * 4 + 4096
    assert (path.parent / "weights.bin").stat().st_size < most


PEAK = """
import gc, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from specctl.models.onnx.engine import build_onnx_runner
from specctl.models.running.engines import EngineSettings

def told(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

def made(folder, width, layers, rows):
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_attention_heads=8, num_key_value_heads=4)
    config = LlamaConfig(vocab_size=rows, num_hidden_layers=layers, tie_word_embeddings=True,
                         max_position_embeddings=256, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    gc.collect()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = sum(weight.nbytes for weight in model.parameters()) / 1024
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = told("VmRSS")
    runner = build_onnx_runner(model, rows, "it", EngineSettings(engine="onnx", most_threads=2), keeps=False)
    assert runner is not None
    return (told("VmHWM") - before) / weights

made(sys.argv[1] + "/small", 128, 2, 512)  # modules and what they keep
print(made(sys.argv[1] + "/large", 1024, 8, 30_000))
"""


@pytest.mark.slow
@needs_onnx
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory a process has taken at most")
def test_making_a_graph_takes_little_more_than_twice_the_weights(tmp_path: Path) -> None:
    """The weights, which are mapped from their file, are counted as well."""
    torch_only = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, env=torch_only, check=True
    )
    assert float(done.stdout.split()[-1]) < 2.2


@needs_onnx
def test_a_llama_layer_is_eleven_nodes_and_two_for_several_sequences() -> None:
    import onnx_ir as ir

    from specctl.models.onnx.store import Store, key_of

    sure_runner(one_layer(), 60)
    path = Store(graphs()).find(key_of(one_layer(), None))
    assert path is not None
    graph = ir.load(path).graph
    (attention,) = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert attention.attributes["do_rotary"].as_int() == 1
    assert attention.inputs[1] is attention.inputs[2] is None, "the three projections are one"
    assert "positions" not in [given.name for given in graph.inputs]
    assert len(graph) == 11 + 2 + 3 + 1, "the last one tells signals"


@needs_onnx
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_layer_has_four_products(family: str) -> None:
    """Products with the same input are one, even where queries and keys are normed or the gate is a GELU."""
    import onnx_ir as ir

    from specctl.models.onnx.store import Store, key_of

    model = random_model(family)
    sure_runner(model, 60)
    path = Store(graphs()).find(key_of(model, None))
    assert path is not None
    kinds = [node.op_type for node in ir.load(path).graph]
    assert kinds.count("MatMul") == 4 * len(model.model.layers) + 1
    assert "Sigmoid" not in kinds


@needs_onnx
def test_where_lone_rows_of_products_round_differently_two_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specctl.models.onnx import rewriting
    from specctl.models.onnx.passes import OnnxPasses

    no_graph_is_kept_yet(monkeypatch, tmp_path)
    monkeypatch.setattr(rewriting, "lone_rows_agree", lambda _: False)
    runner = sure_runner(one_layer(), 60, quantize="int4")
    passes = runner.passes
    assert isinstance(passes, OnnxPasses)
    assert passes.graph.narrowest == 2
    assert widths_apart(runner, 60) == 0.0


@needs_onnx
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (8, 64)])
def test_a_lone_row_that_rounds_differently_is_found(monkeypatch: pytest.MonkeyPatch, bits: int, block: int) -> None:
    import onnx_ir as ir
    import onnxruntime

    from specctl.models.onnx import rewriting

    class Differing(onnxruntime.InferenceSession):  # type: ignore[misc]
        def run(self, *given: Any) -> Any:
            (found,) = super().run(*given)
            return [found * (1.001 if len(found) == 1 else 1)]

    settings = {"K": 128, "N": 300, "bits": bits, "block_size": block, "accuracy_level": 4}
    inputs = [ir.val(name) for name in ("source", "codes", "scales")]
    node = ir.node("MatMulNBits", inputs, settings, domain=rewriting.MICROSOFT)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21}, name="product")
    monkeypatch.setattr(onnxruntime, "InferenceSession", Differing)
    assert not rewriting.lone_rows_agree(ir.Model(graph, ir_version=10))
