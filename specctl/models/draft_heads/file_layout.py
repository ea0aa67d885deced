"""The files of draft heads: config.json key by key, tensors by name, the fit to the verifier, and writing them."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.draft_heads.kinds import HEAD_KINDS
from specctl.models.running.context import context_length
from specctl.outputs import naming, write_whole

VERSION = "0.9.0"  # The version of speculators whose layout is written
AHEAD = 3  # How many tokens to draft at a time where neither the head nor anything else decides


@dataclass(frozen=True, slots=True)
class Verifier:
    """The model that a head drafts for, as its file describes it."""

    name: str  # its hub id or path
    architectures: tuple[str, ...] = ()  # as in its config.json
    # the configuration of its decoder, which describes an MTP head's layer
    layers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, model: "PreTrainedModel") -> "Verifier":
        """For a loaded model."""
        named = model.config.architectures or [type(model).__name__]
        return cls(name, tuple(named), model.config.get_text_config(decoder=True).to_dict())


def write_head(folder: Path, head: ChainHead | BlockHead, verifier: Verifier) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    Weights borrowed from the verifier are not written.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.
        verifier: the model that it drafts for.

    Raises:
        ValueError: the layout cannot describe the head.
        OutputError: a file cannot be written.
    """
    config, weights = described(head, verifier)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    write_whole(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def described(head: ChainHead | BlockHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The whole of a head's config.json, and the tensors of its file; see `write_head`."""
    row = HEAD_KINDS[head.kind]
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    config, weights = row.module.describe(head, verifier)
    if head.tokens is not None:
        ids = head.tokens.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(head.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    if row.speculators:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": head.longest or AHEAD,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config["speculators_model_type"] = row.kind
        config["speculators_version"] = VERSION
        config["speculators_config"] = {
            "algorithm": row.kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        }
    config["dtype"] = str(next(head.parameters()).dtype).removeprefix("torch.")
    return config, weights


Network = TypeVar("Network", bound=nn.Module)

ANEW = "Copy or download it again; if it is whole, it is of a layout that specctl does not know."

NOT_THE_HEADS = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})
"""Copies of the verifier's weights that speculators' trainer needs."""


def published_names(head: nn.Module, prefixes: Mapping[str, str]) -> dict[str, str]:
    """The name in a file of each of a network's weights.

    ``prefixes`` are how names begin in the file, by how they begin in the network; the first that fits counts.
    """

    def published(name: str) -> str:
        own = next((own for own in prefixes if name.startswith(own)), "")
        return prefixes.get(own, "") + name.removeprefix(own)

    return {name: published(name) for name in head.state_dict()}


def published_weights(head: nn.Module, prefixes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """A network's weights by their names in a file; see `published_names`."""
    names = published_names(head, prefixes)
    return {names[own]: weight for own, weight in head.state_dict().items()}


class HeadFile:
    """The files of a draft head, read next to its verifier. Anything that does not fit raises a ModelError that names
    the head.
    """

    config: Mapping[str, Any]  # the contents of config.json
    weights: dict[str, torch.Tensor]  # the network's tensors by their names in the file
    target: PreTrainedModel  # the verifier
    text: Any  # the configuration of its decoder
    subject: str  # the head, for messages, such as ``The draft head 'a/b'``

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
    ) -> None:
        self.config, self.target, self.subject = config, target, subject
        self.text = target.config.get_text_config(decoder=True)
        # Old files also hold rotary frequencies, which follow from the configuration.
        self.weights = {
            name: weight
            for name, weight in weights.items()
            if name not in NOT_THE_HEADS and not name.endswith("rotary_emb.inv_freq")
        }

    def filled(self, make: Callable[[], Network], prefixes: Mapping[str, str]) -> Network:
        """The network that ``make`` builds, in eval mode with the file's weights; see `published_names`.

        Raises:
            ModelError: a tensor is missing, unknown, of another shape, or not of finite numbers.
        """
        with torch.device("meta"):
            head = make()
        self.fill(head, self.weights, published_names(head, prefixes))
        return head.eval()

    def fill(self, head: nn.Module, weights: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        """Assign weights to a head on the meta device, neither copied nor cast; ``names`` are the names in the file."""
        wanted = {names[own]: weight for own, weight in head.state_dict().items()}
        self._refuse("lacks", wanted.keys() - weights.keys())
        self._refuse("holds unknown", weights.keys() - wanted.keys())
        for name, weight in wanted.items():
            given = weights[name]
            if given.shape != weight.shape:
                shapes = f"{tuple(given.shape)}; its config.json asks for {tuple(weight.shape)}"
                raise ModelError(f"{self.subject}: {name} has shape {shapes}.")
            if not given.is_floating_point() or not bool(given.isfinite().all()):
                kind = "holds NaN or infinite numbers" if given.is_floating_point() else f"is of dtype {given.dtype}"
                raise ModelError(f"{self.subject}: {name} {kind}.", ANEW)
        head.load_state_dict({own: weights[names[own]] for own in head.state_dict()}, assign=True)

    def _refuse(self, what: str, names: Iterable[str]) -> None:
        if listed := sorted(names):
            shown = ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
            raise ModelError(f"{self.subject} {what} tensors: {shown}.", ANEW)

    def take_tokens(self, drafts: int, vocabulary: int) -> torch.Tensor | None:
        """Remove ``d2t`` and ``t2d``; the verifier's id ``(D,)`` int64 of each draft token, None where D = V.

        Raises:
            ModelError: they are missing, or contradict each other or the sizes D and V.
        """
        offsets, known = self.weights.pop("d2t", None), self.weights.pop("t2d", None)
        if offsets is None and drafts == vocabulary:
            return None
        if offsets is None:
            lacks = f"d2t, without which its {drafts} draft tokens have no ids in the vocabulary of {vocabulary}"
            raise ModelError(f"{self.subject} lacks {lacks}.", ANEW)
        if offsets.shape != (drafts,) or offsets.is_floating_point():
            found = f"shape {tuple(offsets.shape)} and dtype {offsets.dtype}"
            raise ModelError(f"{self.subject}: d2t has {found}; it must hold {drafts} whole numbers.", ANEW)
        ids = torch.arange(drafts) + offsets.long()  # d2t holds offsets, not ids
        if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
            found = f"(from {int(ids.min())} to {int(ids.max())})"
            raise ModelError(f"{self.subject}: d2t does not give rising ids from 0 to {vocabulary - 1} {found}.", ANEW)
        if known is not None and not (
            known.shape == (vocabulary,) and int(known.bool().sum()) == len(ids) and bool(known[ids].all())
        ):
            raise ModelError(f"{self.subject}: t2d does not mark the {len(ids)} tokens that d2t names.", ANEW)
        return None if len(ids) == vocabulary else ids

    def require_same(self, what: str, own: int, verifiers: int) -> None:
        """Raise a ModelError unless a size of the head equals the verifier's; ``what`` is its name, as in ``a
        vocabulary of``.
        """
        if own != verifiers:
            raise ModelError(
                f"{self.subject} needs {what} {own}; the verifier has {verifiers}.",
                "Choose the head that was trained on this verifier, or train one with `specctl train-draft`.",
            )

    def require_fit(self, width: int, vocabulary: int) -> None:
        """Raise a ModelError unless the verifier's states have this width, and its vocabulary this size."""
        self.require_same("hidden states of width", width, self.text.hidden_size)
        self.require_same("a vocabulary of", vocabulary, self.text.vocab_size)

    def require_layers(self, layers: Sequence[int]) -> None:
        """Raise a ModelError if the head reads the input of a layer that the verifier does not have.

        The last layer's output is not a layer's input; implementations differ in whether it is normed.
        """
        depth = self.text.num_hidden_layers
        if outside := [layer for layer in layers if not 0 <= layer < depth]:
            raise ModelError(
                f"{self.subject} reads the inputs of layers {', '.join(map(str, layers))}; "
                f"the verifier has {depth} layers, 0 to {depth - 1}, and none is layer {outside[0]}."
            )

    def context(self, shape: LayerShape) -> int:
        """The most tokens that the head can read: at least the verifier's.

        Published heads name their training length. Beyond it acceptance may fall, but rotary positions continue,
        whereas a limit would end the text.
        """
        return max(shape.max_positions, context_length(self.target) or 0)

    def borrowed_embeddings(self, shape: LayerShape) -> nn.Module | None:
        """The verifier's embeddings for a head without its own, else None; a ModelError if their width differs."""
        if "embed_tokens.weight" in self.weights:
            return None
        shared: nn.Module = self.target.get_input_embeddings()
        width = int(shared.weight.shape[1])  # type: ignore[index]
        self.require_same("without embeddings of its own, token embeddings of width", shape.hidden_size, width)
        return shared


def read_head(
    kind: str,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    target: PreTrainedModel,
    subject: str = "The draft head",
) -> ChainHead | BlockHead:
    """A head in the dtype of its file, in eval mode, on the weights' device.

    Args:
        kind: one of `HEAD_KINDS`.
        config: the contents of config.json.
        weights: the tensors of its file.
        target: its verifier, whose embeddings and output layer are used where the file has none.
        subject: the head, for messages.

    Raises:
        ModelError: a key or a tensor is missing, unknown or wrong, or the head does not fit the verifier.
    """
    head: ChainHead | BlockHead = HEAD_KINDS[kind].module.read(HeadFile(config, weights, target, subject))
    return head


Value = TypeVar("Value", bool, int, float, str)

ROPE_THETA = 10000.0  # What transformers' Llama and the code of EAGLE and GliDe use where a configuration has none

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
"""Keys of transformers' configurations that do not change what a network computes."""

_ROPE = frozenset(
    {
        *("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    }
)
_SAME_IN_TEXT = frozenset({"mrope_section", "mrope_interleaved"})
"""Multimodal rotary sections: for text, the positions in time, height and width are the same."""


class HeadConfig:
    """A table of a config.json. Keys are removed as they are read, so an unknown key is noticed; null counts as absent.

    Args:
        values: the table.
        subject: the draft head, for messages, such as ``The draft head 'a/b'``.
        path: the table's dotted path in the file with a trailing dot; empty for the whole file.
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
        """Whether a key is present and not yet taken."""
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
        """A nested table without its nulls; empty where absent."""
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return {name: entry for name, entry in (value or {}).items() if entry is not None}

    def table(self, key: str) -> "HeadConfig":
        """A table within this one; empty where absent."""
        return HeadConfig(self.mapping(key), self.subject, f"{self._path}{key}.")

    def drop(self, keys: Collection[str]) -> None:
        """Take keys that do not matter."""
        for key in keys:
            self._left.pop(key, None)

    def demand(self, key: str, allowed: Collection[Any]) -> None:
        """Take a key that must be absent or have one of these values."""
        value = self._left.pop(key, None)
        if value is not None and value not in allowed:
            raise self.wrong(key, value, " or ".join(repr(each) for each in allowed))

    def end(self, further: Collection[str] = ()) -> None:
        """Take keys that do not matter: `BOOKKEEPING` and further ones. Raise a ModelError if others are left over."""
        self.drop(BOOKKEEPING)
        self.drop(further)
        if self._left:
            names = ", ".join(f"{self._path}{key} = {value!r}" for key, value in sorted(self._left.items()))
            raise ModelError(
                f"{self.subject}: its config.json has keys that specctl does not know: {names}.",
                "They may change how the head computes, so it is not loaded.",
            )

    def wrong(self, key: str, value: object, wanted: str) -> ModelError:
        """The error for a key with another value."""
        return ModelError(f"{self.subject}: {self._path}{key} in its config.json is {value!r}, not {wanted}.")


def layer_windows(config: HeadConfig, count: int) -> tuple[int, ...]:
    """Take the keys of sliding windows: the window of each of ``count`` layers, 0 for unlimited attention.

    Raises:
        ModelError: a layer is of another kind, or has a window without a size or that is not in use.
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
    """Take the keys of decoder layers like Llama's and Qwen3's.

    Args:
        config: the table that they are in.
        qk_norm: whether queries and keys are normed, which no key says.
        rope_theta: the default; None if the file must have one.

    Raises:
        ModelError: a key is missing or wrong, or describes layers of another kind.
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
    """The keys that `layer_shape` reads, with further keys of transformers' configurations."""
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
