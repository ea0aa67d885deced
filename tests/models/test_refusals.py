"""What loading refuses, doctor says in the same words before anything is loaded."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.loading import model as loading
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import load_model
from specctl.profile.schema import ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "_read", lambda *_: pytest.fail("weights were read"))
    return save_model(tmp_path / "llama")


def refusal(model: Path, **settings: object) -> ModelError:
    """The one error of doctor, of loading a model, and of loading a pair."""
    table = ModelTable(model=str(model), **({"device": "cpu"} | settings))
    problems = {(problem.message, problem.hint) for problem in diagnose(Profile(target=table)).problems}
    for load in (lambda: load_model(table, role="target"), lambda: load_pair(Profile(target=table))):
        with pytest.raises(ModelError) as caught:
            load()
        assert caught.value.hint
        assert problems == {(caught.value.message, caught.value.hint)}
    return caught.value


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


TORCHAO = {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}}}


@pytest.mark.parametrize(
    ("method", "settings", "named", "hint"),
    [
        ("gptq", {"bits": 4, "group_size": 128}, "optimum", "pip install gptqmodel optimum"),
        ("awq", {"bits": 4, "group_size": 128}, "gptqmodel", "pip install gptqmodel"),
        ("bitsandbytes", {"load_in_4bit": True}, "bitsandbytes", "pip install bitsandbytes"),
        ("torchao", TORCHAO, "torchao", "pip install torchao"),
        ("compressed-tensors", {"config_groups": {}}, "compressed-tensors", "pip install compressed-tensors"),
        ("fbgemm_fp8", {}, "requires a GPU", "Install what it names"),
        ("zzz", {}, "'zzz', a method that transformers does not know", "correct quant_method"),
        (None, {"bits": 4}, "'None', a method that transformers does not know", "correct quant_method"),
        (["odd"], {}, "a method that transformers does not know", "correct quant_method"),
    ],
)
def test_quantised_checkpoints_that_cannot_be_read_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: object, settings: dict[str, object], named: str, hint: str
) -> None:
    for module in ("torchao", "torchao.core.config"):
        monkeypatch.setitem(sys.modules, module, None)
    installed = [name for name in ("optimum", "gptqmodel", "bitsandbytes", "compressed_tensors") if find_spec(name)]
    if installed:
        pytest.skip(f"{', '.join(installed)} can be imported here, and the test needs it to be missing")
    edit(folder / "config.json", quantization_config={"quant_method": method, **settings})

    error = refusal(folder)

    assert named in error.message
    assert hint in error.hint


def in_fp8(folder: Path, block: int) -> dict[str, torch.Tensor]:
    """Store the layers' products of a checkpoint in FP8, a scale for each block; what they then are."""
    tensors = load_file(folder / "model.safetensors")
    meant: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        weight = tensors[name]
        rows, columns = (-(-size // block) for size in weight.shape)
        scales = torch.rand(rows, columns) + 0.5  # (row blocks, column blocks)
        spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        meant[name] = tensors[name].float() * spread
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]})
    return meant


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have kernels that read parts of a block")
@pytest.mark.parametrize("side", [24, 40], ids=["read in blocks of another size", "not read at all"])
def test_fp8_weights_that_are_no_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int) -> None:
    monkeypatch.setattr(loading, "_read", lambda *_: pytest.fail("weights were read"))
    folder = save_model(tmp_path / "llama", llama_config(hidden_size=side))
    in_fp8(folder, 16)

    error = refusal(folder)

    assert f"{side} x 32 weights, which is not a whole number of FP8 blocks of 16 x 16" in error.message
    assert "compute capability 8.9" in error.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may compute with the blocks")
def test_fp8_weights_of_whole_blocks_are_unpacked_as_meant(tmp_path: Path) -> None:
    """A side below one block is whole too: 8 columns under one scale."""
    folder = save_model(tmp_path / "llama", llama_config(hidden_size=32, num_attention_heads=4, head_dim=2))
    meant = in_fp8(folder, 16)

    loaded = load_model(ModelTable(model=str(folder), device="cpu", dtype="float32"), role="target").model

    found = loaded.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in meant.items())


def test_the_quantisation_of_a_text_decoder_inside_counts(tmp_path: Path) -> None:
    inner = {"quant_method": "awq"}
    for config, found in (({"text_config": {"quantization_config": inner}}, inner), ({"text_config": {}}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert Checkpoint("it", "target", None, tmp_path, "folder").quantization() == found


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"watermarking_config": 3}'], ids=["not JSON", "no object", "not transformers'"]
)
def test_damaged_generation_settings_are_not_silent(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)

    error = refusal(folder)

    assert "has a damaged generation_config.json" in error.message
    assert str(folder / "generation_config.json") in error.hint


def test_a_revision_of_a_folder(folder: Path) -> None:
    assert "revision = 'main' has no effect" in refusal(folder, revision="main").message


def test_a_revision_of_an_embedded_model() -> None:
    assert "is a folder, not a hub id" in refusal(Path("embedded:draft"), revision="v2").message


def test_a_device_for_a_module_that_does_not_exist(folder: Path) -> None:
    error = refusal(folder, device={"model": "cpu", "lm_heat": "cpu"})

    assert error.message == "[target] device: the model has no module 'lm_heat'."
    assert "Did you mean 'lm_head'?" in error.hint
    assert "model, lm_head" in error.hint


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 7}, "attention heads (7)"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}}, "rope_parameters.rope_type = 'nope'"),
        ({"hidden_act": "nope"}, "hidden_act = 'nope'"),
    ],
)
def test_configurations_that_make_no_model_keep_their_reason(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    edit(folder / "config.json", **changes)

    assert reason in refusal(folder).message
