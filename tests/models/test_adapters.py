"""LoRA adapters of the target and its drafts: what a model computes with one is what peft's own model computes."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError, ProfileError
from specctl.models.files.checkpoint import Adapter, locate, weights_hash
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.contents import Contents, model_hash
from specctl.models.loading.model import load_model
from specctl.models.predictors.predictor_checkpoint import PredictorCheckpoint, mismatch
from specctl.profile import resolve
from specctl.profile.schema import ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model
from tests.support.onnx_models import needs_onnx

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing"),  # peft's own, as it is loaded with
]
TEXT = torch.tensor([[5, 9, 3, 40, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return trained(base, base.parent / "adapter")


def trained(base: Path, folder: Path, **settings: Any) -> Path:
    """A random adapter that changes what a model computes a lot."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = {"r": 3, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | settings
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=24, **settings)).save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        return PeftModel.from_pretrained(model, str(adapter)).eval()(input_ids=TEXT).logits[0]


def table(base: Path, adapter: Path | str, **settings: Any) -> ModelTable:
    return ModelTable(model=str(base), adapter=str(adapter), device="cpu", **settings)


def told(base: Path, adapter: Path | str, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(table(base, adapter, **settings), role="target")
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


def test_a_model_with_its_adapter_computes_what_pefts_does(base: Path, adapter: Path) -> None:
    found = load_model(table(base, adapter), role="target").model
    plain = load_model(ModelTable(model=str(base), device="cpu"), role="target").model
    wanted = peft_logits(base, adapter)
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=TEXT).logits[0], wanted, atol=1e-5, rtol=1e-4)
        assert (plain(input_ids=TEXT).logits[0] - wanted).abs().max() > 0.1
    assert not any("lora" in name for name, _ in found.named_modules()), "nothing is added to its passes"


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers", "ignore:Model has .tie_word")  # peft's own
@pytest.mark.parametrize("changed", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_embeddings_that_are_the_output_layer_too_are_changed_apart(changed: list[str], tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", llama_config(tie_word_embeddings=True))
    adapter = trained(base, tmp_path / "adapter", target_modules=changed)
    model = load_model(table(base, adapter), role="target").model
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=TEXT).logits[0], peft_logits(base, adapter), atol=1e-5, rtol=1e-4)
    model.tie_weights()
    weights = dict(model.named_parameters())
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= weights.keys(), "nothing ties them again"


