"""Root mean square norms in one kernel on CUDA, where transformers computes them in seven."""

from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

ALIKE = 1e-5
"""How far a norm may be from torch's, in float32, to be taken for the same."""


def fuse_norms(model: PreTrainedModel) -> None:
    """Let those layers of a model that compute `torch.nn.functional.rms_norm` compute it by that name.

    A layer is known by its class, one of which is tried. What it gives in bfloat16 is rounded once, not twice.
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
    """Whether a layer is such a norm, without a bias or anything else of its own."""
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
