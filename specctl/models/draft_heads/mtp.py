"""The head that a target was trained with to predict the token after next: a decoder layer over its last state."""

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specctl.errors import ModelError
from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.head import Borrowed
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import attention_values, layer_configs
from specctl.models.passes.masks import WITH_MASKS
from specctl.models.running.context import ENDLESS, context_length

_HINT = "Draft with a small model instead, or use a head of another kind that was made for this target."


def mtp_config(target: PreTrainedModel, *, sparse: bool) -> PreTrainedConfig:
    """The configuration of a target's MTP layer: the target's own, with one layer.

    Args:
        target: the model.
        sparse: whether the layer's MLP is a mixture of experts.

    Raises:
        ModelError: the layer would be one that cannot run over a cache of plain keys and values.
    """
    layers = layer_configs(target.config)
    kinds = getattr(layers[-1], "layer_types", None) or [None] * len(layers)
    # A hybrid's MTP layer is one of those with full attention, unless its configuration says otherwise.
    like = max(range(len(layers)), key=lambda layer: (kinds[layer] == "full_attention", layer))
    config: Any = deepcopy(layers[like])
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(getattr(config, "mtp_layer_types", None) or [kinds[like]])[:1]
    # Each family has its own way to tell at which depth its experts begin.
    depths = {
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for key, value in depths.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    if config._attn_implementation not in WITH_MASKS:
        raise _cannot_run(config, "its attention takes no ready-made mask")
    if type(DynamicCache(config=config).layers[0]) is not DynamicLayer:
        raise _cannot_run(config, "it has a sliding window, a recurrent state or a cache of its own kind")
    return config  # type: ignore[no-any-return]


class MtpHead(ChainHead):
    """One decoder layer of the target's class, applied to its own output again for every further token.

    For token x_p and the row r of place p - 1 it computes
    ``r' = norm(block(eh_proj([enorm(E[x_p]); hnorm(r)])))`` and the logits ``W r'`` of token x_(p+1), where E and W are
    the target's embeddings and output layer unless the head has its own. The first row is the target's last state after
    its final norm; r' is the next one (DeepSeek-V3, arXiv:2412.19437, equations 21 to 23; applied recursively as in
    FastMTP, arXiv:2509.18362).

    The embeddings, output layer and rotary embeddings that belong to the target are no submodules: they neither move
    with the head nor count as its weights.

    Args:
        target: the model that verifies, in eval mode.
        sparse: whether the layer's MLP is a mixture of experts.
        own_embeddings: whether the head has embeddings of its own.
        own_output: whether it has an output layer of its own.

    Raises:
        ModelError: layers of the target's kind cannot draft this way.
    """

    kind = "mtp"
    layers = (-1,)
    num_layers = 1

    def __init__(
        self, target: PreTrainedModel, *, sparse: bool = False, own_embeddings: bool = False, own_output: bool = False
    ) -> None:
        super().__init__()
        config: Any = mtp_config(target, sparse=sparse)
        decoder: Any = target.get_decoder()  # type: ignore[no-untyped-call]
        lacks = [part for part in ("layers", "norm", "rotary_emb") if getattr(decoder, part, None) is None]
        if lacks or set(inspect.signature(decoder.rotary_emb.forward).parameters) != {"x", "position_ids"}:
            raise _cannot_run(config, f"its decoder has no {lacks[0]}" if lacks else "its layers rotate differently")
        norm = type(decoder.norm)
        self.width = self.state_size = int(config.hidden_size)
        self.context = context_length(target) or ENDLESS
        self.enorm = norm(self.width, eps=config.rms_norm_eps)
        self.hnorm = norm(self.width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * self.width, self.width, bias=False)
        self.block = type(decoder.layers[-1])(config, 0)
        self._cache_argument = cache_argument(type(self.block))
        self.norm = norm(self.width, eps=config.rms_norm_eps)
        output: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.draft_vocabulary: int = config.vocab_size if output is None else output.weight.shape[0]
        self.vocabulary = self.draft_vocabulary
        self.cached_values = attention_values(config)
        self.embeddings = nn.Embedding(config.vocab_size, self.width) if own_embeddings else None
        self.output = nn.Linear(self.width, self.draft_vocabulary, bias=False) if own_output else None
        self.share(target.get_input_embeddings(), output)
        self._rotary = Borrowed(decoder.rotary_emb)
        # Rotary embeddings for pictures too want a position for each of three axes.
        self._axes = 3 if hasattr(decoder.rotary_emb, "mrope_section") else 0
        # Inkling's order; all others put the embedding first.
        self._state_first = bool(getattr(config, "mtp_hidden_states_first", False))
        self.eval()

    def share(self, embeddings: nn.Module, output: nn.Module | None) -> None:
        """Use these where it has none of its own: the target's, or copies in the head's dtype."""
        self._embeddings, self._output = Borrowed(embeddings), Borrowed(output)

    @property
    def borrowed_output(self) -> nn.Module | None:
        return self._output.module if self.output is None else None

    @property
    def output_layer(self) -> nn.Linear:
        layer: nn.Linear = self.output or self._output.module
        return layer

    def _replace_output(self, layer: nn.Linear) -> None:
        if self.output is None:
            self._output = Borrowed(layer)
        else:
            self.output = layer

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MtpHead":
        # A cast must not reach buffers: the router's correction is float32 in every model.
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers():
            buffer.data = kept[name].to(buffer.device)
        return self

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The rows ``(T, H)`` are the target's last states as they are."""
        return states[-1]

    def forward(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
    ) -> ChainPass:
        embedded = (self.embeddings or self._embeddings.module)(ids).to(rows)  # (1, T, H)
        parts = [self.enorm(embedded), self.hnorm(rows)]
        places = positions[None]
        axes = places.expand(self._axes, 1, -1) if self._axes else places
        states = self.block(
            self.eh_proj(torch.cat(parts[::-1] if self._state_first else parts, dim=-1)),
            attention_mask=mask,
            position_ids=places,
            position_embeddings=self._rotary.module(embedded, axes),
            **{self._cache_argument: cache},
        )
        states = self.norm(last_of(states, keep))  # (keep, H)
        return ChainPass(self.output_layer(states), states, states)


def _cannot_run(config: Any, why: str) -> ModelError:
    return ModelError(f"The MTP layer of a {config.model_type} target cannot run here: {why}.", _HINT)
