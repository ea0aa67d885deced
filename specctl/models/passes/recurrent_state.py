"""Recurrent states of a cache: passes of several tokens step through them, and copies allow a rollback."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from specctl.models.passes.cache import cache_argument
from specctl.models.passes.weights import device_of

KEPT = 3
SPACING = 32
"""The newest saved state serves a rollback to the start of a round. The `KEPT` - 1 older ones, at least this many
tokens apart, serve a rollback to the start of a hierarchy's block, some rounds back.
"""

TESTED = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "zamba",
        "zamba2",
        "zaya",
    }
)
"""Families whose rollback the tests compare with target-only decoding, by ``model_type``."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The states of all layers after a number of tokens."""

    length: int  # the number of tokens
    states: list[torch.Tensor]  # a copy of each tensor, in the order of `RecurrentState`
    # the contents of each layer with compressed entries. Their passes replace tensors and never write to them.
    compressed: list[dict[str, Any]]


def untested(model: PreTrainedModel) -> bool:
    """Whether a model has a kind of state that no test covers and a rollback may corrupt."""
    known = model.config.get_text_config(decoder=True).model_type in TESTED
    return not known and keeps_states(model.config)


def has_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether a model has a recurrent state in its cache, found by a pass of one token where its configuration allows
    one.

    Layers that store only a convolution's last columns (LFM2) have none. Compressed entries count as one.
    """
    cache = DynamicCache(config=model.config)
    if _compressed_layers(cache):
        return True
    layers = _linear_layers(cache)
    if not layers:
        return False
    token = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_argument(type(model)): cache})
    return any(any(layer.is_recurrent_states_initialized.values()) for layer in layers)


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether any layer of a model has its own state: recurrent, of a convolution, or compressed entries."""
    cache = DynamicCache(config=config)
    return bool(_linear_layers(cache) or _compressed_layers(cache))


class RecurrentState:
    """The recurrent layers of a cache and copies of their states.

    Args:
        cache: of one sequence, from `empty_cache`.
        present: whether its layers have a recurrent state.
    """

    def __init__(self, cache: DynamicCache, present: bool) -> None:
        self.present = present
        self._cache = cache
        self._layers = _linear_layers(cache) if present else []
        self._compressed = _compressed_layers(cache)
        self._saved: list[SavedState] = []

    def after_pass(self) -> None:
        """Cut convolution states back to the part that the next pass reads, where `empty_cache` lets them grow.

        In a layer with a sliding window one flag says whether its keys and its convolution states are stored.
        """
        for layer in self._layers:
            sliding = isinstance(layer, DynamicSlidingWindowLayer)
            for index, columns in layer.conv_kernel_size.items() if sliding else ():
                if columns is not None:
                    states = layer.conv_states[index]
                    short = max(0, columns - states.shape[-1])
                    layer.conv_states[index] = torch.nn.functional.pad(states[..., -columns:], (short, 0))

    def save(self, length: int) -> None:
        """Copy the current states, those after ``length`` tokens."""
        if self._saved and self._saved[-1].length == length:
            return
        while len(self._saved) > 1 and length - self._saved[-2].length < SPACING:
            self._saved.pop()
        del self._saved[: max(0, len(self._saved) - KEPT + 1)]
        compressed = [_parted(vars(layer)) for layer in self._compressed]
        self._saved.append(SavedState(length, [state.clone() for state in self._tensors()], compressed))

    def nearest(self, length: int) -> int:
        """The longest saved length up to ``length``; 0 if there is none."""
        return max((saved.length for saved in self._saved if saved.length <= length), default=0)

    def restore(self, length: int) -> None:
        """Restore the states saved at exactly this length, and forget those saved later."""
        self._saved = [saved for saved in self._saved if saved.length <= length]
        for state, copy in zip(self._tensors(), self._saved[-1].states, strict=True):
            state.copy_(copy)
        for layer, had in zip(self._compressed, self._saved[-1].compressed, strict=True):
            vars(layer).clear()
            vars(layer).update(_parted(had))

    def crop(self, tokens: int) -> None:
        """Remove the last tokens from every layer, except for the states that `restore` replaces."""
        layers: list[Any] = self._cache.layers
        for layer in layers:
            if layer in self._compressed:
                continue
            if layer not in self._layers:
                layer.crop(-tokens)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                DynamicSlidingWindowLayer.crop(layer, -tokens)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -tokens)

    def _tensors(self) -> list[torch.Tensor]:
        found = [*(state for layer in self._layers for state in layer.conv_states.values())]
        found += (state for layer in self._layers for state in layer.recurrent_states.values())
        return [state for state in found if state is not None]


def _linear_layers(cache: DynamicCache) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def _compressed_layers(cache: DynamicCache) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "compress_rate")]


def _parted(held: dict[str, Any]) -> dict[str, Any]:
    """The same tensors in new dictionaries."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in held.items()}


UNLIMITED = (0.0, float("inf"))

_stepping: "WeakSet[torch.nn.Module]" = WeakSet()


def step_through_blocks(model: PreTrainedModel) -> None:
    """Let Mamba mixers read a continuing block token by token, while all other layers read it at once.

    In transformers, Mamba 1's scan starts from an empty state even where the cache has one, and Mamba 2's scan limits
    the time step in blocks but not for single tokens. Reading token by token matches ``generate``. Whole prompts are
    read at once; a model without such mixers is unchanged.

    Args:
        model: its mixers' ``forward`` is replaced, once.
    """
    for mixer in model.modules():
        if _needs_steps(mixer) and mixer not in _stepping:
            mixer.forward = _stepped(mixer)
            _stepping.add(mixer)


def reads_prompts_whole(model: torch.nn.Module) -> bool:
    """Whether a prompt has different logits in one pass than in parts, so that it must be read whole, like ``generate``
    does.

    True where Mamba 2's time step is limited: every pass limits it except those of single continuing tokens.
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
    # No closure: a copy of the model computes with its own mixers.
    return wraps(forward)(partial(_read, forward, mixer.layer_idx, cache_argument(type(mixer))))


def _read(
    forward: Callable[..., torch.Tensor],
    layer: Any,
    name: str,
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
