"""MTP heads from the tensors of a checkpoint."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError, reason
from specctl.models.loading.mtp_tensors import mtp_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.draft_heads.mtp import MtpHead

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")
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


def build_mtp(config: Mapping[str, Any], weights: "Mapping[str, torch.Tensor]", target: "PreTrainedModel") -> "MtpHead":
    """A target's MTP head, from tensors in any of the known layouts.

    Further MTP layers than the first are not used: the first is applied to its own output.

    Args:
        config: the config.json that belongs to the tensors: the target's, or one of speculators.
        weights: the tensors by their names in the files; they may belong to the head afterwards.
        target: the model.

    Returns:
        The head on the CPU, in the target's dtype.

    Raises:
        ModelError: the tensors are no MTP layer of this target, are quantised, or are not known to specctl.
    """
    import torch

    from specctl.models.draft_heads.mtp import MtpHead

    text = target.config.get_text_config(decoder=True)
    if "speculators_model_type" in config:
        _require_alike(config, text)
    found = mtp_tensors(weights, text.num_hidden_layers)
    if unknown := sorted(set(weights) - set(found.places) - _UNUSED):
        raise _unfit(f"tensors that specctl does not know, first {unknown[0]}")
    named = {own: weights[name] for name, own in found.first.items()}
    for name, own in found.first.items():
        _require_plain(name, named[own])
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
    _fill(head, _fused(named, head.state_dict()), target.dtype)
    return head


def _fill(head: "MtpHead", weights: "dict[str, torch.Tensor]", dtype: "torch.dtype") -> None:
    """Put weights by their names in the head into a head without any, in a dtype; buffers keep their own."""
    expected, buffers = head.state_dict(), dict(head.named_buffers())
    if missing := sorted(set(expected) - set(weights)):
        raise _unfit(f"no weights for {len(missing)} part(s), first {missing[0].removeprefix('block.')}")
    if unknown := sorted(set(weights) - set(expected)):
        raise _unfit(f"tensors that layers of this target do not have, first {unknown[0].removeprefix('block.')}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise _unfit(f"{name} of shape {tuple(weight.shape)} instead of {tuple(expected[name].shape)}")
    cast = {name: weight if name in buffers else weight.to(dtype) for name, weight in weights.items()}
    head.load_state_dict(cast, assign=True)
    if left := [name for name, buffer in head.named_buffers() if buffer.is_meta]:
        raise _unfit(f"a layer that computes {left[0]} itself, which specctl does not do")


def _fused(weights: "dict[str, torch.Tensor]", expected: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Weights with all experts' in one tensor, ``(experts, out, in)``, where the layer has them that way."""
    import torch

    fused = dict(weights)

    def stacked(experts: str, part: str, count: int) -> torch.Tensor:
        own = [f"{experts}.{number}.{part}_proj.weight" for number in range(count)]
        if missing := [name for name in own if name not in fused]:
            raise _unfit(f"no {missing[0].removeprefix('block.')}")
        single = [fused.pop(name) for name in own]
        if len(shapes := {tuple(weight.shape) for weight in single}) > 1:
            raise _unfit(f"experts of several shapes, {sorted(shapes)}")
        return torch.stack(single)

    for name, weight in expected.items():
        experts = name.removesuffix(".down_proj")
        if name not in fused and weight.ndim == 3 and f"{experts}.gate_up_proj" in expected:
            gate, up, down = (stacked(experts, part, len(weight)) for part in ("gate", "up", "down"))
            fused |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), name: down}
    return fused


def _require_plain(name: str, weight: "torch.Tensor") -> None:
    import torch

    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _unfit(
            f"a quantised weight, {name} of {weight.dtype}",
            "Use a checkpoint of this target that is not quantised; `quantize` quantises the target as it is loaded.",
        )
    if bool(torch.isnan(weight.sum())):
        raise _unfit(f"weights that are not numbers (NaN), in {name}", "Copy or download it again.")


def _same(weight: "torch.Tensor", other: Any) -> bool:
    """Whether a weight is another one, up to the other's dtype."""
    if other is None or other.is_meta or not other.is_floating_point() or other.shape != weight.shape:
        return False
    return bool((weight.to(other.device, other.dtype) == other).all())


def _require_alike(config: Mapping[str, Any], text: Any) -> None:
    """Raise a ModelError unless a configuration of speculators describes one layer like those of a target."""
    from huggingface_hub.errors import StrictDataclassError

    if unknown := sorted(set(config) - _KNOWN_KEYS):
        raise _unfit(f"the key {unknown[0]!r} in config.json, which specctl does not know")
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise _unfit(f"num_nextn_predict_layers = {count!r}; a layout with 1 is known")
    layer = dict(config.get("transformer_layer_config") or {})
    if (kind := layer.pop("model_type", None)) != text.model_type:
        raise _unfit(f"a layer of kind {kind!r}; those of the target are {text.model_type!r}")
    try:
        made = type(text)(**layer)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise _unfit(f"a transformer_layer_config that transformers refuses ({reason(error)})") from error
    for key in _ALIKE:
        own, target = getattr(made, key, None), getattr(text, key, None)
        if own != target:
            raise _unfit(f"{key} = {own!r}; the target's is {target!r}")


def _unfit(what: str, hint: str = "Use a head that was made for this target.") -> ModelError:
    return ModelError(f"The MTP head does not fit its target: it has {what}.", hint)
