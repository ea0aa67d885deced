"""A tiny random model of every family of transformers that writes text, of text alone or of pictures and sound too.

A family is a ``model_type``; a name with a comma behind it, such as ``gemma4_text,moe``, is a variant with settings of
its own. Models have one or two layers of every kind that the family has, and windows that tests can fill.
"""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.support.recurrent_models import FAMILIES as RECURRENT

VOCABULARY, WIDTH, WINDOW, PLACES = 258, 64, 8, 512
LARGEST = 60_000_000
"""Weights of a model that is still tried: some configurations do not let all of their sizes be set."""
ENDS = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 1}
UNUSED = range(200, VOCABULARY)
"""Ids for pictures and the like, which prompts leave out."""

_LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
_HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
_NAMED: dict[int, str] = {
    WIDTH: "hidden_size d_model n_embd embedding_size attention_hidden_size",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff block_ff_dim ffn_hidden_size "
    "dense_intermediate_size shared_intermediate_size",
    2: f"{_LAYERS} num_decoder_layers num_encoder_layers num_experts_per_tok moe_k moe_topk top_k_experts",
    4: f"{_HEADS} num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts",
    PLACES: "max_position_embeddings n_positions max_seq_len max_target_positions max_sequence_length",
    16: "head_dim q_lora_rank kv_lora_rank v_head_dim index_head_dim",
    WINDOW: "sliding_window attention_chunk_size index_topk qk_rope_head_dim qk_nope_head_dim rotary_dim "
    "hidden_size_per_layer_input",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size index_n_heads",
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMED.items() for name in names.split()}
SIZES |= {**ENDS, "tie_word_embeddings": False, "is_decoder": True}
"""What a text decoder's configuration is given of these, where it knows the name."""
_ENCODER: dict[int, str] = {
    32: "hidden_size embed_dim d_model hidden_dim intermediate_size mlp_dim encoder_ffn_dim ffn_dim",
    2: f"{_LAYERS} depth {_HEADS} num_key_value_heads",
    16: "head_dim",
    WIDTH: "out_hidden_size output_dim vision_output_dim projection_dim text_hidden_size",
}
ENCODER: dict[str, Any] = {name: size for size, names in _ENCODER.items() for name in names.split()}
"""The same for encoders of pictures and sound."""

