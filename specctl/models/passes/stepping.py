"""Mixers that read a block of tokens correctly only one by one, made to do so inside a wide pass."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from transformers import Cache, PreTrainedModel

from specctl.models.passes.cache import cache_argument

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
            mixer.forward = _stepped(mixer)
            _stepping.add(mixer)


def reads_prompts_whole(model: torch.nn.Module) -> bool:
    """Whether a prompt gives other logits in one pass than in parts, so that it has to be read as ``generate`` does.

    It is so where Mamba 2's time step is limited: every pass limits it but those of single tokens that go on.
    """
    return any(_limits_steps(module) for module in model.modules() if _has_state(module))


def _needs_steps(module: torch.nn.Module) -> bool:
    return _has_state(module) and (hasattr(module, "time_step_rank") or _limits_steps(module))


def _has_state(module: torch.nn.Module) -> bool:
    return hasattr(module, "layer_idx") and bool(cache_argument(type(module)))


def _limits_steps(module: torch.nn.Module) -> bool:
    limit = getattr(module, "time_step_limit", None)  # of Mamba 2
    return limit is not None and tuple(limit) != UNLIMITED


def _stepped(mixer: torch.nn.Module) -> Callable[..., torch.Tensor]:
    forward: Callable[..., torch.Tensor] = mixer.forward
    layer: Any = mixer.layer_idx
    name = cache_argument(type(mixer))

    @wraps(forward)
    def read(
        hidden_states: torch.Tensor,  # (1, T, D)
        *,
        attention_mask: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        width = hidden_states.shape[1]
        cache: Cache | None = more.get(name)
        if cache is None or width == 1 or not cache.has_previous_state(layer):
            return forward(hidden_states, attention_mask=attention_mask, **more)
        steps = [
            forward(
                hidden_states[:, token : token + 1],
                attention_mask=None if attention_mask is None else attention_mask[:, token : token + 1],
                **more,
            )
            for token in range(width)
        ]
        return torch.cat(steps, dim=1)

    return read
