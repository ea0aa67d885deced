"""EAGLE-3: one decoder layer over the fused states of several of the verifier's layers (arXiv 2503.01840)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Cache

from specctl.errors import ModelError
from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.file_layout import (
    ROPE_THETA,
    HeadConfig,
    HeadFile,
    Verifier,
    layer_shape,
    layer_windows,
    published_weights,
    transformer_table,
)
from specctl.models.draft_heads.head_layers import Attention, DecoderLayer, GatedNetwork, LayerShape, Rope, Rotary

if TYPE_CHECKING:
    from specctl.models.draft_heads.kinds import Recipe
    from specctl.models.draft_heads.training import Given, Lesson, Step


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 network."""

    shape: LayerShape  # of its layers, H their width
    layers: tuple[int, ...]  # the verifier's layers whose states it reads, in the order in which they are concatenated
    vocabulary: int  # V, the verifier's
    draft_vocabulary: int  # D, the number of the V tokens that it can draft
    target_hidden_size: int  # width of the verifier's states
    num_layers: int = 1  # its decoder layers; all but the first are ordinary ones
    norm_before_residual: bool = False  # whether the first layer's residual is the normalised features
    norm_before_fc: bool = False  # whether the concatenated states go through one RMSNorm
    fc_norm: bool = False  # whether each layer's states go through an RMSNorm of their own
    norm_output: bool = False  # whether the next features are the normalised output (EAGLE-3.1), not the raw one
    mask_token: int | None = None  # P-EAGLE's mask token; None for EAGLE-3
    block: int = 0  # tokens that P-EAGLE drafts in a pass
    window: int = 0  # the window of all its layers; 0 for unlimited attention
    context: int = 2048  # the most tokens it can read


class FirstLayer(nn.Module):
    """The layer that reads a token's embedding and features: queries, keys and values are computed from both.

    ``e = input_layernorm(embedding)``, ``h = hidden_norm(features)``; attention reads ``cat(e, h)``, and the residual
    is the features, or h with ``norm_before_residual``.
    """

    def __init__(self, shape: LayerShape, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.input_layernorm = shape.norm()
        self.hidden_norm = shape.norm()
        self.self_attn = Attention(shape, reads=2 * shape.hidden_size)
        self.post_attention_layernorm = shape.norm()
        self.mlp = GatedNetwork(shape)
        self._norm_before_residual = norm_before_residual

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: Cache
    ) -> torch.Tensor:  # (1, T, H)
        normed = self.hidden_norm(features)
        read = torch.cat([self.input_layernorm(embeds), normed], -1)
        residual = normed if self._norm_before_residual else features
        states = residual + self.self_attn(read, rope, mask, cache, 0)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


class Eagle3Head(ChainHead):
    """An EAGLE-3 draft head, or P-EAGLE's (arXiv 2602.01469).

    P-EAGLE has a learned state that replaces the verifier's unknown states. With this state and a mask token it drafts
    all positions of a block in one pass.

    Args:
        config: the network.
        tokens: ``(D,)`` int64, the verifier's id of each draft token; None if D = V.
        embeddings: the verifier's input embeddings ``(V, H)``, used as they are; None for embeddings of its own.
    """

    kind = "eagle3"

    def __init__(
        self, config: Eagle3Config, tokens: torch.Tensor | None = None, embeddings: nn.Module | None = None
    ) -> None:
        super().__init__(tokens)
        shape, sources = config.shape, len(config.layers)
        self.config = config
        self.layers, self.state_size, self.width = config.layers, config.target_hidden_size, shape.hidden_size
        self.vocabulary, self.draft_vocabulary = config.vocabulary, config.draft_vocabulary
        self.num_layers, self.context, self.window = config.num_layers, config.context, config.window
        self.cached_values = config.num_layers * shape.cached_values
        self._take_embeddings(embeddings)
        if config.norm_before_fc:
            self.input_norm = shape.norm(sources * config.target_hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(shape.norm(config.target_hidden_size) for _ in range(sources))
        if config.mask_token is not None:
            self.kind, self.longest, self.mask_token = "peagle", config.block, config.mask_token
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, sources * config.target_hidden_size))
        self.fc = nn.Linear(sources * config.target_hidden_size, shape.hidden_size, bias=False)
        self.rotary = Rotary(shape)
        self.first = FirstLayer(shape, norm_before_residual=config.norm_before_residual)
        self.further = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers - 1))
        self.norm = shape.norm()
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocabulary, bias=False)

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        parts = [states[layer] for layer in self.layers]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        together = torch.cat(parts, -1)  # (..., sources * target_hidden_size)
        fused: torch.Tensor = self.fc(self.input_norm(together) if self.config.norm_before_fc else together)
        return fused

    def mask_features(self) -> torch.Tensor | None:
        if self.mask_token is None:
            return None
        parts = self.mask_hidden[0].chunk(len(self.layers), -1)
        return self.fuse(dict(zip(self.layers, parts, strict=True)))

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
    ) -> ChainPass:
        rope = self.rotary(positions)
        states = self.first(self.embed(ids), features, rope, mask, cache)
        for index, layer in enumerate(self.further, start=1):
            states = layer(states, rope, mask, cache, index)
        last = last_of(states, keep)
        normed = self.norm(last)
        return ChainPass(self.lm_head(normed), normed, normed if self.config.norm_output else last)