BOTH, WINDOWS = ["linear_attention", "full_attention"], ["sliding_attention", "full_attention"]
_PLAIN: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4}
_PLAIN |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": PLACES}
_PLAIN |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
_TWO = {**_PLAIN, "num_hidden_layers": 2}
_OLD = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": 4, "max_position_embeddings": PLACES}
_OLD |= {"num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": PLACES}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 0, "tie_word_embeddings": False}
_GEMMA3N = {**_PLAIN, "num_hidden_layers": 4, "layer_types": WINDOWS * 2, "num_kv_shared_layers": 2, "head_dim": 16}
_GEMMA3N |= {"sliding_window": WINDOW, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_GEMMA3N |= {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}
_GEMMA4 = {**_PLAIN, "num_hidden_layers": 4, "layer_types": WINDOWS * 2, "sliding_window": WINDOW, "head_dim": 16}
_GEMMA4 |= {"global_head_dim": 32}
_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 2}
_NO_INPUTS = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_ASSISTANT = {**_NO_INPUTS, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4, "model_type": "gemma4_text"}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
_DOTS3 = {**_PLAIN, **_LATENT, **_EXPERTS, "num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": WINDOW}
_DOTS3 |= {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "head_dim": 16}
_DOTS3 |= {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 32, "shared_experts_intermediate_size": 32}
_DOTS3 |= {f"swa_{name}": size for name, size in _LATENT.items()} | {"swa_head_dim": 16}
_DOTS3 |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2}
_DORY = {**_PLAIN, "num_hidden_layers": 4, "layer_types": [*WINDOWS[:1] * 2, *WINDOWS[1:] * 2], "head_dim": 16}
_DORY |= {"sliding_window": WINDOW, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
_DORY |= {"n_recurrent_loops": 2}
_FULL = {"layer_types": ["full_attention"] * 4}
_DBRX = {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": PLACES, "vocab_size": VOCABULARY, **ENDS}
_DBRX |= {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}}
_DBRX |= {"ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}
_REFORMER = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": 4, "attention_head_size": 16}
_REFORMER |= {"feed_forward_size": 96, "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "is_decoder": True}
_REFORMER |= {"max_position_embeddings": PLACES, "lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16}
_REFORMER |= {"num_buckets": 4, "hash_seed": 0, "eos_token_id": 0}


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **settings}}


_AXES_ALONE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_AXES = _rope(mrope_section=[2, 3, 3])
_MIXED_AXES = _rope(mrope_section=[2, 3, 3], mrope_interleaved=True)

WHOLE: dict[str, dict[str, Any]] = {
    **{family: {**settings, "vocab_size": VOCABULARY} for family, settings in RECURRENT.items()},
    "cwm": {**_TWO, "head_dim": 16, "sliding_window": WINDOW},
    "dbrx": _DBRX,
    "dory": _DORY,
    "dory,full": {**_DORY, **_FULL},
    "dory,last_loop": {**_DORY, "recurrent_kv_cache_mode": "last_loop"},
    "dots1": {**_TWO, **_EXPERTS, "head_dim": 16, "n_group": 1, "topk_group": 1},
    "dots3_note_text": _DOTS3,
    "falcon": _OLD,
    "falcon,alibi": {**_OLD, "alibi": True, "multi_query": False, "parallel_attn": False},
    "falcon,new": {**_OLD, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma3_text,bidirectional": {**_TWO, "layer_types": WINDOWS, "sliding_window": WINDOW, "head_dim": 16}
    | {"use_bidirectional_attention": True},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": {**_GEMMA4, **_INPUTS},
    "gemma4_text,bidirectional": {**_GEMMA4, **_NO_INPUTS, "use_bidirectional_attention": "all"},
    "gemma4_text,dense": {**_GEMMA4, **_NO_INPUTS},
    "gemma4_text,k_eq_v": {**_GEMMA4, **_NO_INPUTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text,moe": {**_GEMMA4, **_NO_INPUTS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 32},
    "gemma4_unified_text": _GEMMA4,
    "gemma4_assistant": {"text_config": {**_GEMMA4, **_ASSISTANT}}
    | {"backbone_hidden_size": WIDTH, "num_centroids": 16, "centroid_intermediate_top_k": 4},
    "git": {
        **_OLD,
        "intermediate_size": 96,
        "vision_config": {"hidden_size": 32, "intermediate_size": 32}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
    },
    "gpt2,short": {**_GPT2, "n_positions": 128},
    "gpt_bigcode,mha": {**_GPT2, "multi_query": False},
    "gpt_neo": {**_OLD, "num_layers": 2, "num_heads": 4, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], 1]]},
    "llama,linear": {**_TWO, **_rope(rope_type="linear", factor=4.0)},
    "llama,llama3": {
        **_TWO,
        **_rope(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
        | {"original_max_position_embeddings": 16},
    },
    "llama,yarn": {**_TWO, **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=PLACES // 4)},
    "mistral,window": {**_TWO, "sliding_window": WINDOW, "head_dim": 16},
    "modernbert-decoder": {
        **_OLD,
        "intermediate_size": 96,
        "local_attention": 16,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "mpt": {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": PLACES, "vocab_size": VOCABULARY, **ENDS}
    | {"tie_word_embeddings": False},
    "opt,post-norm": {**_OLD, "word_embed_proj_dim": 32, "ffn_dim": 96, "do_layer_norm_before": False},
    "prophetnet": {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_decoder_layers": 2, "num_encoder_layers": 1}
    | {"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 96, "is_decoder": True}
    | {"encoder_ffn_dim": 96, "is_encoder_decoder": False, **ENDS},
    "qwen2,window": {**_TWO, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "recurrent_gemma": {**_OLD, "intermediate_size": 96, "num_hidden_layers": 3, "lru_width": WIDTH}
    | {"attention_window_size": WINDOW},
    "reformer": _REFORMER,
    "xlnet": {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 96, **ENDS},
    "xmod": {**_OLD, "intermediate_size": 96, "is_decoder": True, "default_language": "en_XX"},
}
"""All settings of families whose sizes depend on each other. A wrapper's decoder has its own ``model_type``."""
for _family in ("bert", "roberta"):
    WHOLE[f"{_family},encoder"] = {**_OLD, "intermediate_size": 96}

_HY = {"num_hidden_layers": 3, "layer_types": ["indexed_attention"] * 3, "indexer_types": ["full", "shared", "full"]}
_HY |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
MORE: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 8},
    "chameleon": {"vocabulary_map": {"<image>": 201}},
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": dict.fromkeys(WINDOWS, _AXES["rope_parameters"]),
    },
    "cosmos3_edge_text": _MIXED_AXES,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": {"head_dim": 8},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": WIDTH},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 32, "adapter_out_dim": WIDTH},
    "doge": {"keep_window_size": 8, "sliding_window": None},
    "gemma4": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "global_head_dim": 16}
    },
    "emu3": {"vocabulary_map": {"<image>": 201, "<|extra_200|>": 202, "<|visual token 000000|>": 203}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **_rope(mrope_section=[3, 3, 2])},
    "emu3_vqgan": {"base_channels": 32},
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0, "linear_head_dim": 16, "linear_num_heads": 4}
    | {"num_key_value_heads": 4, "layer_types": ["linear_attention", "indexed_attention"], "head_dim": None},
    "hrm_text": {"H_cycles": 2, "L_cycles": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "hunyuan_vl_text": _rope(mrope_section=[2, 2, 2, 2]),
    "hy_v4": _HY,
    "hy_v4_vl_text": {**_HY, **_rope(mrope_section=[2, 1, 1]), "num_key_value_heads": 4},
    "janus_vqgan": {"base_channels": 32},
    "kosmos_2_text_model": {"layers": 2, "embed_dim": WIDTH, "ffn_dim": 96, "attention_heads": 4},
    "kosmos_2_5_text_model": {"layers": 2, "embed_dim": WIDTH, "ffn_dim": 96, "attention_heads": 4},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "num_hidden_layers": None, "zero_expert_num": 2},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_vision": {"num_hidden_layers": 4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 205, "vision_end_token_id": 206},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 205, "vision_end_token_id": 206},
    "qwen3_omni_moe_text": {**_MIXED_AXES, "sliding_window": None},
    "qwen3_vl_moe_text": {**_MIXED_AXES, "sliding_window": None},
    "qwen3_vl_text": _MIXED_AXES,
    "xlm": {"emb_dim": WIDTH},
    "youtu": {"head_dim": 8},
}
"""Settings beside `SIZES`; None leaves one of those out. Of a wrapper's decoder, by the decoder's ``model_type``."""
for _family in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"):
    MORE[_family] = _AXES
