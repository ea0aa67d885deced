"""Models that also read pictures, as models of text: their text model alone is in memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import specctl
from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.files.skeleton import is_wrapper, left_out, text_only_class
from specctl.models.loading.model import load_model, load_tokenizer
from specctl.models.placing.memory import estimate
from specctl.models.placing.model_config import ModelConfig
from specctl.profile.schema import ModelTable
from tests.faults.tiny_families import tiny_model
from tests.support.checkpoints import tiny_tokenizer
from tests.support.invoked import invoke

FAMILIES = ("llava", "qwen2_5_vl", "mistral3", "gemma4")
PROMPT = torch.randint(2, 200, (20,), generator=torch.Generator().manual_seed(1)).tolist()
LENGTH = 12
NOT_TEXT = ("vision", "visual", "audio", "projector", "embed_vision", "embed_audio")
UNKNOWN = "has an architecture this version of transformers does not know|KeyError: 'nosuch'"
WHOLE = ["target.dtype=float32", "prompt.chat=false", "compile=false"]


def saved(folder: Path, family: str) -> Path:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A checkpoint of each family, made when it is asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            return self.setdefault(family, saved(tmp_path_factory.mktemp("wrappers") / family, family))

    return Folders()


def whole(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def generated(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
    return found[0, len(PROMPT) :].tolist()


def written(folder: Path, *more: str, draft: Path | None = None) -> list[int]:
    """What specctl writes, of which a draft wrote some."""
    drafting = {} if draft is None else {"draft": str(draft), "policy": "constant:draft_length=3"}
    dtypes = [*WHOLE, *more, *(["draft.dtype=float32"] if draft else [])]
    done = specctl.load(target=str(folder), overrides=dtypes, **drafting).generate(PROMPT, max_new_tokens=LENGTH)
    assert draft is None or sum(round_.accepted for round_ in done.rounds) > 0
    return list(done.tokens)


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("qwen2_5_vl-eager", slow=("llava", "mistral3", "gemma4", "qwen2_5_vl-static"))
def test_a_wrapper_writes_what_the_whole_model_writes(folders: Mapping[str, Path], family: str, engine: str) -> None:
    folder = folders[family]

    assert written(folder, f"engine={engine}", draft=folder) == generated(whole(folder))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("qwen2_5_vl", slow=("llava", "mistral3", "gemma4"))
def test_only_the_text_model_is_in_memory_and_counted(folders: Mapping[str, Path], family: str) -> None:
    table = ModelTable(model=str(folders[family]), dtype="float32", device="cpu")
    model = load_model(table, role="target").model
    all_weights = whole(folders[family])
    text = all_weights.get_decoder()

    names = [name for name, _ in model.named_parameters()]
    assert names
    assert not [name for name in names if any(part in name for part in NOT_TEXT)]
    held = sum(weight.numel() for weight in model.parameters())
    output = all_weights.get_output_embeddings().weight.numel()
    assert held == sum(weight.numel() for weight in text.parameters()) + output
    assert held < sum(weight.numel() for weight in all_weights.parameters())
    assert estimate(locate(table, "target")).parameters == held
    assert held + left_out(all_weights.config) == sum(weight.numel() for weight in all_weights.parameters())


@pytest.mark.slow
def test_weights_of_other_parts_are_not_read(folders: Mapping[str, Path], tmp_path: Path) -> None:
    folder = saved(tmp_path / "llava", "llava")
    weights = load_file(folder / "model.safetensors")
    spoiled = [name for name in weights if any(part in name for part in NOT_TEXT)]
    assert spoiled
    damaged = {name: torch.full_like(weights[name], torch.nan) for name in spoiled}
    save_file(weights | damaged, folder / "model.safetensors", {"format": "pt"})

    assert written(folder) == generated(whole(folders["llava"]))  # weights that are NaN are refused where they are read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "old"),
    [
        ("llava", {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}),
        ("mistral3", {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}),
        ("qwen2_5_vl", {"model.": "model.language_model."}),
    ],
)
def test_old_and_new_names_of_weights_are_read(
    folders: Mapping[str, Path], tmp_path: Path, family: str, old: dict[str, str]
) -> None:
    """transformers 5 writes the names that these families had before 4.52, and checkpoints since have others."""
    expected = generated(whole(folders[family]))
    weights = load_file(folders[family] / "model.safetensors")
    renamed = {next((new + name.removeprefix(was) for was, new in old.items() if name.startswith(was)), name): weight
               for name, weight in weights.items()}  # fmt: skip
    assert set(renamed) != set(weights)
    folder = saved(tmp_path / family, family)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})

    assert written(folders[family]) == written(folder) == expected


def test_sizes_and_ends_are_the_text_models(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llava", "llava")
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("eos_token_id", None)
    settings["text_config"] |= {"eos_token_id": 7, "max_position_embeddings": 99}
    (folder / "config.json").write_text(json.dumps(settings))
    config = ModelConfig.read(locate(ModelTable(model=str(folder)), "target"))

    assert (config.eos, config.context, config.wraps) == (7, 99, True)
    assert load_model(ModelTable(model=str(folder), device="cpu"), role="target").eos_ids == {7}


@pytest.mark.slow
def test_doctor_counts_the_text_model(folders: Mapping[str, Path]) -> None:
    shown = invoke("doctor", "--target", folders["qwen2_5_vl"], "--set", "target.dtype=float32").stdout

    model = whole(folders["qwen2_5_vl"])
    text = sum(weight.numel() for weight in model.parameters()) - left_out(model.config)
    assert f"parameters: {text:,}" in shown
    assert "Verdict: ready" in shown


def test_a_model_that_reads_its_prompt_both_ways_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "paligemma", "paligemma")

    with pytest.raises(ModelError, match="it reads a prompt in both directions") as caught:
        load_model(ModelTable(model=str(folder)), role="target")
    assert "family paligemma" in caught.value.hint


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["t5gemma2"]().save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="an encoder with a decoder") as caught:
        load_model(ModelTable(model=str(tmp_path)), role="target")
    assert "LLaVA" in caught.value.hint


def test_plain_models_are_no_wrappers() -> None:
    config = CONFIG_MAPPING["llama"]()

    assert not is_wrapper(config)
    assert text_only_class(config) is None
    assert left_out(config) == 0


def test_the_text_model_keeps_the_name_that_renames_weights() -> None:
    config = CONFIG_MAPPING["llava"]()

    made = text_only_class(config)

    assert made is text_only_class(CONFIG_MAPPING["llava"]())
    assert (made.__name__, made.__module__.split(".")[0]) == ("LlavaForConditionalGeneration", "transformers")


@pytest.mark.parametrize("family", ["glmga", "pp_chart2table"])
def test_a_wrapper_may_have_the_class_of_another_family(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    config = CONFIG_MAPPING[family]()

    made = text_only_class(config)

    assert made is not None
    assert made.config_class is not type(config)


@pytest.mark.parametrize("family", ["llama4", "qwen3_5"])
def test_a_class_of_the_decoder_alone_needs_nothing_left_out(family: str) -> None:
    assert text_only_class(CONFIG_MAPPING[family]()) is None


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        ("text_config", None, "the files hold 8"),
        ("text_config", "llama", "cannot make a model from its config.json: Field 'text_config' with value 'llama'"),
        ("text_config", {"model_type": "nosuch"}, UNKNOWN),
        ("text_config", {"model_type": "llama", "vocab_size": None}, "Field 'vocab_size' expected int, got NoneType"),
        ("text_config", {"model_type": "llama", "num_attention_heads": 0}, "ZeroDivisionError: "),
        ("text_config", {"model_type": "bert"}, "AttributeError: .*embed_tokens"),
        ("vision_config", {"model_type": "nosuch"}, UNKNOWN),
        ("vision_config", {"model_type": "clip_vision_model", "num_hidden_layers": "x"}, "'num_hidden_layers'"),
    ],
)
def test_a_damaged_configuration_is_one_short_message(tmp_path: Path, part: str, settings: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", part: settings}))
    save_file({"lm_head.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")

    with pytest.raises(ModelError, match=message) as caught:
        estimate(locate(ModelTable(model=str(tmp_path)), "target"))
    assert "config.json" in caught.value.full_message
    assert len(caught.value.full_message) < 600


def test_the_chat_template_of_a_processor_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llava", "llava")
    table, file = ModelTable(model=str(folder)), folder / "chat_template.json"
    assert load_tokenizer(table).chat_template is None
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))

    assert load_tokenizer(table).chat_template == "{{ messages[0].content }}!"

    file.write_text("{")
    with pytest.raises(ModelError, match=r"damaged chat_template\.json"):
        load_tokenizer(table)
