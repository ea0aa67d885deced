"""Configurations of well-known families that say all that is asked of them, so that transformers adds nothing.

A file that says anything else is a matter of transformers, which knows what it means and whether it may be.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.models.files.checkpoint import ITEM_BYTES

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Family:
    """What configurations of a family may leave out.

    Attributes:
        ties: whether the output layer is the embeddings where the file does not say.
        required: keys that the file must have, because transformers has its own numbers for them.
    """

    ties: bool = False
    required: tuple[str, ...] = ("num_key_value_heads",)


FAMILIES = {
    "llama": Family(required=()),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(required=("num_key_value_heads", "head_dim")),
    "gpt_neox": Family(required=()),
    "gemma": Family(ties=True, required=("num_key_value_heads", "head_dim")),
    "gemma2": Family(ties=True, required=("num_key_value_heads", "head_dim", "sliding_window")),
    "gemma3_text": Family(ties=True, required=("num_key_value_heads", "head_dim", "sliding_window")),
}
"""By ``model_type``; full or sliding attention in every layer, and a cache that can be rolled back."""
REQUIRED = (
    *("architectures", "eos_token_id", "hidden_size", "intermediate_size", "max_position_embeddings", "model_type"),
    *("num_attention_heads", "num_hidden_layers", "vocab_size"),
)
DTYPES = ("dtype", "torch_dtype")
ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
ROTATIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
}
"""Numbers that ways to rotate positions must have, by their names."""


def _of(*kinds: type | None) -> Check:
    allowed = tuple(type(None) if kind is None else kind for kind in kinds)
    return lambda value: type(value) in allowed  # a bool is not a number here


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _id(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _ids(value: Any) -> bool:
    return _id(value) or (
        isinstance(value, list) and value != [] and all(type(one) is int and _id(one) for one in value)
    )


def _one_of(names: Collection[str]) -> Check:
    return lambda value: type(value) is str and value in names


def _number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _share(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1


def _rotation(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    if value and all(isinstance(each, dict) for each in value.values()):  # by kinds of layers
        return set(value) <= LAYERS and all(map(_rotation, value.values()))
    rest = dict(value)
    name = rest.pop("rope_type", rest.pop("type", "default"))
    if not isinstance(name, str) or name not in ROTATIONS or "type" in rest:
        return False
    needed, more = {*ROTATIONS[name]}, {"rope_theta", "partial_rotary_factor"}
    return needed <= rest.keys() <= needed | more and all(map(_number, rest.values()))


LAYERS = {"full_attention", "sliding_attention"}
_KEYS: dict[str, Check] = {
    "_name_or_path": _of(str),
    "_sliding_window_pattern": _count,
    "architectures": lambda value: isinstance(value, list) and value != [] and all(type(one) is str for one in value),
    "attention_bias": _of(bool),
    "attention_dropout": _share,
    "attn_logit_softcapping": _of(float, None),
    "bos_token_id": _id,
    "cache_implementation": _one_of(("hybrid",)),
    "classifier_dropout": _share,
    "dtype": _one_of(ITEM_BYTES),
    "eos_token_id": _ids,
    "final_logit_softcapping": _of(float, None),
    "head_dim": _count,
    "hidden_act": _one_of(ACTIVATIONS),
    "hidden_activation": _one_of(ACTIVATIONS),
    "hidden_dropout": _share,
    "hidden_size": _count,
    "initializer_range": _share,
    "intermediate_size": _count,
    "is_decoder": lambda value: value is False,
    "layer_norm_eps": _of(float),
    "layer_types": lambda value: isinstance(value, list) and all(each in LAYERS for each in value),
    "max_position_embeddings": _count,
    "max_window_layers": _of(int),
    "mlp_bias": _of(bool),
    "model_type": _one_of(FAMILIES),
    "num_attention_heads": _count,
    "num_hidden_layers": _count,
    "num_key_value_heads": _count,
    "pad_token_id": _id,
    "pretraining_tp": _of(int),
    "query_pre_attn_scalar": _count,
    "rms_norm_eps": _of(float),
    "rope_local_base_freq": _number,
    "rope_parameters": _rotation,
    "rope_scaling": _rotation,
    "rope_theta": _number,
    "rotary_emb_base": _number,
    "rotary_pct": _share,
    "sliding_window": lambda value: value is None or _count(value),
    "sliding_window_pattern": _count,
    "tie_word_embeddings": _of(bool),
    "torch_dtype": _one_of(ITEM_BYTES),
    "transformers_version": _of(str),
    "use_bidirectional_attention": lambda value: value is None or value is False,
    "use_cache": _of(bool),
    "use_mrope": lambda value: value is False,
    "use_parallel_residual": _of(bool),
    "use_sliding_window": _of(bool),
    "vocab_size": _count,
}
"""What may stand in a file, by key."""
_GENERATION: dict[str, Check] = {
    "_from_model_config": _of(bool),
    "bos_token_id": _id,
    "cache_implementation": _one_of(("hybrid",)),
    "do_sample": _of(bool),
    "eos_token_id": _ids,
    "max_length": _count,
    "max_new_tokens": _count,
    "pad_token_id": _id,
    "repetition_penalty": _number,
    "temperature": _number,
    "top_k": _count,
    "top_p": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "transformers_version": _of(str),
}


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json states everything that transformers would make of it, without a fault."""
    if not _all_known(settings, _KEYS) or not all(key in settings for key in REQUIRED):
        return False
    family = FAMILIES[settings["model_type"]]
    if any(settings.get(key) is None for key in family.required) or all(name in settings for name in DTYPES):
        return False
    heads, hidden, layers = (settings[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    ids = [settings.get(f"{name}_token_id") for name in ("bos", "eos", "pad")]
    known = [one for each in ids for one in (each if isinstance(each, list) else [each]) if one is not None]
    slides = "sliding_attention" in settings.get("layer_types", ())
    return (
        hidden % heads == 0
        and heads % settings.get("num_key_value_heads", heads) == 0
        and len(settings.get("layer_types", range(layers))) == layers
        and not (slides and "sliding_window" not in family.required)
        and all(one < settings["vocab_size"] for one in known)
    )


def is_plain_generation(settings: Mapping[str, Any]) -> bool:
    """Whether a generation_config.json means what it states, without a fault."""
    return _all_known(settings, _GENERATION)


def _all_known(settings: Mapping[str, Any], checks: Mapping[str, Check]) -> bool:
    return all(key in checks and checks[key](value) for key, value in settings.items())