for _family in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text"):
    MORE[_family] = _rope(mrope_section=[2, 3, 3], partial_rotary_factor=1.0)


def families() -> list[str]:
    """The names of all."""
    known = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    known |= {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **dict.fromkeys([*WHOLE, *MORE])}
    return sorted(name for name in known if name.partition(",")[0] in CONFIG_MAPPING and class_of(name) is not None)


def class_of(family: str) -> Any:
    """transformers' own class for it; None if it makes none, as of a wrapper's decoder alone."""
    config = CONFIG_MAPPING[family.partition(",")[0]]
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    found = next((known for each in mappings if (known := each.get(config, None)) is not None), None)
    return found[0] if isinstance(found, tuple) else found


def tiny_config(family: str, key_value_heads: int) -> Any:
    """A small configuration."""
    kind = CONFIG_MAPPING[family.partition(",")[0]]
    if family in WHOLE:
        return kind(**WHOLE[family])
    default = kind()
    if not getattr(kind, "sub_configs", None):
        return kind(**_decoder(default, family, key_value_heads))
    return _wrapper(default, default.get_text_config(decoder=True), key_value_heads)


def _decoder(default: Any, family: str, key_value_heads: int) -> dict[str, Any]:
    """Settings of a text decoder."""
    if family in WHOLE:
        return WHOLE[family]
    more = MORE.get(family, {})
    wanted = {**SIZES, "num_key_value_heads": key_value_heads, **more}
    if _knows(default, "kv_lora_rank"):
        wanted["num_key_value_heads"] = more.get("num_key_value_heads", 4)  # as many as there are heads
    settings = {name: value for name, value in wanted.items() if name in more or _knows(default, name)}
    settings = {name: value for name, value in settings.items() if value is not None}
    depth = settings.get("num_hidden_layers", settings.get("num_layers", 2))
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = None if name in more or not _knows(default, name) else getattr(default, name, None)
        if isinstance(kinds, list | tuple) and kinds:
            each = list(dict.fromkeys(kinds))
            if name != "mlp_layer_types" and len(each) > depth:
                settings["num_hidden_layers"] = depth = len(each)
            settings[name] = [each[layer % len(each)] for layer in range(depth)]
    return settings


