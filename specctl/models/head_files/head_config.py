"""Reading a draft head's configuration so that no key of it is overlooked."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from transformers.activations import ACT2FN

from specctl.errors import ModelError
from specctl.models.draft_heads.head_layers import LayerShape

Value = TypeVar("Value", bool, int, float, str)

ROPE_THETA = 10000.0
"""What transformers' Llama and the code of EAGLE and GliDe use where a configuration has none."""

BOOKKEEPING = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "name_or_path", "torch_dtype"),
        *("transformers_version", "use_cache"),
        # Ids that only a tokenizer or a generation loop uses.
        *("bos_token_id", "eos_token_id", "pad_token_id"),
        # Initialisation and regularisation of training, and how a matrix was split between devices.
        *("attention_dropout", "initializer_range", "pretraining_tp"),
        # The file holds the output layer or does not.
        "tie_word_embeddings",
        # Windows, which `layer_types` and `use_sliding_window` turn on.
        *("max_window_layers", "sliding_window"),
    }
)
"""Keys of transformers' configurations that say nothing about how a network computes."""

_ROPE = frozenset(
    {
        *("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    }
)
_SAME_IN_TEXT = frozenset({"mrope_section", "mrope_interleaved"})
"""How positions in time, height and width share a head: in text all three are the same position."""


class HeadConfig:
    """A table of a config.json whose keys are taken one by one; those left over are refused.

    A key with the value null counts as absent.

    Args:
        values: the table.
        subject: the draft head, for messages, such as ``The draft head 'a/b'``.
        path: of the table in the file, with a dot at its end; empty for the whole file.
    """

    def __init__(self, values: Mapping[str, Any], subject: str, path: str = "") -> None:
        self.subject = subject
        self._path = path
        self._left = {key: value for key, value in values.items() if value is not None}

    def take(self, key: str, kind: type[Value], default: Value | None = None, *, least: int = 1) -> Value:
        """A value of a type, ``default`` where absent.

        Raises:
            ModelError: it is of another type, or absent without a default, or a whole number below ``least``.
        """
        value = self._left.pop(key, default)
        if value is None:
            raise ModelError(f"{self.subject}: its config.json has no {self._path}{key}.")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (type(value) is int and value < least):
            whole = f"a whole number above {least - 1}"
            raise self.wrong(key, value, {bool: "true or false", int: whole, float: "a number", str: "a text"}[kind])
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there and was not taken."""
        return key in self._left

    def ids(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where absent or empty."""
        value = self._left.pop(key, None)
        if value is not None and not (isinstance(value, list) and all(type(entry) is int for entry in value)):
            raise self.wrong(key, value, "a list of whole numbers")
        return tuple(value) if value else None

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty where absent."""
        value = self._left.pop(key, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            raise self.wrong(key, value, "a list of texts")
        return tuple(value or ())

    def mapping(self, key: str) -> dict[str, Any]:
        """What a table within this one holds, but for nulls; empty where absent."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return {name: entry for name, entry in (value or {}).items() if entry is not None}

    def table(self, key: str) -> "HeadConfig":
        """A table within this one; empty where absent."""
        return HeadConfig(self.mapping(key), self.subject, f"{self._path}{key}.")

    def drop(self, keys: Collection[str]) -> None:
        """Take keys that say nothing about the network."""
        for key in keys:
            self._left.pop(key, None)

    def demand(self, key: str, allowed: Collection[Any]) -> None:
        """Take a key that may be absent, or have one of the values with which the network is the ordinary one."""
        value = self._left.pop(key, None)
        if value is not None and value not in allowed:
            raise self.wrong(key, value, " or ".join(repr(each) for each in allowed))

    def refuse_rest(self) -> None:
        """Raise a ModelError that names the keys left over."""
        if self._left:
            names = ", ".join(f"{self._path}{key} = {value!r}" for key, value in sorted(self._left.items()))
            raise ModelError(
                f"{self.subject}: its config.json has keys that specctl does not know: {names}.",
                "They may change how the head computes, so it is not loaded.",
            )

    def wrong(self, key: str, value: object, wanted: str) -> ModelError:
        """The error for a key whose value is not what is wanted."""
        return ModelError(f"{self.subject}: {self._path}{key} in its config.json is {value!r}, not {wanted}.")


def layer_windows(config: HeadConfig, count: int) -> tuple[int, ...]:
    """Take the keys of sliding windows: that of each of ``count`` layers, 0 where it sees the whole text.

    Raises:
        ModelError: a layer is of another kind, or has a window whose size is not told or that is not in use.
    """
    types = config.texts("layer_types")
    window = config.take("sliding_window", int, 0, least=0)
    said = config.take("use_sliding_window", bool, False)
    used = said or config.take("model_type", str, "qwen3") != "qwen3"  # only Qwen3's configuration has the switch
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.wrong("layer_types", kind, "full_attention or sliding_attention")
    sliding = [kind == "sliding_attention" for kind in types] or [False] * count
    if len(sliding) != count:
        raise config.wrong("layer_types", list(types), f"of {count} layers")
    if any(sliding) and not (used and window):
        raise config.wrong("layer_types", list(types), "full_attention where no sliding_window is set and in use")
    if said and not types:
        raise config.wrong("use_sliding_window", said, "false where layer_types does not say which layers have one")
    return tuple(window if slides else 0 for slides in sliding)


def layer_shape(config: HeadConfig, *, qk_norm: bool, rope_theta: float | None = None) -> LayerShape:
    """Take the keys of decoder layers in the style of Llama and Qwen3.

    Args:
        config: the table that they are in.
        qk_norm: whether queries and keys are normed, which no key says.
        rope_theta: where the file has none; None if it must have one.

    Raises:
        ModelError: a key is missing, wrong, or asks for layers of another kind.
    """
    for kind in config.texts("layer_types"):
        if kind != "full_attention":
            raise config.wrong("layer_types", kind, "full_attention for every layer")
    config.demand("use_sliding_window", (False,))
    hidden, heads = config.take("hidden_size", int), config.take("num_attention_heads", int)
    kv_heads = config.take("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    biased = config.take("attention_bias", bool, False)
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=config.take("intermediate_size", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.take("head_dim", int, hidden // heads),
        norm_eps=config.take("rms_norm_eps", float, 1e-6),
        activation=_activation(config),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=config.take("mlp_bias", bool, False),
        qk_norm=qk_norm,
        rope=_rope(config, rope_theta),
        max_positions=config.take("max_position_embeddings", int, 2048),
    )


def transformer_table(shape: LayerShape, vocabulary: int, num_layers: int) -> dict[str, Any]:
    """What `layer_shape` reads, with the keys that go with it in transformers' configurations."""
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": dict(shape.rope),
        "tie_word_embeddings": False,
    }


def _activation(config: HeadConfig) -> str:
    name = config.take("hidden_act", str, "silu")
    if name not in ACT2FN:
        raise config.wrong("hidden_act", name, "an activation that transformers knows")
    return name


def _rope(config: HeadConfig, theta: float | None) -> dict[str, Any]:
    """``rope_parameters``, from transformers 5's key or from ``rope_theta`` and ``rope_scaling`` as before."""
    outside = config.mapping("rope_scaling") | config.mapping("rope_parameters")
    found = {key: value for key, value in outside.items() if key not in _SAME_IN_TEXT}
    kind = found.pop("type", "default")
    found.setdefault("rope_type", "default" if kind == "mrope" else kind)
    if "rope_theta" in found:
        config.drop(["rope_theta"])
    else:
        found["rope_theta"] = config.take("rope_theta", float, theta)
    if found.pop("partial_rotary_factor", 1.0) != 1.0:
        raise config.wrong("partial_rotary_factor", outside["partial_rotary_factor"], "1.0")
    if unknown := sorted(found.keys() - _ROPE):
        raise config.wrong("rope_parameters", outside, f"free of {', '.join(unknown)}, which specctl does not know")
    return found
