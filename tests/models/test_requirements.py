"""What cannot run is refused before its weights are loaded, in the same words by doctor and by loading."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from specctl.decoding.loop import decode
from specctl.decoding.round import NOTHING, judge
from specctl.decoding.sampling import Sampling
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError, RecordError
from specctl.models.files.checkpoint import locate
from specctl.models.loading.assembly import load_pair
from specctl.models.passes.cache import CANNOT_GO_BACK
from specctl.models.passes.forward import Forward
from specctl.models.placing.model_config import NEEDS_MORE, require_runnable
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.profile.schema import ModelTable, Profile
from tests.support.checkpoints import save_model, tiny_tokenizer
from tests.support.recurrent_models import RECURRENT
from tests.support.toys import random_model

_SMALL = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 3}
REFUSED = {
    "blt": {},
    "cpmant": {},
    "diffusion_gemma": {},
    "moshi": {"num_attention_heads": 4},
    "minimax": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "recurrent_gemma": {"num_attention_heads": 4, "lru_width": 32},
    "rwkv": {},
    "unlimited_ocr": {},
    "xlstm": {"num_heads": 4},
    "kosmos-2.5": {},
    "openai-gpt": {},
    "paligemma": {},
    "prophetnet": {"num_hidden_layers": None, "is_encoder_decoder": False},
}
NOT_TEXT_ALONE = {
    "idefics": "a picture with every text",
    "kosmos-2": "a picture with every text",
    "shieldgemma2": "classifies pictures",
    "voxtral_realtime": "sound with every token",
}


def saved(folder: Path, family: str, **settings: object) -> Path:
    """A checkpoint with a configuration, a tokenizer, and weights that must not be needed; None leaves out a size."""
    sizes = {name: size for name, size in {**_SMALL, **settings}.items() if size is not None}
    AutoConfig.for_model(family, **sizes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.representatives(
    "moshi-draft",
    "rwkv-target",
    "recurrent_gemma-target",
    "xlstm-draft",
    "openai-gpt-target",
    "minimax-draft",
    "cpmant-draft",
    "paligemma-target",
)
def test_models_that_cannot_forget_are_refused_by_name(tmp_path: Path, family: str, role: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    refused, fine = saved(tmp_path / "state", family, **REFUSED[family]), save_model(tmp_path / "fine")
    tables = {"target": {"model": str(fine)}, "draft": {"model": str(fine)}} | {role: {"model": str(refused)}}
    profile = Profile.model_validate(tables)

    with pytest.raises(ModelError, match="cannot take back rejected tokens") as found:
        load_pair(profile)
    assert f"The {role} model" in found.value.message
    assert family in found.value.hint
    problems = diagnose(profile).problems
    assert (problems[0].message, problems[0].hint) == (found.value.message, found.value.hint)


@pytest.mark.parametrize("family", NOT_TEXT_ALONE)
@pytest.mark.representatives("kosmos-2", slow=("idefics", "shieldgemma2", "voxtral_realtime"))
def test_models_that_need_more_than_text_are_refused_by_name(tmp_path: Path, family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=f"cannot write from text alone: .*{NOT_TEXT_ALONE[family]}") as found:
        require_runnable(locate(ModelTable(model=str(tmp_path)), "target"), trust_remote_code=False)
    assert family in found.value.hint


def test_every_family_on_the_lists_is_tried() -> None:
    assert REFUSED.keys() >= CANNOT_GO_BACK.keys()
    assert NOT_TEXT_ALONE.keys() == NEEDS_MORE.keys()


@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_models_with_a_state_load_and_are_diagnosed(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(family, **{**RECURRENT[family], "vocab_size": 258, "eos_token_id": 0})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    profile = Profile.model_validate({"target": {"model": str(tmp_path)}})

    report = diagnose(profile)
    assert report.ready
    heads = 0 if family == "mamba" else 2 * 2 * 8  # keys and values, two heads, one layer that keeps them
    assert report.models[0].cache_per_1k_tokens == 4 * heads * 1000
    with torch.inference_mode():
        rounds = list(decode(load_pair(profile).target, None, (1, 2, 3), 5, Sampling()))
    assert len(rounds) == 5


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"not numbers .*layers\.1\.mlp\.up_proj"):
        load_pair(Profile.model_validate({"target": {"model": str(folder)}}))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("by_numpy", [True, False])
def test_logits_that_are_not_numbers_end_the_record(sampling: Sampling, whole: bool, by_numpy: bool) -> None:
    logits = torch.randn(1, 64)
    logits[0, slice(None) if whole else 5] = torch.nan
    with pytest.raises(RecordError, match="NaN") as found:
        judge(NOTHING, Forward(logits.numpy() if by_numpy else logits), sampling, None)
    assert found.value.kind == "not_a_number"


def test_a_target_that_overflows_is_no_silent_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Slot(EagerPasses(random_model("llama"), 64))
    extend = target.extend

    def overflowing(tokens, keep, *, hidden=False):  # type: ignore[no-untyped-def]
        found = extend(tokens, keep, hidden=hidden)
        if target.length > 8:
            found.logits[-1] = torch.nan
        return found

    monkeypatch.setattr(target, "extend", overflowing)
    with torch.inference_mode(), pytest.raises(RecordError, match="NaN"):
        list(decode(target, None, (1, 2, 3), 20, Sampling()))
