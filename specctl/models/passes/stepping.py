"""Mixers that read a block of tokens correctly only one by one, made to do so inside a wide pass."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from transformers import Cache, PreTrainedModel

UNLIMITED = (0.0, float("inf"))

_stepping: "WeakSet[torch.nn.Module]" = WeakSet()


def step_through_blocks(model: PreTrainedModel) -> None:
    """Let Mamba mixers read a block that continues a sequence token by token, while all other layers read it at once.

    In transformers, Mamba 1's scan starts from an empty state even where the cache has one, and Mamba 2's limits the
    time step in blocks but not in single tokens. Tokens read one by one are what ``generate`` reads. Whole prompts are
    read as they are; a model without such mixers stays as it is.

    Args:
        model: its mixers' ``forward`` is replaced, once.
    """
    for mixer in model.modules():
        if _needs_steps(mixer) and mixer not in _stepping:
            mixer.forward = _stepped(mixer.forward, mixer.layer_idx)  # type: ignore[arg-type]
            _stepping.add(mixer)


def _needs_steps(module: torch.nn.Module) -> bool:
    if not hasattr(module, "layer_idx") or "cache_params" not in inspect.signature(module.forward).parameters:
        return False
    limit = getattr(module, "time_step_limit", None)  # of Mamba 2
    return hasattr(module, "time_step_rank") or (limit is not None and tuple(limit) != UNLIMITED)


def _stepped(forward: Callable[..., torch.Tensor], layer: int) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def read(
        hidden_states: torch.Tensor,  # (1, T, D)
        cache_params: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        width = hidden_states.shape[1]
        if cache_params is None or width == 1 or not cache_params.has_previous_state(layer):
            return forward(hidden_states, cache_params=cache_params, attention_mask=attention_mask, **more)
        steps = [
            forward(
                hidden_states[:, token : token + 1],
                cache_params=cache_params,
                attention_mask=None if attention_mask is None else attention_mask[:, token : token + 1],
                **more,
            )
            for token in range(width)
        ]
        return torch.cat(steps, dim=1)

    return read
