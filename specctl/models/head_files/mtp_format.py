"""MTP heads on disk: read from a target's own files or from speculators' layout, written in the latter."""

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from specctl.errors import ModelError, reason
from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.head_files.head_weights import ANEW, fill, published_weights
from specctl.models.head_files.mtp_tensors import mtp_tensors
from specctl.models.head_files.network_files import Verifier

_OTHER = "Use a head that was made for this target."
_UNUSED = {"verifier_lm_head.weight"}
"""Tensors that no reference reads: the converter of speculators writes this one full of NaN."""
_KNOWN_KEYS = {
    "architectures",
    "auto_map",
    "dtype",
    "num_nextn_predict_layers",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "tie_word_embeddings",
    "transformer_layer_config",
    "transformers_version",
}
_ALIKE = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "rope_parameters",
)
"""Keys of a layer's configuration that shapes do not show, or that explain a wrong shape."""


_LAYER = "mtp_layers.0"
NAMES = {
    "block.": f"{_LAYER}.",
    "eh_proj.": f"{_LAYER}.input_proj.",
    "enorm.": f"{_LAYER}.token_layernorm.",
    "hnorm.": f"{_LAYER}.hidden_layernorm.",
    "norm.": f"{_LAYER}.final_layernorm.",
}
"""How names of weights begin in speculators' layout, by how they begin in the network."""


def read(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
) -> MtpHead:
    """A target's MTP head from tensors in any of the known layouts; see `HeadFormat.read`.

    The configuration is the target's own, or speculators'. Further MTP layers than the first are not used: the first is
    applied to its own output.
    """
    text = target.config.get_text_config(decoder=True)
    if "speculators_model_type" in config:
        _require_alike(config, text, subject)
    found = mtp_tensors(weights, text.num_hidden_layers)
    names = {own: name for name, own in found.first.items()}
    if unknown := sorted(weights.keys() - found.places.keys() - _UNUSED):
        raise ModelError(f"{subject} holds unknown tensors: {', '.join(unknown)}.", ANEW)
    named = {own: weights[name] for own, name in names.items()}
    for own, weight in named.items():
        _require_plain(names[own], weight, subject)
    # The target's own, written once more, would only take memory.
    for own, module in (
        ("embeddings.weight", target.get_input_embeddings()),
        ("output.weight", target.get_output_embeddings()),  # type: ignore[no-untyped-call]
    ):
        if own in named and _same(named[own], getattr(module, "weight", None)):
            del named[own]
    with torch.device("meta"):
        head = MtpHead(
            target,
            sparse=any(".experts." in own for own in named),
            own_embeddings="embeddings.weight" in named,
            own_output="output.weight" in named,
        )
    expected = head.state_dict()
    named = _fused(named, expected, subject)
    # What a file lacks goes by the network's name for it, because no file names it.
    names = {own: names.get(own, own.removeprefix("block.")) for own in {**expected, **named}}
    fill(head, {names[own]: weight for own, weight in named.items()}, names, subject)
    if left := [name for name, buffer in head.named_buffers() if buffer.is_meta]:
        raise ModelError(f"{subject} has a layer that computes {left[0]} itself, which specctl does not do.")
    return head


def describe(head: MtpHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An MTP head without embeddings and output layer of its own in speculators' layout; see `HeadFormat.describe`."""
    described = {
        "architectures": ["MTPDraftModel"],
        "transformer_layer_config": dict(verifier.layers),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    return described, published_weights(head, NAMES)


def _fused(
    weights: dict[str, torch.Tensor], expected: Mapping[str, torch.Tensor], subject: str
) -> dict[str, torch.Tensor]:
    """Weights with all experts' in one tensor, ``(experts, out, in)``, where the layer has them that way."""
    fused = dict(weights)

    def stacked(experts: str, part: str, count: int) -> torch.Tensor:
        own = [f"{experts}.{number}.{part}_proj.weight" for number in range(count)]
        if missing := [name for name in own if name not in fused]:
            raise ModelError(f"{subject} lacks tensors: {missing[0].removeprefix('block.')}.", ANEW)
        single = [fused.pop(name) for name in own]
        if len(shapes := {tuple(weight.shape) for weight in single}) > 1:
            raise ModelError(f"{subject} has experts of several shapes: {sorted(shapes)}.", ANEW)
        return torch.stack(single)

    for name, weight in expected.items():
        experts = name.removesuffix(".down_proj")
        if name not in fused and weight.ndim == 3 and f"{experts}.gate_up_proj" in expected:
            gate, up, down = (stacked(experts, part, len(weight)) for part in ("gate", "up", "down"))
            fused |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), name: down}
    return fused


def _require_plain(name: str, weight: torch.Tensor, subject: str) -> None:
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(
            f"{subject} is quantised or damaged: {name} is of dtype {weight.dtype}.",
            "Use a checkpoint of this target that is not quantised; `quantize` quantises a target as it is loaded.",
        )


def _same(weight: torch.Tensor, other: Any) -> bool:
    """Whether a weight is another one, up to the other's dtype; published ones are, so what cannot be told counts."""
    if other is None or not other.is_floating_point() or other.shape != weight.shape:
        return False
    return other.is_meta or bool((weight.to(other.device, other.dtype) == other).all())


def _require_alike(config: Mapping[str, Any], text: Any, subject: str) -> None:
    """Raise a ModelError unless a configuration of speculators describes one layer like those of a target."""
    if unknown := sorted(set(config) - _KNOWN_KEYS):
        raise ModelError(
            f"{subject}: its config.json has keys that specctl does not know: {', '.join(unknown)}.", _OTHER
        )
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise ModelError(f"{subject} has num_nextn_predict_layers = {count!r}; specctl knows heads with 1.", _OTHER)
    layer = config.get("transformer_layer_config")
    layer = dict(layer) if isinstance(layer, Mapping) else {}
    if (kind := layer.pop("model_type", None)) != text.model_type:
        raise ModelError(f"{subject} is for layers of kind {kind!r}; the verifier's are {text.model_type!r}.", _OTHER)
    try:
        made = type(text)(**layer)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ModelError(f"{subject}: transformers refuses its transformer_layer_config ({reason(error)}).") from error
    for key in _ALIKE:
        own, target = getattr(made, key, None), getattr(text, key, None)
        if own != target:
            raise ModelError(f"{subject} is for a model with {key} = {own!r}; the verifier's is {target!r}.", _OTHER)
