"""A model's configuration, read before the model is built, and whether specctl can run it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import GENERATION, ITEM_BYTES, Checkpoint
from specctl.models.files.library_calls import explain, explained, hushed
from specctl.models.files.skeleton import is_wrapper, known_class, load_config, text_only_class
from specctl.models.passes.layer_sizes import cached_values
from specctl.models.running.text_rules import unsupported_in

if TYPE_CHECKING:
    from transformers import GenerationConfig

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Family:
    """Keys that a family's configuration may omit."""

    ties: bool = False  # the default for tied embeddings
    # required keys, because transformers has its own defaults for them
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
"""By ``model_type``. These families have full or sliding attention in every layer, and a cache with rollback."""
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
"""Required numbers, by type of rotary embedding."""


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
"""A check of the value, by key; a file with other keys is not plain."""
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
    """Whether a config.json is free of faults and complete without transformers' defaults."""
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
    """Whether a generation_config.json is free of faults and has its literal meaning."""
    return _all_known(settings, _GENERATION)


def _all_known(settings: Mapping[str, Any], checks: Mapping[str, Check]) -> bool:
    return all(key in checks and checks[key](value) for key, value in settings.items())


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parts of a checkpoint's configuration needed before the model is built."""

    whole: Any  # transformers' configuration; None for a well-known family, which does not need it
    architecture: str  # the class it names, else its family
    context: int | None  # the longest sequence in tokens; None for no limit
    vocabulary: int  # rows of its embeddings
    hidden_size: int  # width of its states
    ties: bool  # whether the output layer is the embeddings
    eos: int | list[int] | None  # its ``eos_token_id``
    dtype: str | None  # of its weights; None where it names none
    quantised: bool  # whether its weights are packed
    wraps: bool = False  # whether it wraps a text decoder; only the decoder is loaded
    _cached_values: int | None = None

    @property
    def cached_values(self) -> int:
        """See `cached_values`; only of a model that can run."""
        return cached_values(self.whole) if self._cached_values is None else self._cached_values

    @classmethod
    def read(cls, checkpoint: Checkpoint, trust_remote_code: bool = False) -> "ModelConfig":
        """Read a checkpoint's configuration, without transformers for well-known families.

        Raises ModelError where its config.json is damaged, or describes a model that transformers does not know.
        """
        settings = checkpoint.settings()
        if is_plain(settings):
            return cls._of_file(settings)
        config = load_config(checkpoint, trust_remote_code)
        with explained(
            checkpoint.role, checkpoint.name, by_config=True
        ):  # configurations of new families may lack attributes
            return cls._of(config)

    @classmethod
    def _of_file(cls, settings: dict[str, Any]) -> "ModelConfig":
        """From the contents of a plain config.json."""
        from specctl.models.running.context import extended

        heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
        rotation = settings.get("rope_scaling") or settings.get("rope_parameters")
        head_size = settings.get("head_dim", hidden // heads)
        return cls(
            whole=None,
            architecture=", ".join(settings["architectures"]),
            context=extended(settings["max_position_embeddings"], rotation, settings["model_type"]),
            vocabulary=settings["vocab_size"],
            hidden_size=hidden,
            ties=settings.get("tie_word_embeddings", FAMILIES[settings["model_type"]].ties),
            eos=settings["eos_token_id"],
            dtype=settings.get("dtype", settings.get("torch_dtype")),
            quantised=False,
            _cached_values=2 * settings["num_hidden_layers"] * settings.get("num_key_value_heads", heads) * head_size,
        )

    @classmethod
    def _of(cls, config: Any) -> "ModelConfig":
        """From transformers' configuration."""
        from specctl.models.running.context import context_length

        text = config.get_text_config(decoder=True)
        if getattr(text, "vocab_size", None) is None:
            raise ValueError("Unrecognized configuration class")  # transformers' words for models without text output
        ends = config if text_only_class(config) is not None else text
        return cls(
            whole=config,
            architecture=", ".join(getattr(config, "architectures", None) or []) or config.model_type,
            context=context_length(config),
            vocabulary=text.vocab_size,
            hidden_size=text.hidden_size,
            ties=bool(getattr(ends, "tie_word_embeddings", False)),
            eos=_either(config, text, "eos_token_id"),
            dtype=str(_either(config, text, "dtype") or "").removeprefix("torch.") or None,
            quantised=_either(config, text, "quantization_config") is not None,
            wraps=is_wrapper(config),
        )


def _either(config: Any, text: Any, name: str) -> Any:
    """A setting of the whole model, else of its text decoder."""
    found = getattr(config, name, None)
    return getattr(text, name, None) if found is None else found


NEEDS_MORE = {
    "idefics": "it needs a picture with every text",
    "kosmos-2": "it needs a picture with every text",
    "shieldgemma2": "it classifies pictures, and transformers reads its weights for nothing else",
    "voxtral_realtime": "it needs sound with every token",
}
"""Why a family's class in transformers does not run on text alone, by ``model_type``."""


def require_runnable(checkpoint: Checkpoint, trust_remote_code: bool) -> None:
    """Raise a ModelError if a model has no decoder that writes text, or cannot take back rejected tokens.

    Its weights are not needed. ``trust_remote_code`` is whether code from its repository may run.
    """
    from specctl.models.passes.cache import cannot_go_back

    config = load_config(checkpoint, trust_remote_code)
    known = known_class(config)
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if known is None and not (remote and trust_remote_code):
        text = "trust_remote_code" if remote else "Unrecognized configuration class"
        raise explain(ValueError(text), checkpoint.role, checkpoint.name)
    lacks, why = "write from text alone", NEEDS_MORE.get(config.model_type)
    if known is not None and is_wrapper(config) and config.is_encoder_decoder:
        why = "it is an encoder with a decoder, and what it writes depends on what the encoder is given"
    if why is None:
        lacks, why = "take back rejected tokens", cannot_go_back(config, known)
    if why is not None:
        raise ModelError(
            f"{checkpoint} cannot {lacks}: {why}.",
            f"Models of the family {config.model_type} can be neither target nor draft; take one of another family, "
            "such as Llama, Qwen, Gemma, Mistral, Pythia or LLaVA.",
        )


def generation_config(checkpoint: Checkpoint) -> "GenerationConfig | SimpleNamespace | None":
    """The contents of a checkpoint's generation_config.json, without transformers for plain ones; None if there is no
    file.

    Raises ModelError if it is damaged: transformers would ignore the file, and so its end-of-sequence ids.
    """
    settings = checkpoint.generation_settings()
    if settings is None:
        return None
    if is_plain_generation(settings):
        return SimpleNamespace(**settings)
    from transformers import GenerationConfig

    try:
        with hushed():
            return GenerationConfig.from_dict(settings)
    except Exception as error:
        raise ModelError(
            f"{checkpoint} has a damaged {GENERATION}: {' '.join(str(error).split()).rstrip('.')}.",
            f"Copy or download {checkpoint.folder / GENERATION} again.",
        ) from error


def require_supported_rules(checkpoint: Checkpoint) -> None:
    """Raise a ModelError if a target's generation_config.json changes its text in a way that cannot be verified."""
    config = generation_config(checkpoint)
    for setting, why in unsupported_in(config).items() if config is not None else ():
        raise ModelError(
            f"{checkpoint}: its generation_config.json sets {setting}, which cannot be followed: {why}.",
            "To leave out the rules in that file, set generation_config = false at the top of the profile.",
        )
