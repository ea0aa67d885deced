"""How many tokens a model holds is what its passes take, whatever its configuration calls it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specctl.decoding.session import Session
from specctl.doctor.diagnosis import diagnose
from specctl.models.loading.assembly import load_pair
from specctl.models.running.context import ENDLESS, context_length, extended
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.profile.schema import Profile, SamplingTable
from tests.support.checkpoints import llama_config, save_model
from tests.support.toys import generated, random_model

pytestmark = pytest.mark.usefixtures("inference_mode")

MOST = 24
_IDS: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_N = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MOST}
_D = {**_IDS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
_H = {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BOUND: dict[str, dict[str, Any]] = {
    "gpt2": _N,
    "gpt_bigcode": _N,
    "codegen": {**_N, "rotary_dim": 4},
    "gptj": {**_N, "rotary_dim": 4},
    "mpt": {**_IDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": MOST},
    "whisper": {**_D, "max_target_positions": MOST, "suppress_tokens": None, "begin_suppress_tokens": None},
    "bart": {**_D, "max_position_embeddings": MOST, "is_decoder": True, "is_encoder_decoder": False},
    "opt": {**_H, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": MOST},
    "biogpt": {**_H, "max_position_embeddings": MOST},
    "roberta": {**_H, "max_position_embeddings": MOST, "is_decoder": True},
    "bert": {**_H, "max_position_embeddings": MOST, "is_decoder": True},
}
"""Families whose code ends at a place, by ``model_type``; some name it their own way, some tables have further rows."""
FREE: dict[str, dict[str, Any]] = {
    "bloom": {**_IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
}
"""Families without a limit."""


def model_of(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{**BOUND, **FREE}[family])
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # transformers 5.17's
@pytest.mark.parametrize("family", BOUND)
def test_a_model_holds_as_many_tokens_as_it_says_and_no_more(family: str) -> None:
    model = model_of(family)
    runner = Slot(EagerPasses(model, 64))
    assert runner.context == context_length(model) == context_length(model.config) == MOST
    runner.extend([5] * (MOST - 1), keep=0)
    runner.extend([6], keep=1)
    with pytest.raises((IndexError, RuntimeError)):
        runner.extend([7], keep=1)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_no_limit(limit: int) -> None:
    assert context_length(AutoConfig.for_model("llama", max_position_embeddings=limit)) is None


@pytest.mark.parametrize("family", FREE)
def test_without_a_limit_it_goes_on(family: str) -> None:
    model = model_of(family)
    assert context_length(model) is context_length(model.config) is None
    runner = Slot(EagerPasses(model, 64))
    assert runner.context == ENDLESS
    for _ in range(4):
        runner.extend([5] * MOST, keep=1)


def test_rotations_go_on_beyond_the_length_that_a_model_was_trained_with_but_it_is_its_context() -> None:
    assert context_length(random_model("llama")) == context_length(random_model("llama").config) == 256


def test_a_table_that_was_changed_counts_and_not_what_the_configuration_still_says() -> None:
    for rows in (MOST // 2, 2 * MOST):
        model = deepcopy(model_of("gpt2"))
        model.transformer.wpe = nn.Embedding(rows, 32)
        runner = Slot(EagerPasses(model, 64))
        assert runner.context == rows
        runner.extend([5] * rows, keep=1)


def test_a_name_without_a_value_is_no_limit() -> None:
    config = AutoConfig.for_model("mpt", **BOUND["mpt"])
    config.max_position_embeddings = None
    assert context_length(config) == MOST
    config.max_seq_len = -1  # so some say that there is none
    assert context_length(config) is None


def test_a_table_of_pictures_is_none_of_the_texts() -> None:
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **_H, "max_position_embeddings": MOST},
        vision_config={"model_type": "clip_vision_model", **_H, "image_size": 8, "patch_size": 4},
    )
    from transformers import LlavaForConditionalGeneration

    assert context_length(config) == MOST
    assert context_length(LlavaForConditionalGeneration(config)) == MOST


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 8}
EXTENDED: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"rope_type": "default"}, MOST),
    ("llama", {**YARN, "factor": 4.0}, 32),
    ("llama", {"rope_type": "yarn", "factor": 2.5}, 60),  # of the limit, where nothing else is named
    ("llama", {"rope_type": "linear", "factor": 2.5}, 60),
    ("llama", {"rope_type": "dynamic", "factor": 4}, 4 * MOST),
    ("llama", {"type": "dynamic", "factor": 2.0}, 2 * MOST),
    ("llama", {**YARN, "rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, MOST),
    ("llama", {**YARN, "rope_type": "longrope", "factor": 3.0, "short_factor": [1.0], "long_factor": [2.0]}, MOST),
    ("phi3", {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, MOST),
    ("deepseek_v3", {**YARN, "factor": 3.0, "mscale": 1.0, "mscale_all_dim": 1.0}, MOST),
    ("gemma3_text", {"rope_type": "linear", "factor": 8.0}, MOST),
]
"""By family and rotation the tokens that vLLM serves of a model that names 24."""


@pytest.mark.parametrize(("family", "rotation", "most"), EXTENDED)
def test_an_extended_context_ends_where_vllm_ends_it(family: str, rotation: dict[str, Any], most: int) -> None:
    own = {"max_position_embeddings": MOST, "rope_scaling": {**rotation}}
    more = {"original_max_position_embeddings": 8} if family == "phi3" else {}
    assert context_length(AutoConfig.for_model(family, **_H, **own, **more)) == most


@pytest.mark.parametrize(
    ("rotation", "most"),
    [
        ({"full_attention": {**YARN, "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}, 32),
        ({"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": None}, 4 * MOST),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, MOST),
        ({**YARN, "factor": 4.0, "mrope_section": [1, 1, 2]}, 32),
        ({"rope_type": "default", "factor": None}, MOST),
        ({}, MOST),
        (None, MOST),
    ],
)
def test_rotations_by_kind_of_layer_and_of_pictures_are_counted(rotation: dict[str, Any] | None, most: int) -> None:
    assert extended(MOST, rotation, "olmo3") == most


@pytest.mark.parametrize("rotation", [{**YARN, "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}])
def test_a_text_goes_on_to_the_end_of_an_extended_context(rotation: dict[str, Any], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "target", llama_config(max_position_embeddings=8, rope_parameters=rotation))
    table = {"model": str(folder), "device": "cpu"}
    pair = load_pair(Profile.model_validate({"target": table, "engine": "eager"}))
    assert pair.context == 32
    (facts,) = diagnose(Profile.model_validate({"target": table})).models
    assert facts.context == 32
    written = Session(pair, None).generate([65, 66, 67], SamplingTable(max_new_tokens=100))
    said = generated(pair.models[0], (65, 66, 67), 29)
    end = said.index(0) + 1 if 0 in said else 29
    assert list(written.tokens) == said[:end]
