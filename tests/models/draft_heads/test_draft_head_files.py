"""A draft head is known by its configuration and tensors, and read without running code."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from specctl.errors import ModelError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint, draft_head
from specctl.models.draft_heads.file_layout import Verifier, read_head, write_head
from specctl.models.draft_heads.kinds import recognise
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import Hub, save_model
from tests.support.eagle_references import DATA, EAGLE1, EAGLE3, all_logits, reference

PUBLISHED = ["midlayer.hidden_norm.weight", "fc.weight", "d2t"]


def located(model: str | Path) -> Checkpoint:
    return locate(ModelTable(model=str(model)), "draft")


def found(model: str | Path) -> DraftHeadCheckpoint:
    head = draft_head(located(model))
    assert head is not None
    return head


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE1])
def test_published_heads_are_recognised_whatever_they_are_called(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3-dflash-mtp"
    shutil.copytree(DATA / name, folder)
    (folder / "expected.safetensors").unlink()
    head = found(folder)
    assert head.kind == name.split("-")[0]
    assert head.read().keys() == reference(name).weights.keys()


@pytest.mark.parametrize(
    ("config", "tensors", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, [], "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, [], "eagle3"),
        ({"speculators_model_type": "mtp"}, [], "mtp"),
        ({"speculators_model_type": "dflash"}, [], "dflash"),
        ({"speculators_model_type": "dspark"}, [], "dspark"),
        ({"architectures": ["LlamaForCausalLM"]}, PUBLISHED, "eagle3"),
        ({"architectures": None}, ["fc.weight", "layers.0.hidden_norm.weight"], "eagle3"),
        ({}, ["fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"], "eagle1"),
        ({}, ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"], None),
        ({}, ["fc.weight", "norm.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"], "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 8}, [], "dspark"),
        ({"architectures": ["Gemma4DSparkModel"]}, [], "dflash"),
        ({}, ["norm.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight"], None),
        ({}, [], None),
    ],
)
def test_kinds_follow_from_configuration_and_tensors(
    config: dict[str, Any], tensors: list[str], kind: str | None
) -> None:
    assert recognise(config, tensors) == kind


@pytest.mark.parametrize("kind", ["xpress", "eagle", 3])
def test_other_types_of_speculators_are_refused(kind: object) -> None:
    with pytest.raises(ModelError, match=f"type {kind!r}"):
        recognise({"speculators_model_type": kind}, PUBLISHED)


def test_an_ordinary_model_is_no_draft_head(tmp_path: Path) -> None:
    assert draft_head(located(save_model(tmp_path / "eagle3"))) is None


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        ("eagle3-speculators", "example/verifier"),
        ("eagle3-deepspec", "example/verifier"),
        ("eagle3-safeailab", None),
        ("eagle1-safeailab", None),
    ],
)
def test_the_verifier_is_named_where_the_file_names_it(name: str, verifier: str | None) -> None:
    assert found(DATA / name).verifier == verifier


@pytest.mark.parametrize("named", [{"verifier": None}, {"verifier": {"name_or_path": 3}}, []])
def test_a_verifier_that_is_no_name_is_none(named: object) -> None:
    head = DraftHeadCheckpoint(located(DATA / "eagle3-speculators"), "eagle3", {"speculators_config": named})
    assert head.verifier is None


def pickled(folder: Path, contents: object, name: str = "eagle1-safeailab", *, legacy: bool = False) -> Path:
    folder.mkdir()
    shutil.copy(DATA / name / "config.json", folder)
    torch.save(contents, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return folder


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights_are_read_as_tensors(tmp_path: Path, legacy: bool) -> None:
    weights = reference("eagle1-safeailab").weights
    head = found(pickled(tmp_path / "head", weights, legacy=legacy))
    assert head.kind == "eagle1"
    read = head.read()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weight) for name, weight in weights.items())


class Trap:
    """Leaves a file behind when it is unpickled by a reader that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, legacy: bool) -> None:
    folder = pickled(tmp_path / "head", {"fc.weight": Trap(tmp_path / "sprung")}, legacy=legacy)
    with pytest.raises(ModelError, match="holds more than tensors"):
        draft_head(located(folder))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("contents", "message"), [({"fc.weight": 3}, "not a table of tensors"), ([torch.ones(1)], "not a table of tensors")]
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, contents: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        draft_head(located(pickled(tmp_path / "head", contents)))


