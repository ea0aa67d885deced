"""Checkpoints quantised in blocks that run as they are: W4A16, GPTQ and AWQ."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.models.files.checkpoint import locate
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.pair_members import StoredModel
from specctl.models.onnx.blocks import Blocks
from specctl.models.onnx.checkpoint_weights import AWQ_ORDER, format_of
from specctl.models.onnx.skeletons import lent, packed_model
from specctl.models.onnx.store import Unable
from specctl.models.running.engines import EngineSettings
from specctl.profile import resolve
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import llama_config, save_model
from tests.support.onnx_models import needs_onnx

GROUP = 32
Tensors = dict[str, Any]


def packed(codes: Any, bits: int = 4) -> Any:
    """Codes ``(M, C)`` in numbers of 32 bits ``(M, C * bits / 32)``, the low bits first."""
    each = codes.astype(np.uint32).reshape(len(codes), -1, 32 // bits)
    whole = (each << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return torch.from_numpy(whole.view(np.int32).copy())


def plain(blocks: Blocks) -> tuple[Any, Any, Any]:
    """Codes ``(N, K)``, scales ``(N, G)`` that float16 holds, and zeros ``(N, G)`` of blocks with zeros."""
    codes = np.stack((blocks.codes & 15, blocks.codes >> 4), -1).reshape(blocks.outputs, -1)
    return codes, blocks.scales.astype(np.float16), blocks.zeros


def w4a16(blocks: Blocks) -> Tensors:
    codes, scales, zeros = plain(blocks)
    return {
        "weight_packed": packed(codes),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_zero_point": packed(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }


def gptq(blocks: Blocks) -> Tensors:
    codes, scales, zeros = plain(blocks)
    return {
        "qweight": packed(codes).T.contiguous(),
        "qzeros": packed(zeros.T - 1),  # stored too low by 1
        "scales": torch.from_numpy(scales).T.contiguous(),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(blocks: Blocks) -> Tensors:
    codes, scales, zeros = plain(blocks)
    placed = [np.argsort(AWQ_ORDER)[np.arange(8)] + start for start in range(0, len(codes), 8)]
    order = np.concatenate(placed)  # the column of each place
    return {
        "qweight": packed(codes.T[:, order]),
        "qzeros": packed(zeros.T[:, order]),
        "scales": torch.from_numpy(scales).T.contiguous(),
    }


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
SETTINGS: dict[str, dict[str, Any]] = {
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
WRITERS: dict[str, Callable[[Blocks], Tensors]] = {"w4a16": w4a16, "gptq": gptq, "awq": awq}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(folder: Path, kind: str) -> dict[str, Any]:
    """Write a quantised checkpoint; returns the values of its quantised weights by their names."""
    save_model(folder, llama_config(hidden_size=64, intermediate_size=128, num_attention_heads=4))
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors.pop(name).numpy()
        blocks = Blocks.of(weight - 0.3 * np.abs(weight).max(), 4, block=GROUP)
        assert blocks.zeros is not None
        blocks = replace(blocks, zeros=np.maximum(blocks.zeros, 1))  # GPTQ stores less by 1
        made = WRITERS[kind](blocks)
        scales = next(made[end] for end in ("weight_scale", "scales") if end in made).float().numpy()
        values[name] = replace(blocks, scales=scales if kind == "w4a16" else scales.T).values()
        tensors |= {name.removesuffix("weight") + end: tensor for end, tensor in made.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS[kind]}))
    return values


@pytest.mark.parametrize("kind", SETTINGS)
def test_blocks_have_the_values_that_were_written(tmp_path: Path, kind: str) -> None:
    values = checkpoint(tmp_path / "m", kind)

    made, weights = packed_model(locate(ModelTable(model=str(tmp_path / "m")), "target"))

    for name, parameter in made.named_parameters():
        blocks = weights.blocks(name)
        assert (blocks is None) == (name not in values)
        if blocks is not None:
            assert (blocks.bits, blocks.block) == (4, GROUP)
            assert np.array_equal(blocks.values(), values[name])
        assert weights.array(name).shape == tuple(parameter.shape)


@needs_onnx
@pytest.mark.parametrize("kind", SETTINGS)
def test_checkpoints_run_as_they_are(tmp_path: Path, kind: str) -> None:
    checkpoint(tmp_path / "m", kind)
    made, weights = packed_model(locate(ModelTable(model=str(tmp_path / "m")), "target"))
    ids = torch.randint(1, 258, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode(), lent(made, weights):
        expected = made(torch.tensor([ids])).logits[0]
    profile = resolve("embedded", overrides=[f"target.model={tmp_path / 'm'}", "engine=onnx"]).profile
    settings = replace(EngineSettings.of(profile), notice=pytest.fail)

    for _ in range(2):  # made, and then found without torch
        slot = load_pair(profile, drafts=(), engines=settings, torch_weights=False, models=False).target
        found = torch.as_tensor(slot.extend(ids, 20).logits)
        assert ((found - expected).square().mean().sqrt() / expected.std()) < 0.05

    files = locate(profile.target, "target")
    assert StoredModel.find(files, profile.target, "onnx", settings.trees, None) is not None
    assert StoredModel.find(files, profile.target, "auto", settings.trees, None) is None, "torch runs it"


@needs_onnx
def test_inputs_in_another_order_are_refused_with_the_reason(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m", "gptq")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors = {name: tensor.flip(0) if name.endswith("g_idx") else tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    _, weights = packed_model(locate(ModelTable(model=str(tmp_path / "m")), "target"))
    with pytest.raises(Unable, match="ordered by their activations"):
        weights.blocks("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (None, "quantised already"),
        ({"quant_method": "fp8"}, "quantised already"),
        (SETTINGS["gptq"] | {"bits": 3}, "3 bits"),
        (SETTINGS["gptq"] | {"checkpoint_format": "marlin"}, "GPTQ of another kind"),
        (SETTINGS["awq"] | {"version": "gemv"}, "AWQ of another kind"),
        (SETTINGS["w4a16"] | {"format": "int-quantized"}, "not pack-quantized"),
        (
            SETTINGS["w4a16"] | {"config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": WEIGHTS}}},
            "rounds activations",
        ),
        (SETTINGS["w4a16"] | {"config_groups": {"group_0": {"weights": WEIGHTS | {"actorder": "group"}}}}, "orders"),
    ],
)
def test_forms_without_a_reader(settings: dict[str, Any] | None, why: str) -> None:
    with pytest.raises(Unable, match=why):
        format_of(settings)


def test_groups_larger_than_a_block_share_their_scale() -> None:
    draws = np.random.default_rng(0)
    codes = draws.integers(0, 16, (8, 256), dtype=np.uint8)
    scales = draws.uniform(0.1, 1, (8, 1)).astype(np.float32)
    form = format_of(SETTINGS["w4a16"] | {"config_groups": {"group_0": {"weights": WEIGHTS | {"symmetric": True}}}})
    tensors = {"weight_packed": packed(codes).numpy(), "weight_scale": scales}
    blocks = form.blocks(tensors.__getitem__, 256)
    assert (blocks.block, blocks.zeros) == (128, None)
    assert np.array_equal(blocks.values(), (codes.astype(np.float32) - 8) * scales)
