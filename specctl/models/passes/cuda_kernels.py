"""Attention and norms on CUDA with fewer or faster kernels than transformers'."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import rms_norm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specctl.models.passes.masks import GROUPED, USUAL
from specctl.models.passes.tree_sight import WIDEST


def attend_in_groups(model: PreTrainedModel) -> None:
    """Let a model with `USUAL` attention run `grouped` from now on; other models are unchanged."""
    if model.config._attn_implementation != USUAL:
        return
    AttentionInterface.register(GROUPED, grouped)
    AttentionMaskInterface.register(GROUPED, AttentionMaskInterface()[USUAL])  # type: ignore[no-untyped-call]
    model.set_attn_implementation(GROUPED)


def grouped(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers attention by matrix products and a softmax in float32, without a copy of the cache.

    With a mask, torch has no kernel that reads a group's keys only once, or that splits a long cache across the GPU. It
    copies keys and values for each head, and one thread block processes all slots of a head. On an H200, a layer of
    Llama 3 8B takes 20 us that way over 256 slots and 124 us over 2,048; this function takes 12 and 21 us. With 16
    texts over 1,024 slots it takes 39 us instead of 411. Prompts, other devices and calls without a mask go to `USUAL`.

    Args:
        module: the layer.
        query: ``(B, G H, T, D)``, of H groups of G heads.
        key: ``(B, H, S, D)``.
        value: ``(B, H, S, E)``.
        attention_mask: ``(B, 1, T, S)``, added to the scores.
        scaling: of the scores; None for 1 / sqrt(D).
        more: further arguments of transformers' attention functions.

    Returns:
        ``(B, T, G H, E)``, and no weights.
    """
    batch, heads, width, size = query.shape
    groups, slots = key.shape[1:3]
    special = more.get("position_bias") is not None or more.get("softcap") is not None
    if attention_mask is None or width > WIDEST or query.device.type != "cuda" or special:
        usual = AttentionInterface()[USUAL]  # type: ignore[no-untyped-call]
        result: tuple[torch.Tensor, None] = usual(module, query, key, value, attention_mask, scaling=scaling, **more)
        return result
    together = query.reshape(batch * groups, -1, size)  # (B H, G T, D)
    keys = key.reshape(batch * groups, slots, size)
    scores = _product(together, keys.transpose(1, 2)).view(batch, groups, -1, width, slots)
    scores = torch.add(attention_mask[:, :, None], scores, alpha=size**-0.5 if scaling is None else scaling)
    weights = scores.softmax(-1).to(value.dtype).view(batch * groups, -1, slots)  # (B H, G T, S)
    mixed = torch.bmm(weights, value.reshape(batch * groups, slots, -1))  # (B H, G T, E)
    return mixed.view(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float32 for factors of any dtype: scores rounded to bfloat16 would be off by percents."""
    return torch.bmm(left, right) if left.dtype == torch.float32 else torch.bmm(left, right, out_dtype=torch.float32)


ALIKE = 1e-5  # The largest difference of a norm from torch's, in float32, to be recognised


def fuse_norms(model: PreTrainedModel) -> None:
    """Replace norm layers that compute `torch.nn.functional.rms_norm` by that function.

    A layer is recognised by its class; one layer of each class is tried. In bfloat16 the result is rounded once, not
    twice.
    """
    known: dict[type, bool] = {}
    for layer in model.modules():
        kind = type(layer)
        if kind not in known:
            known[kind] = _is_one(layer)
        if known[kind]:
            layer.forward = _fused(layer)


def _fused(layer: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    epsilon: float = layer.variance_epsilon  # type: ignore[assignment]

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return rms_norm(hidden_states, weight.shape, weight, epsilon)

    return forward


def _is_one(layer: torch.nn.Module) -> bool:
    """Whether a layer is such a norm, without a bias or other parameters."""
    weights = dict(layer.named_parameters())
    if [*weights] != ["weight"] or weights["weight"].dim() != 1 or [*layer.named_children(), *layer.named_buffers()]:
        return False
    epsilon = getattr(layer, "variance_epsilon", None)
    if not isinstance(epsilon, float):
        return False
    weight = weights["weight"].detach()
    sample = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1)
    with torch.no_grad():
        its_own = layer.forward(sample)
        fused = rms_norm(sample, weight.shape, weight.float(), epsilon)
    return torch.allclose(its_own.float(), fused, rtol=ALIKE, atol=ALIKE)