@pytest.mark.parametrize("size", [0, 40, 4000])
def test_a_pickle_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    folder = pickled(tmp_path / "head", reference("eagle1-safeailab").weights)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"pytorch_model\.bin (is damaged|holds more)"):
        draft_head(located(folder))


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(DATA / "eagle3-safeailab", folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        found(folder).read()


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    shutil.copy(DATA / "eagle3-safeailab" / "config.json", tmp_path)
    with pytest.raises(ModelError, match="holds no weights"):
        found(tmp_path).read()


def test_a_head_on_the_hub_is_known_by_its_headers_and_read_when_needed(hub: Hub) -> None:
    hub.folders["who/draft"] = DATA / "eagle3-safeailab"
    config = json.loads((DATA / "eagle3-safeailab" / "config.json").read_text(encoding="utf-8"))
    assert "LlamaForCausalLMEagle3" in config["architectures"]
    head = found("who/draft")
    assert not (head.folder / "model.safetensors").exists()
    assert head.read().keys() == reference("eagle3-safeailab").weights.keys()


def test_an_eagle_1_head_on_the_hub_is_known_without_its_weights(hub: Hub) -> None:
    hub.folders["who/draft"] = DATA / "eagle1-qwen2"
    head = found("who/draft")
    assert head.kind == "eagle1"
    assert not (head.folder / "model.safetensors").exists()


def test_pickled_weights_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    weights = reference("eagle1-safeailab").weights
    hub.folders["yuhuili/EAGLE"] = pickled(tmp_path / "head", weights)
    head = found("yuhuili/EAGLE")
    assert head.kind == "eagle1"
    assert head.read().keys() == weights.keys()


def test_no_weights_are_asked_for_about_an_ordinary_model_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.folders["who/model"] = save_model(tmp_path / "model")
    checkpoint = located("who/model")
    assert draft_head(checkpoint) is None
    assert not any(request.endswith(".safetensors") for request in hub.requests)


@pytest.mark.parametrize("name", EAGLE3)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.representatives(
    "False-eagle3-speculators-normed",
    "True-eagle3-deepspec",
    "False-eagle3-speculators-biased",
    "True-eagle3-safeailab",
)
def test_what_is_written_computes_the_same(name: str, shared: bool, tmp_path: Path) -> None:
    data = reference(name)
    if shared:
        data.expected["embed"] = data.weights.pop("embed_tokens.weight")
    head = data.build()
    write_head(tmp_path / "new" / "head", head, Verifier("some/model", ("LlamaForCausalLM",)))
    again = found(tmp_path / "new" / "head")
    assert (again.kind, again.verifier) == ("eagle3", "some/model")
    weights = again.read()
    assert ("embed_tokens.weight" in weights) != shared
    back = read_head("eagle3", again.config, weights, data.verifier())
    assert back.config == head.config
    assert_close(all_logits(back, data), all_logits(head, data), atol=1e-5, rtol=1e-5)
    for tensor in {"d2t", "t2d"} & data.weights.keys():
        assert torch.equal(weights[tensor], data.weights[tensor])


@pytest.mark.parametrize("name", EAGLE3)
@pytest.mark.filterwarnings("default")
def test_speculators_computes_the_same_with_what_is_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="speculators is not installed")
    from speculators.models.eagle3 import Eagle3DraftModel

    data = reference(name)
    verifier = data.verifier()
    verifier.save_pretrained(tmp_path / "verifier")
    write_head(tmp_path / "head", data.build(verifier), Verifier(str(tmp_path / "verifier")))
    theirs = Eagle3DraftModel.from_pretrained(tmp_path / "head").eval()
    states = torch.cat([data.states[layer] for layer in theirs.config.eagle_aux_hidden_state_layer_ids], -1)[None]
    logits: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _given, output: logits.append(output[0]))
    ids = data.ids[None, : states.shape[1]]
    with torch.no_grad():
        theirs(states, ids, torch.zeros_like(ids), ttt_steps=1)
    assert_close(logits[0], data.expected["logits.0"], atol=1e-4, rtol=1e-4)
