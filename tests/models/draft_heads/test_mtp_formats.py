"""MTP heads in files: what is found and read, and what is refused by name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mtp_targets import (
    FOLDER,
    KINDS,
    WITH_SPECULATORS,
    Passes,
    alone,
    checkpoint,
    config_of,
    head_of,
    shards_of,
    target_of,
)
from safetensors.torch import load_file, save_file

from specctl.errors import ModelError
from specctl.models.draft_heads.checkpoint import draft_head, head_in_target
from specctl.models.draft_heads.file_layout import read_head
from specctl.models.draft_heads.mtp_tensors import mtp_in, mtp_tensors, read_mtp
from specctl.models.files.checkpoint import INDEX
from specctl.models.files.skeleton import skeleton
from specctl.models.loading.draft_heads import load_draft_head
from specctl.models.loading.model import load_model
from specctl.profile.schema import DraftTable, ModelTable

Weights = dict[str, torch.Tensor]


@pytest.mark.parametrize("kind", KINDS)
def test_mtp_tensors_are_found_and_nothing_else(kind: str) -> None:
    found = mtp_in(checkpoint(FOLDER / kind))
    everything = load_file(FOLDER / kind / "model.safetensors")
    assert set(found.places) == {name for name in everything if name.startswith(("mtp.", "model.layers.2."))}
    assert found.layers == 1


def test_further_layers_are_counted_and_not_read() -> None:
    names = [f"model.layers.{layer}.{part}" for layer in range(5) for part in ("enorm.weight", "mlp.up_proj.weight")]
    found = mtp_tensors(names, 2)
    assert found.layers == 3
    assert found.first == {
        "model.layers.2.enorm.weight": "enorm.weight",
        "model.layers.2.mlp.up_proj.weight": "block.mlp.up_proj.weight",
    }
    assert mtp_tensors(["mtp.fc.weight", "mtp.layers.1.self_attn.q_proj.weight"], 2).layers == 2


def test_names_below_a_composite_models_prefix() -> None:
    found = mtp_tensors(["model.language_model.layers.2.shared_head.norm.weight", "model.visual.layers.9.x"], 2)
    assert found.first == {"model.language_model.layers.2.shared_head.norm.weight": "norm.weight"}


def test_only_the_shards_with_the_layer_are_opened(tmp_path: Path) -> None:
    """The index says where the layer is; the other file may be anything."""
    shutil.copy(FOLDER / "glm4_moe" / "config.json", tmp_path)
    weights = load_file(FOLDER / "glm4_moe" / "model.safetensors")
    own = {name: weight for name, weight in weights.items() if ".layers.2." in name}
    files = {"first.safetensors": weights.keys() - own.keys(), "second.safetensors": own.keys()}
    places = {name: file for file, names in files.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert mtp_in(checkpoint(tmp_path)).layers == 1  # before the weights are there
    (tmp_path / "first.safetensors").write_bytes(b"not weights")
    save_file(own, tmp_path / "second.safetensors")
    found = read_mtp(checkpoint(tmp_path))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    (tmp_path / "second.safetensors").write_bytes(b"neither")
    with pytest.raises(ModelError, match=r"second.safetensors is damaged"):
        read_mtp(checkpoint(tmp_path))


def test_experts_in_one_tensor() -> None:
    """Some targets are published that way."""
    weights = shards_of("qwen3_next")
    apart = {name for name in weights if re.search(r"experts\.\d", name)}
    block = head_of("qwen3_next").block.mlp.experts
    together = {name: weight for name, weight in weights.items() if name not in apart}
    for part in ("gate_up_proj", "down_proj"):
        together[f"mtp.layers.0.mlp.experts.{part}"] = getattr(block, part).detach()
    other = read_head("mtp", {}, together, target_of("qwen3_next")).block.mlp.experts
    assert torch.equal(other.gate_up_proj, block.gate_up_proj)
    assert torch.equal(other.down_proj, block.down_proj)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_in_its_target_is_loaded_beside_it(kind: str) -> None:
    found = head_in_target(checkpoint(FOLDER / kind), "draft")
    assert (found.kind, found.in_target, found.local) == ("mtp", True, True)
    target = load_model(ModelTable(model=str(FOLDER / kind), dtype="float32"), role="target")
    loaded = load_draft_head(found, DraftTable(model="target:mtp"), target)
    own = head_of(kind).state_dict()
    assert loaded.state_dict().keys() == own.keys()
    assert all(torch.equal(weight, own[name]) for name, weight in loaded.state_dict().items())


@pytest.mark.parametrize("kind", WITH_SPECULATORS)
def test_a_head_of_speculators_is_recognised(kind: str) -> None:
    found = draft_head(checkpoint(FOLDER / kind / "speculators"))
    assert found is not None
    assert (found.kind, found.in_target, found.verifier) == ("mtp", False, kind)
    assert found.read().keys() == alone(kind)[1].keys()
    assert draft_head(checkpoint(FOLDER / kind)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_head_needs_is_known_from_its_targets_shapes(kind: str) -> None:
    """Doctor builds heads on targets without weights."""
    place = checkpoint(FOLDER / kind)
    bare = read_head("mtp", {}, shards_of(kind), skeleton(place))
    whole = head_of(kind)
    assert [weight.shape for weight in bare.parameters()] == [weight.shape for weight in whole.parameters()]
    read = Passes(whole)
    read(torch.tensor([1]), torch.zeros(1, 16), 1)
    assert bare.cached_values == read.layer.keys[0, :, 0].numel() + read.layer.values[0, :, 0].numel()


def test_a_target_without_mtp_layers(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "glm4_moe" / "config.json", tmp_path)
    weights = load_file(FOLDER / "glm4_moe" / "model.safetensors")
    others = {name: weight for name, weight in weights.items() if ".layers.2." not in name}
    save_file(others, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no MTP layers in its files\."):
        mtp_in(checkpoint(tmp_path))
    save_file({**others, "model.mtp_block.0.proj": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no MTP layers .* model\.mtp_block\.0\.proj, of an unknown layout"):
        mtp_in(checkpoint(tmp_path))


def _with(name: str, tensor: torch.Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor})


def _without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3_next", _with("d2t", torch.zeros(3, dtype=torch.int64)), r"unknown tensors: d2t\."),
        ("qwen3_next", _with("norm.weight", torch.ones(16)), r"unknown tensors: norm\.weight\."),
        ("qwen3_next", _with("mtp.gate.weight", torch.ones(3)), r"unknown tensors: mtp\.gate\.weight\."),
        (
            "glm4_moe",
            _with("model.layers.2.self_attn.sinks", torch.ones(4)),
            r"unknown tensors: .*\.2\.self_attn\.sinks",
        ),
        ("glm4_moe", _without("model.layers.2.eh_proj.weight"), r"lacks tensors: eh_proj\.weight"),
        (
            "deepseek_v3",
            _without("model.layers.2.mlp.experts.0.up_proj.weight"),
            r"lacks tensors: mlp\.experts\.0\.up_proj",
        ),
        (
            "deepseek_v3",
            _with("model.layers.2.mlp.experts.4.up_proj.weight", torch.ones(8, 16)),
            r"unknown tensors: model\.layers\.2\.mlp\.experts\.4\.up_proj",
        ),
        (
            "deepseek_v3",
            _with("model.layers.2.mlp.experts.3.up_proj.weight", torch.ones(9, 16)),
            r"several shapes: \[\(8, 16\), \(9, 16\)\]",
        ),
        (
            "qwen3_5_text",
            _with("mtp.fc.weight", torch.ones(16, 48)),
            r"fc\.weight has shape \(16, 48\); .* \(16, 32\)",
        ),
        (
            "deepseek_v3",
            _with("model.layers.2.eh_proj.weight", torch.ones(16, 32).to(torch.float8_e4m3fn)),
            r"quantised .* model\.layers\.2\.eh_proj\.weight is of dtype torch\.float8_e4m3fn",
        ),
        ("qwen3_5_text", _with("mtp.norm.weight", torch.full((16,), torch.nan)), r"mtp\.norm\.weight holds NaN"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    kind: str, change: Callable[[Weights], object], message: str
) -> None:
    weights = shards_of(kind)
    change(weights)
    with pytest.raises(ModelError, match=message):
        read_head("mtp", config_of(FOLDER / kind), weights, target_of(kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_fc": True}, r"keys that specctl does not know: norm_before_fc\."),
        ({"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers = 2"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, r"kind 'qwen3'; the verifier's are 'qwen3_next'"),
        ({"rms_norm_eps": 0.1}, r"rms_norm_eps = 0\.1; the verifier's is 1e-06"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            r"rope_parameters = .*5\.0.*; the verif",
        ),
        ({"hidden_size": 32}, r"hidden_size = 32; the verifier's is 16"),
        ({"num_attention_heads": "four"}, r"transformers rejects"),
    ],
)
def test_configurations_of_speculators_that_do_not_fit(change: dict[str, object], message: str) -> None:
    config, weights = alone("qwen3_next")
    layer = config["transformer_layer_config"]
    assert isinstance(layer, dict)
    (key,) = change
    if key in layer:
        config["transformer_layer_config"] = {**layer, **change}
    else:
        config |= change
    with pytest.raises(ModelError, match=message):
        read_head("mtp", config, weights, target_of("qwen3_next"))


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(ModelError, match=r"kind 'qwen3_5_text'; the verifier's are 'qwen3_next'"):
        read_head("mtp", *alone("qwen3_5_text"), target_of("qwen3_next"))