TRAINING = frozenset(
    {
        *("embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version"),
        *("step_loss_decay", "ttt_length", "num_target_layers", "target_model_name_or_path", "target_model_type"),
        "draft_num_hidden_layers",  # DeepSpec's, equal to num_hidden_layers
        "bias",  # of EAGLE-1's fc; EAGLE-3's has none, or the file would hold fc.bias
        # Mixtures of experts in the verifier that a configuration was copied from: their tensors would be unknown.
        *("experts_per_token", "num_experts_per_tok", "num_local_experts"),
    }
)
"""Keys about an EAGLE head's training and purpose, which are ignored."""


def read(file: HeadFile) -> Eagle3Head:
    """An EAGLE-3 or P-EAGLE head; see `read_head`."""
    parsed = _parsed(file)
    tokens = file.take_tokens(parsed.draft_vocabulary, parsed.vocabulary)
    shared = file.borrowed_embeddings(parsed.shape)
    first = max(("midlayer", "layers.0"), key=lambda layer: sum(name.startswith(f"{layer}.") for name in file.weights))
    return file.filled(lambda: Eagle3Head(parsed, tokens, shared), _names(parsed, first))


def describe(head: Eagle3Head, _: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An EAGLE-3 head in speculators' layout; see `HeadKind`."""
    config = head.config
    if config.window or config.mask_token is not None:
        raise ValueError("writing windows or masks is not supported")
    described = {
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": transformer_table(config.shape, config.vocabulary, config.num_layers),
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    return described, published_weights(head, _names(config))


def _names(config: Eagle3Config, first: str = "layers.0") -> dict[str, str]:
    """Prefixes of weight names in a file; the first layer is ``layers.0`` or ``midlayer``."""
    return {"first.": f"{first}."} | {f"further.{n - 1}.": f"layers.{n}." for n in range(1, config.num_layers)}


def _parsed(file: HeadFile) -> Eagle3Config:
    """The network that a config.json describes, checked against the verifier."""
    config, weights = file.config, file.weights
    table = HeadConfig(config, file.subject)
    if "transformer_layer_config" in config:
        inner = table.table("transformer_layer_config")
        normed = config["transformer_layer_config"].get("model_type") == "qwen3"
        theta = None if normed else ROPE_THETA
    elif any("Qwen3" in str(name) for name in config.get("architectures") or ()):
        inner, normed, theta = table, True, None
    else:
        inner, normed, theta = table, any(name.endswith(".q_norm.weight") for name in weights), ROPE_THETA
    vocabulary, depth = inner.take("vocab_size", int), inner.take("num_hidden_layers", int, 1)
    windows = layer_windows(inner, depth)
    if len(set(windows)) > 1:
        raise ModelError(
            f"{file.subject}: its layers have different windows, which specctl does not support for this kind."
        )
    shape = layer_shape(inner, qk_norm=normed, rope_theta=theta)
    parsed = Eagle3Config(
        shape=shape,
        layers=_layers(table, file.text.num_hidden_layers),
        vocabulary=vocabulary,
        draft_vocabulary=table.take("draft_vocab_size", int, vocabulary),
        target_hidden_size=table.take("target_hidden_size", int, shape.hidden_size),
        num_layers=depth,
        norm_before_residual=table.take("norm_before_residual", bool, False),
        norm_before_fc=table.take("norm_before_fc", bool, False),
        fc_norm=table.take("fc_norm", bool, False),
        norm_output=table.take("norm_output", bool, False),
        mask_token=table.take("mask_token_id", int, least=0) if "mask_hidden" in weights else None,
        block=_drafted_at_once(table) if "mask_hidden" in weights else 0,
        window=windows[0],
        context=file.context(shape),
    )
    for each in (inner, table):
        each.end(TRAINING)
    file.require_layers(parsed.layers)
    file.require_fit(parsed.target_hidden_size, vocabulary)
    if parsed.mask_token is not None and parsed.mask_token >= vocabulary:
        raise table.wrong("mask_token_id", parsed.mask_token, f"an id below {vocabulary}")
    return parsed


def _drafted_at_once(table: HeadConfig) -> int:
    """The number of tokens that P-EAGLE drafts in a pass: speculators' proposal in the file, by default 8."""
    methods = table.mapping("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return HeadConfig(first, table.subject, "speculators_config.proposal_methods.").take("speculative_tokens", int, 8)


def _layers(table: HeadConfig, depth: int) -> tuple[int, ...]:
    """The layers of a verifier with ``depth`` layers whose input a head reads.

    EAGLE and speculators number layers by input. SpecForge and NVIDIA (``eagle_config``) and DeepSpec
    (``target_layer_ids``) number them by output, which is the next layer's input.
    """
    eagle = table.table("eagle_config")
    inputs, outputs = table.ids("eagle_aux_hidden_state_layer_ids"), table.ids("target_layer_ids")
    nested = eagle.ids("eagle_aux_hidden_state_layer_ids")
    for key, ordinary in _ORDINARY.items():
        eagle.demand(key, (ordinary,))
    # Only used for drafts beyond `parallel_draft_step`, which do not exist here.
    eagle.end(["parallel_draft_heads_num_layers"])
    given = [ids for ids in (inputs, *(tuple(i + 1 for i in ids) for ids in (outputs, nested) if ids)) if ids]
    if any(ids != given[0] for ids in given):
        raise ModelError(f"{table.subject}: its config.json names the verifier's layers twice, with different values.")
    return given[0] if given else (2, depth // 2, depth - 3)


_ORDINARY = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
"""NVIDIA's switches, with their values for EAGLE's published network."""


STEP_DECAY = 0.8  # Decay of the loss weight from step to step, as in SafeAILab's code


def new(recipe: "Recipe", given: "Given") -> Eagle3Head:
    """A head to train. It reads an early, a middle and a late layer; its output layer starts as the target's."""
    from specctl.models.draft_heads.training import drawn

    config = Eagle3Config(
        given.shape,
        given.existing((2, given.depth // 2, given.depth - 3)),
        given.vocabulary,
        draft_vocabulary=given.vocabulary if given.tokens is None else len(given.tokens),
        target_hidden_size=given.shape.hidden_size,
        num_layers=recipe.depth,
        norm_before_residual=True,
        context=given.shape.max_positions,
    )
    head = drawn(Eagle3Head(config, given.tokens, given.embeddings))
    weight = given.output.weight.detach().cpu()
    head.lm_head.weight.data.copy_(weight if given.tokens is None else weight[given.tokens])
    return head


def loss(head: Eagle3Head, lesson: "Lesson", recipe: "Recipe", generator: torch.Generator) -> torch.Tensor:
    """The loss of an answer; see `HeadKind`."""
    from specctl.models.draft_heads.training import drafted_steps

    longer = torch.rand(lesson.length, generator=generator).to(lesson.ids.device) < recipe.rounds
    steps = drafted_steps(head, lesson, recipe.steps, longer=longer)
    return torch.stack([step_loss(step, lesson, recipe.rounds) for step in steps]).sum()


def step_loss(step: "Step", lesson: "Lesson", rounds: float) -> torch.Tensor:
    """A step's loss, summed over the answer's tokens. Only a share ``rounds`` of the rounds continued after their first
    token; the sum is scaled up to all rounds.
    """
    from specctl.models.draft_heads.training import law_loss

    share = rounds if step.index else 1.0
    target = lesson.logits[step.answer_rows]
    counted = None if lesson.counted is None else lesson.counted[step.answer_rows]
    return STEP_DECAY**step.index / share * law_loss(step.logits, target, counted).sum()