def _knows(config: Any, name: str) -> bool:
    """Whether a configuration has a setting that can be set."""
    own = getattr(type(config), name, None)
    if name in (getattr(type(config), "attribute_map", None) or {}) or (isinstance(own, property) and own.fset is None):
        return False
    try:
        return hasattr(config, name)
    except RuntimeError:  # it differs between layers
        return True


def _wrapper(default: Any, text: Any, key_value_heads: int) -> Any:
    """A wrapper's configuration with a tiny text decoder and tiny encoders."""
    kind, settings = type(default), _decoder(default, default.model_type, key_value_heads) if default is text else {}
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if part is None:
            continue
        if part is text or (name == "text_config" and _knows(part, "vocab_size")):
            made = type(part)(**_decoder(part, part.model_type, key_value_heads))
        elif getattr(type(part), "sub_configs", None):
            made = _wrapper(part, text, key_value_heads)
        elif _knows(part, "vocab_size") and _knows(part, "num_hidden_layers"):
            made = type(part)(**_decoder(part, part.model_type, key_value_heads))
        else:
            sizes = {
                key: size for key, size in ENCODER.items() if _knows(part, key) and type(getattr(part, key)) is int
            }
            made = type(part)(**{**sizes, **MORE.get(part.model_type, {})})
        settings[name] = made.to_dict()
    named = getattr(kind, "__dataclass_fields__", {})
    own = {**ENDS, "tie_word_embeddings": False, "vocab_size": VOCABULARY, "hidden_size": WIDTH}
    settings |= {name: value for name, value in own.items() if name in named}
    unused = iter(UNUSED)
    for name in named:
        value = getattr(default, name, None)
        if name not in settings and name.endswith(("_token_id", "_token_index", "_id")) and type(value) is int:
            settings[name] = next(unused)
    return kind(**{**settings, **MORE.get(default.model_type, {})})


def tiny_model(family: str) -> PreTrainedModel:
    """A random float32 model, one that can read a text if there is one; raises what transformers raises if not."""
    failure: Exception | None = None
    made: PreTrainedModel | None = None
    for key_value_heads in (2, 4):
        try:
            config = tiny_config(family, key_value_heads)
            torch.manual_seed(0)
            model: PreTrainedModel = class_of(family)(config)
            if sum(weight.numel() for weight in model.parameters()) > LARGEST:
                raise ValueError("its sizes cannot all be set")
            made = drawn(model.float().eval())
            with torch.inference_mode():
                made(input_ids=torch.randint(2, 200, (1, 24)))
        except TimeoutError:
            raise
        except Exception as error:
            failure = error
        else:
            return made
    if made is None:
        assert failure is not None
        raise failure
    return made


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with random weights that let a token's logits follow from the whole text."""
    draws = torch.Generator().manual_seed(0)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    last = id(getattr(output, "weight", None))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point() or any(part in name for part in STATES):
                continue  # a state's decay and steps have values of their own
            noise = torch.randn(weight.shape, generator=draws)
            if id(weight) in tables:
                weight.copy_(0.7 * noise)
            elif weight.ndim > 1:
                weight.copy_((3.0 if id(weight) == last else 1.8) / math.sqrt(weight.shape[-1]) * noise)
            else:
                weight.add_(0.1 * noise)
    return model


STATES = ("A_log", "dt_bias", "dt_proj", "x_proj", "conv1d", ".D", "time_", "altup", "laurel", "inv_freq")
"""Parts of names of weights that keep what transformers gives them."""


def noisy(model: PreTrainedModel, share: float = 0.03) -> PreTrainedModel:
    """A copy whose matrices have noise of this share of their spread: it agrees with the model often, not always."""
    copy, draws = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.is_floating_point() and weight.ndim > 1:
                weight.add_(share * weight.std() * torch.randn(weight.shape, generator=draws))
    return copy


def built(family: str) -> PreTrainedModel | tuple[str, str]:
    """A tiny model of a family; else ``not built``, and why."""
    try:
        return tiny_model(family)
    except TimeoutError:
        raise
    except Exception as error:
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
