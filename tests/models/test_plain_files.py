"""What is told of a model by its files alone is what transformers makes of them; else transformers is asked."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from specctl.doctor import diagnosis
from specctl.doctor.diagnosis import diagnose
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.skeleton import load_config, skeleton
from specctl.models.files.tokenizer import KINDS, one_tokenizer
from specctl.models.placing import model_config
from specctl.models.placing.model_config import (
    _GENERATION,
    _KEYS,
    FAMILIES,
    ModelConfig,
    is_plain,
    is_plain_generation,
    require_runnable,
)
from specctl.models.running.text_rules import rules_in, unsupported_in
from specctl.profile import resolve
from specctl.profile.schema import Profile
from tests.support.checkpoints import save_model

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 128}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "llama3", **ROPE},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
    },
    "mistral": {"num_key_value_heads": 2, "rope_theta": 1000000.0, "sliding_window": None, "torch_dtype": "bfloat16"},
    "qwen2": {
        "hidden_act": "silu",
        "max_window_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen3": {"head_dim": 32, "num_key_value_heads": 2, "rope_scaling": None, "tie_word_embeddings": True},
    "gpt_neox": {"hidden_act": "gelu", "rotary_emb_base": 10000, "rotary_pct": 0.25, "torch_dtype": "float16"},
    "gemma": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1, "eos_token_id": [2, 7]},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
    },
    "gemma3_text": {
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 64,
        "sliding_window_pattern": 6,
    },
}
"""As publishers write them, with smaller numbers."""
ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    3,
    1.5,
    True,
    "x",
    "",
    [],
    [2, "x"],
    [1, 400],
    {},
    {"rope_type": "x"},
    {"factor": 2},
)
ODD += (["sliding_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"])
TOKENIZER = Path(resolve("embedded").profile.target.checkpoint) / "tokenizer.json"
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}


def checkpoint(folder: Path, settings: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint(str(folder), "target", None, folder, "folder")


def published(family: str) -> dict[str, Any]:
    return {"architectures": ["SomeForCausalLM"], "model_type": family, **SMALL, **PUBLISHED[family]}


def same_as_transformers(found: Checkpoint) -> bool:
    """Whether it is read without transformers and as that reads it, which raises what loading would raise."""
    require_runnable(found, False)
    config = load_config(found)
    skeleton(found, config=config)
    own, its = ModelConfig.read(found), ModelConfig._of(config)
    return own == replace(its, whole=None, _cached_values=its.cached_values)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_configuration_is_what_transformers_makes_of_it(tmp_path: Path, family: str) -> None:
    first = published(family)
    found = [checkpoint(tmp_path / "published", first)]
    saved = AutoConfig.for_model(family, **SMALL, num_key_value_heads=2, head_dim=16, dtype="bfloat16")
    saved.architectures = ["SomeForCausalLM"]
    saved.save_pretrained(tmp_path / "saved")
    found.append(Checkpoint("saved", "target", None, tmp_path / "saved", "folder"))
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    if not is_plain(settings):  # what it leaves out is not what most models of the family have
        found[1] = checkpoint(tmp_path / "saved", settings | {"num_key_value_heads": 2, "head_dim": 16, **SMALL})
    for each in found:
        assert same_as_transformers(each), each


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "both"])
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_an_extended_context_is_counted_without_transformers_too(tmp_path: Path, kind: str, key: str) -> None:
    told = {"type" if key == "rope_scaling" else "rope_type": kind, "factor": 3.0, "rope_theta": 10000.0}
    settings = {name: value for name, value in published("llama").items() if name != "rope_scaling"}
    settings |= {"rope_parameters": {**told, "factor": 7.0}, "rope_scaling": told} if key == "both" else {key: told}
    assert is_plain(settings)
    found = checkpoint(tmp_path / kind, settings)
    assert same_as_transformers(found)
    assert ModelConfig.read(found).context == 3 * 512


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "qwen2", "gemma2", slow=("mistral", "qwen3", "gpt_neox", "gemma", "gemma3_text"))
def test_an_odd_one_is_left_to_transformers_or_means_the_same(tmp_path: Path, family: str) -> None:
    first = published(family)
    left = 0
    for key in sorted({*_KEYS, "auto_map", "quantization_config", "text_config"}):
        for value in (*ODD, ...):
            settings = {**first, key: value} if value is not ... else {k: v for k, v in first.items() if k != key}
            if not is_plain(settings):
                left += 1
                continue
            found = checkpoint(tmp_path / "odd", settings)
            assert same_as_transformers(found), (key, value)
    assert left > 100


def test_what_a_plain_generation_configuration_says_is_what_transformers_reads() -> None:
    first = {"bos_token_id": 1, "eos_token_id": [2, 7], "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    plain = 0
    for key in sorted({*_GENERATION, "num_beams", "suppress_tokens", "compile_config"}):
        for value in ODD:
            settings = {**first, key: value}
            if not is_plain_generation(settings):
                continue
            plain += 1
            whole = GenerationConfig.from_dict(dict(settings))
            said = type("Said", (), settings)
            assert rules_in(said) == rules_in(whole)
            assert unsupported_in(said) == unsupported_in(whole) == {}
            assert getattr(said, "eos_token_id", None) == whole.eos_token_id
    assert rules_in(type("Said", (), first)) == {"repetition_penalty": 1.05}
    assert plain > 20


def with_tokenizer(folder: Path, family: str, config: Mapping[str, Any], **others: Any) -> Checkpoint:
    found = checkpoint(folder, published(family))
    shutil.copy(TOKENIZER, folder)
    for name, told in {"tokenizer_config": config, **others}.items():
        (folder / f"{name}.json").write_text(json.dumps(told))
    return found


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "with settings": ({"eos_token": {"__type": "AddedToken", "content": "<|end|>"}, "add_bos_token": True}, {}),
    "without a kind": ({"eos_token": {"content": "<|end|>"}}, {}),
    "in a table": ({"extra_special_tokens": {"more": "<|end|>"}}, {}),
    "said twice": ({}, {"special_tokens_map": NAMES}),
    "told apart": ({}, {"special_tokens_map": {**NAMES, "eos_token": "<|begin|>"}}),
    "added to": ({"additional_special_tokens": ["<more>"]}, {}),
    "added by id": ({"added_tokens_decoder": {"4096": {"content": "<more>", "special": True}}}, {}),
    "added in a file": ({}, {"added_tokens": {"<more>": 4096}}),
    "unknown mark": ({"unk_token": "<unk>"}, {}),
    "no end": ({"eos_token": None}, {}),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("kind", [*KINDS, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "NoTokenizer"])
@pytest.mark.representatives(
    "TokenizersBackend-llama", "GemmaTokenizer-gemma2", "Qwen2Tokenizer-qwen2", "PreTrainedTokenizerFast-gpt_neox"
)
def test_a_tokenizer_by_its_files_is_transformers_own(tmp_path: Path, kind: str, family: str) -> None:
    told = set()
    for name, (more, others) in VARIANTS.items():
        config = {"tokenizer_class": kind, "unk_token": "<|end|>", **NAMES, **more}
        found = with_tokenizer(tmp_path / name, family, config, **others)
        if (read := one_tokenizer([found])) is None:
            continue
        told.add(name)
        whole = AutoTokenizer.from_pretrained(found.folder)
        assert (read.get_vocab(), read.eos_token_id) == (whole.get_vocab(), whole.eos_token_id), name
    assert told <= {"usual", "with settings", "said twice"}
    if kind in ("TokenizersBackend", "PreTrainedTokenizerFast") and family != "qwen2":
        assert told == {"usual", "with settings", "said twice"}


def test_two_tokenizers_are_one_where_their_files_make_the_same_ids(tmp_path: Path) -> None:
    config = {"tokenizer_class": "TokenizersBackend", **NAMES}
    first = with_tokenizer(tmp_path / "first", "llama", config)
    second = with_tokenizer(tmp_path / "second", "llama", {**config, "chat_template": "{{ x }}", "model_max_length": 7})
    assert one_tokenizer([first, second]) is not None
    (second.folder / "tokenizer.json").write_text(TOKENIZER.read_text() + " ")
    assert one_tokenizer([first, second]) is None
    other = with_tokenizer(tmp_path / "other", "llama", {**config, "split_special_tokens": True})
    assert one_tokenizer([first, other]) is None
    (other.folder / "tokenizer.json").write_text("{")
    assert one_tokenizer([other]) is None
    (other.folder / "tokenizer_config.json").unlink()
    assert one_tokenizer([other]) is None
    assert one_tokenizer([]) is None


def test_a_diagnosis_by_files_alone_is_that_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (save_model(tmp_path / name) for name in ("target", "draft"))
    own = Profile.model_validate({"target": {"model": str(target)}, "draft": {"model": str(draft)}})
    profiles = [resolve("embedded").profile, own]
    short = [diagnose(profile) for profile in profiles]
    monkeypatch.setattr(model_config, "is_plain", lambda _: False)
    monkeypatch.setattr(model_config, "is_plain_generation", lambda _: False)
    monkeypatch.setattr(diagnosis, "one_tokenizer", lambda _: None)
    for profile, found in zip(profiles, short, strict=True):
        whole = diagnose(profile)
        assert (found.models, found.advice, found.problems) == (whole.models, whole.advice, whole.problems)
        assert found.shared_vocabulary == whole.shared_vocabulary is not None


MARKS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "GPTNeoXTokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "Qwen2Tokenizer": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
"""What publishers name for each kind."""


@pytest.mark.parametrize("kind", MARKS)
def test_tokenizers_as_they_are_published_are_read_by_their_files(tmp_path: Path, kind: str) -> None:
    marks, family = MARKS[kind], {"Llama": "llama", "Gemma": "gemma2", "GPTNeoX": "gpt_neox", "Qwen2": "qwen2"}
    found = checkpoint(tmp_path, published(family[kind.removesuffix("Tokenizer")]))
    specials = dict.fromkeys([*KINDS[kind], *marks.values()])
    words = [*specials, "▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the"]
    core = models.BPE({word: index for index, word in enumerate(words)}, [("▁", "t"), ("h", "e"), ("▁t", "he")])
    made = Tokenizer(core)
    made.add_special_tokens([*specials])
    made.save(str(tmp_path / "tokenizer.json"))
    added = {str(words.index(mark)): {"content": mark, "special": True} for mark in specials}
    config = {"tokenizer_class": kind, "added_tokens_decoder": added, "add_bos_token": False, **marks}
    for told in (config, {key: value for key, value in config.items() if key in ("tokenizer_class", "eos_token")}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
        read, whole = one_tokenizer([found]), AutoTokenizer.from_pretrained(tmp_path)
        assert read is not None
        assert (read.get_vocab(), read.eos_token_id) == (whole.get_vocab(), whole.eos_token_id)
