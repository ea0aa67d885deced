"""EAGLE-1: a decoder layer over the verifier's last states, with the verifier's output layer (arXiv 2401.15077)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, smooth_l1_loss
from transformers import Cache

from specctl.models.draft_heads.chain import ChainHead, ChainPass, last_of
from specctl.models.draft_heads.file_layout import (
    ROPE_THETA,
    HeadConfig,
    HeadFile,
    Verifier,
    layer_shape,
    published_weights,
    transformer_table,
)
from specctl.models.draft_heads.head import Borrowed
from specctl.models.draft_heads.head_layers import DecoderLayer, LayerShape, Rotary

if TYPE_CHECKING:
    from specctl.models.draft_heads.kinds import Recipe
    from specctl.models.draft_heads.training import Given, Lesson, Step


@dataclass(frozen=True, slots=True)
class Eagle1Config:
    """An EAGLE-1 network. EAGLE-2 has the same network and drafts in dynamic trees (arXiv 2406.16858)."""

    shape: LayerShape  # of its layers, H the width of the verifier's states
    vocabulary: int  # V, the verifier's
    num_layers: int = 1  # its decoder layers; the first has no norm before attention
    fc_bias: bool = True  # whether the layer that combines embedding and state has a bias
    context: int = 2048  # the most tokens it can read


class Eagle1Head(ChainHead):
    """An EAGLE-1 draft head: ``h = fc(cat(E[x_p], f_(p-1)))``, then the layers, whose output predicts f_p.

    Args:
        config: the network.
        unembedding: the verifier's output layer ``(H -> V)``, used as it is.
        embeddings: the verifier's input embeddings ``(V, H)``, also used as they are; None for embeddings of its own.
    """

    kind = "eagle1"

    def __init__(self, config: Eagle1Config, unembedding: nn.Module, embeddings: nn.Module | None = None) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.layers, self.state_size, self.width = (-1,), shape.hidden_size, shape.hidden_size
        self.vocabulary = self.draft_vocabulary = config.vocabulary
        self.num_layers, self.context = config.num_layers, config.context
        self.cached_values = config.num_layers * shape.cached_values
        # Its forward method is not called: hooks on the verifier's output layer catch its last states.
        self._output = Borrowed(unembedding)
        self._take_embeddings(embeddings)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=config.fc_bias)
        self.rotary = Rotary(shape)
        self.blocks = nn.ModuleList(DecoderLayer(shape, normed=index > 0) for index in range(config.num_layers))

    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return states[-1]

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
        states = self.fc(torch.cat([self.embed(ids), features], -1))  # (1, T, H)
        for index, block in enumerate(self.blocks):
            states = block(states, rope, mask, cache, index)
        last, output = last_of(states, keep), self.output_layer
        return ChainPass(linear(last, output.weight, output.bias), last, last)


NAMES = {"blocks.": "layers."}  # How names of weights begin in a file, where they differ from the network's


def read(file: HeadFile) -> Eagle1Head:
    """An EAGLE-1 head; see `read_head`."""
    table = HeadConfig(file.config, file.subject)
    vocabulary, biased = table.take("vocab_size", int), table.take("qkv_bias", bool, False)
    shape = layer_shape(table, qk_norm=False, rope_theta=ROPE_THETA)
    parsed = Eagle1Config(
        # EAGLE's code has no bias in attention's output.
        shape=replace(shape, qkv_bias=biased, output_bias=False),
        vocabulary=vocabulary,
        num_layers=table.take("num_hidden_layers", int, 1),
        fc_bias=table.take("bias", bool, True),
        context=file.context(shape),
    )
    table.end()
    file.require_fit(shape.hidden_size, vocabulary)
    unembedding, shared = file.target.get_output_embeddings(), file.borrowed_embeddings(shape)  # type: ignore[no-untyped-call]
    return file.filled(lambda: Eagle1Head(parsed, unembedding, shared), NAMES)


def describe(head: Eagle1Head, _: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An EAGLE-1 head as in SafeAILab's files, except the weights' format; see `HeadKind`."""
    config = head.config
    described = {
        "architectures": ["LlamaForCausalLM"],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "attention_bias": False,
        "qkv_bias": config.shape.qkv_bias,
        "bias": config.fc_bias,
    }
    return described, published_weights(head, NAMES)


NOISE = 0.2  # Width of uniform noise on states in training, for a text of 512 tokens, as in SafeAILab's code
RIDGE, TINY_RIDGE = 1e-2, 1e-6  # Of the linear prediction, relative to each input's and to the mean squared size
FEATURE_WEIGHT, DISTRIBUTION_WEIGHT = 1.0, 0.1
"""Weights of the predicted state and of the distribution in the loss (arXiv 2401.15077, section 4.2)."""


def new(recipe: "Recipe", given: "Given") -> Eagle1Head:
    """A head to train; see `HeadKind`."""
    from specctl.models.draft_heads.training import drawn

    config = Eagle1Config(given.shape, given.vocabulary, recipe.depth, context=given.shape.max_positions)
    return drawn(Eagle1Head(config, given.output, given.embeddings))


@torch.no_grad()
def fit(head: Eagle1Head, lessons: "Iterable[Lesson]") -> None:
    """Let a new head begin with the best linear prediction of the verifier's next state.

    ``fc`` gets the least squared error over the answers' places (ridge regression, on the embedding, the state and 1),
    and the output projections of the layers become 0, so that they add nothing at first.
    """
    size = 2 * head.width + 1
    products, wanted = torch.zeros(size, size), torch.zeros(size, head.width)
    for lesson in lessons:
        places = torch.arange(max(lesson.first - 1, 1), len(lesson.ids) - 1, device=lesson.ids.device)
        states = lesson.states[-1]
        known = [head.embed(lesson.ids[places]), states[places - 1], states.new_ones(len(places), 1)]
        rows = torch.cat(known, -1)  # (T, 2 H + 1)
        products += (rows.T @ rows).cpu()
        wanted += (rows.T @ states[places]).cpu()
    scale = products.diagonal() * RIDGE + products.diagonal().mean() * TINY_RIDGE
    solved = torch.linalg.solve(products + scale.diag(), wanted)  # (2 H + 1, H)
    head.fc.weight.copy_(solved[:-1].T)
    head.fc.bias.copy_(solved[-1])
    for name, weight in head.blocks.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()


def loss(head: Eagle1Head, lesson: "Lesson", recipe: "Recipe", generator: torch.Generator) -> torch.Tensor:
    """The loss of an answer; see `HeadKind`."""
    from specctl.models.draft_heads.training import drafted_steps

    def noisy(features: torch.Tensor) -> torch.Tensor:
        shift = torch.rand(features.shape, generator=generator).to(features) - 0.5
        return features + shift * NOISE * 512 / len(lesson.ids)

    return torch.stack([step_loss(step, lesson) for step in drafted_steps(head, lesson, recipe.steps, noisy)]).sum()


def step_loss(step: "Step", lesson: "Lesson") -> torch.Tensor:
    """The distance of features and distributions from the target's, summed over the answer's tokens."""
    from specctl.models.draft_heads.training import law_loss

    target = lesson.logits[step.answer_rows]
    wanted = lesson.states[-1][step.answer_rows + lesson.first - 1]  # those of token x_p stand for the state of p
    feature = smooth_l1_loss(step.features, wanted, reduction="none").mean(-1).sum()
    return FEATURE_WEIGHT * feature + DISTRIBUTION_WEIGHT * law_loss(step.logits, target).sum()
