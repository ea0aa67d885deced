"""What new draft heads are made from: copies of a target's layers, the shape of its layers, random weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.head import DraftHead
from specctl.models.draft_heads.head_layers import FIXED_FREQUENCIES, LayerShape
from specctl.models.passes.layer_sizes import head_size, key_value_heads, largest, layer_configs, query_heads
from specctl.models.running.context import context_length

STD = 0.02
"""Of new weights."""

Head = TypeVar("Head", bound=DraftHead)


@dataclass(frozen=True, slots=True)
class Given:
    """What a new head is made from.

    Attributes:
        target: the model that it is to draft for.
        embeddings: of the target, a copy in float32 that is not trained.
        output: the target's output layer, likewise.
        shape: of layers like the target's.
        depth: how many decoder layers the target has.
        tokens: ids ``(D,)`` int64 of the head's draft vocabulary, rising; None for all.
        mask_token: stands for what a block head is to draft.
    """

    target: PreTrainedModel
    embeddings: nn.Embedding
    output: nn.Linear
    shape: LayerShape
    depth: int
    tokens: torch.Tensor | None
    mask_token: int

    @classmethod
    def of(cls, target: PreTrainedModel, tokens: torch.Tensor | None, mask_token: int) -> "Given":
        """For a draft vocabulary and a mask.

        Raises:
            ModelError: the target has no embeddings or output layer that can be copied.
        """
        depth = target.config.get_text_config(decoder=True).num_hidden_layers
        return cls(target, *_shared(target), _shape(target), depth, tokens, mask_token)

    @property
    def vocabulary(self) -> int:
        """V, the target's."""
        return self.embeddings.num_embeddings

    def existing(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Layers that a head would read, rising, moved to those that the target has; fewer where it is small."""
        return tuple(sorted({min(max(layer, 0), self.depth - 1) for layer in layers}))


def drawn(head: Head) -> Head:
    """The head, with new random weights from torch's default generator."""
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return head


def _shared(target: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Frozen copies in float32 of a target's embeddings and output layer."""
    embedding = _weight(target.get_input_embeddings())
    unembedding: nn.Module | None = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = _weight(unembedding)
    if embedding is None or weight is None:
        raise ModelError(
            f"{target.config.name_or_path!r} has no embeddings or output layer in a floating-point format, which a "
            "draft head needs.",
            "Load it without quantisation.",
        )
    weight = weight.float()
    output = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False)
    bias = getattr(unembedding, "bias", None)
    if bias is not None:
        output.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    embeddings = nn.Embedding(embedding.shape[0], embedding.shape[1], device="meta")
    embeddings.weight = nn.Parameter(embedding.float(), requires_grad=False)
    return embeddings, output


def _weight(module: nn.Module | None) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def _shape(target: PreTrainedModel) -> LayerShape:
    """Layers like the target's first one, where its configuration has Llama's words for it."""
    config = layer_configs(target.config)[0]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some have one for each kind of layer
    if rope.get("rope_type", "default") not in FIXED_FREQUENCIES or "rope_theta" not in rope:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}  # whole heads are turned
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=largest(target.config, "intermediate_size") or 4 * config.hidden_size,
        heads=query_heads(config),
        kv_heads=key_value_heads(config),
        head_dim=head_size(config),
        norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope=rope,
        max_positions=context_length(target) or 2048,
    )