@pytest.mark.parametrize("engine", ["eager", pytest.param("onnx", marks=needs_onnx)])
def test_target_and_draft_have_adapters_on_every_engine(
    engine: str, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of the same files without the adapter, or with another one, is another graph."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = trained(base, tmp_path / "other", r=2)
    for target, draft in ((None, adapter), (adapter, other)) if engine == "onnx" else ((adapter, other),):
        changes = {"target.model": base, "draft.model": base, "target.adapter": target, "draft.adapter": draft}
        given = [f"{key}={value}" for key, value in changes.items() if value is not None]
        profile = resolve("embedded", overrides=[*given, f"engine={engine}", "target.device=cpu"]).profile
        pair = load_pair(profile)
        for runner, changed in zip((pair.target, *pair.drafts), (target, draft), strict=True):
            rows = torch.as_tensor(runner.extend(TEXT[0].tolist(), keep=5).logits)
            plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            with torch.no_grad():
                wanted = plain(input_ids=TEXT).logits[0] if changed is None else peft_logits(base, changed)
            torch.testing.assert_close(rows, wanted[:, : rows.shape[1]], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_quantised_weights_stay_and_the_adapter_is_computed_apart(base: Path, adapter: Path) -> None:
    pytest.importorskip("torchao")
    found = load_model(table(base, adapter, quantize="int8"), role="target").model
    assert any("lora_A" in name for name, _ in found.named_modules())
    with torch.no_grad():
        rows = found(input_ids=TEXT).logits[0]
    plain = load_model(ModelTable(model=str(base), device="cpu", quantize="int8"), role="target").model
    wanted = peft_logits(base, adapter)
    with torch.no_grad():
        apart = (plain(input_ids=TEXT).logits[0] - wanted).abs().mean()
    assert (rows - wanted).abs().mean() < 0.2 * apart


def test_an_adapter_is_part_of_what_a_model_is(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = trained(base, tmp_path / "other", r=2)
    places = [
        locate(ModelTable(model=str(base)), "target"),
        *(locate(table(base, each), "target") for each in (adapter, other)),
    ]
    hashes = [model_hash(place, False) for place in places]
    assert None not in hashes
    assert len({*hashes}) == 3
    profiles = [
        Profile(target=place) for place in (ModelTable(model=str(base)), table(base, adapter), table(base, other))
    ]
    assert len({Contents.of(profile).identities()["target"] for profile in profiles}) == 3


def test_what_an_adapter_says_of_itself(base: Path, adapter: Path, tmp_path: Path) -> None:
    found = Adapter.find(str(adapter), "target")
    assert (found.rank, found.base) == (3, str(base))
    wide = trained(base, tmp_path / "wide", rank_pattern={"down_proj": 7})
    assert Adapter.find(str(wide), "draft").rank == 7


def test_doctor_names_rank_and_base(base: Path, adapter: Path) -> None:
    (facts,) = diagnose(Profile(target=table(base, adapter))).models
    assert facts.adapter == f"{adapter}: LoRA of rank 3, trained on {base}"


def test_an_adapter_of_another_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    larger = save_model(tmp_path / "larger", llama_config(hidden_size=32))
    message = told(larger, adapter)
    assert f"The target adapter '{adapter}' is for another base: it changes model.layers.0." in message
    assert "16 x 16, which is 32 x 32 here" in message or "16 x 32, which is 32 x 32 here" in message
    assert f"It was trained on '{base}'" in message
    of_others = trained(base, tmp_path / "others", target_modules=["q_proj"])
    path = of_others / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name.replace("q_proj", "query"): one for name, one in load_file(path).items()}, path)
    assert "the model has no model.layers.0.self_attn.query" in told(base, of_others)


def test_an_adapter_of_more_or_fewer_layers(base: Path, adapter: Path, tmp_path: Path) -> None:
    deeper = save_model(tmp_path / "deeper", llama_config(num_hidden_layers=3))
    assert "the model has no model.layers.2." in told(base, trained(deeper, tmp_path / "more"))
    assert "lacks 4 tensor(s) of this model's, first base_model.model.model.layers.2." in told(deeper, adapter)


@pytest.mark.parametrize(
    ("file", "contents", "wanted"),
    [
        ("adapter_config.json", None, "there is no adapter_config.json"),
        ("adapter_config.json", "[]", "has a damaged adapter_config.json: it is not an object"),
        ("adapter_config.json", "{", "has a damaged adapter_config.json"),
        ("adapter_config.json", '{"peft_type": "IA3"}', "is of the kind IA3; specctl loads LoRA"),
        ("adapter_config.json", '{"peft_type": "LORA", "rank_pattern": [7]}', "rank_pattern is not an object"),
        ("adapter_model.safetensors", None, "holds no adapter_model.safetensors"),
        ("adapter_model.safetensors", "{", "is damaged"),
    ],
)
def test_files_that_cannot_be_used(
    file: str, contents: str | None, wanted: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    for path in adapter.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if contents is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(contents)
    assert wanted in told(base, tmp_path)


def test_an_adapter_that_is_nowhere(base: Path) -> None:
    assert "there is no such folder" in told(base, "./nowhere")


def test_without_peft(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.files.checkpoint.find_spec", lambda _: None)
    assert 'needs peft. Run `pip install "peft' in told(base, adapter)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (["target.shards=2"], "excludes adapter"),
        (["draft.model=prompt:lookup", "draft.adapter=here"], "needs a model with its own files"),
    ],
)
def test_where_it_has_no_place(change: list[str], wanted: str) -> None:
    with pytest.raises(ProfileError, match=wanted):
        resolve("embedded", overrides=["target.adapter=here", *change])


def test_another_model_has_no_adapter_of_the_one_before() -> None:
    below = resolve("embedded", overrides=["target.adapter=here"])
    assert below.profile.target.full_name == "embedded:target with here"
    assert replace(below).profile.target.adapter == "here"
    assert json.loads(json.dumps(below.profile.model_dump(mode="json")))["target"]["adapter"] == "here"


def test_an_acceptance_head_knows_its_drafts_adapter(base: Path, adapter: Path) -> None:
    plain, changed = locate(ModelTable(model=str(base)), "draft"), locate(table(base, adapter), "draft")
    head = PredictorCheckpoint("a", base, {"draft_sha256": weights_hash(changed)})
    assert mismatch(head, changed) is None
    assert mismatch(head, plain) is not None
