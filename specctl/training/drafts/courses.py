"""How each kind of draft head is made and trained, a row for each: the published settings, and what computes with them.

EAGLE-1 and EAGLE-3 as in SafeAILab's code; GliDe and DFlash as in their papers; MTP as in FastMTP; DSpark as in
DeepSpec's code.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockConfig, BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.dflash import spread_layers
from specctl.models.draft_heads.eagle1 import Eagle1Config, Eagle1Head
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.glide import GlideConfig, GlideHead, VerifierKeys, top_layers
from specctl.models.draft_heads.mtp import MtpHead
from specctl.training.drafts.blocks import Blocks, drafted_blocks
from specctl.training.drafts.chains import drafted_steps, stretched
from specctl.training.drafts.lessons import Lesson
from specctl.training.drafts.losses import dflash_loss, dspark_loss, eagle1_loss, eagle3_loss, mtp_loss, text_loss
from specctl.training.drafts.networks import Given, drawn
from specctl.training.drafts.recipes import Recipe

NOISE = 0.2
"""Width of EAGLE-1's uniform noise on states, for a text of 512 tokens."""
SOURCES = 5
"""Layers that a block head reads."""


@dataclass(frozen=True, slots=True)
class Course:
    """How heads of one kind are trained.

    Attributes:
        recipe: the published settings.
        flags: its fields that a user may set.
        new: makes a head with weights from torch's default generator (`drawn`), on the CPU but for what is shared.
        loss: the loss of one answer, a sum over its tokens ``()``, of a head of this kind, an answer of at least two
            tokens, a recipe, and a generator on the CPU for noise and anchors.
    """

    recipe: Recipe
    flags: frozenset[str]
    new: Callable[[Recipe, Given], ChainHead | BlockHead]
    loss: Callable[[Any, Lesson, Recipe, torch.Generator], torch.Tensor]


def _new_eagle1(recipe: Recipe, given: Given) -> Eagle1Head:
    config = Eagle1Config(given.shape, given.vocabulary, recipe.depth, context=given.shape.max_positions)
    return drawn(Eagle1Head(config, given.output, given.embeddings))


def _loss_eagle1(head: Eagle1Head, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    def noisy(rows: torch.Tensor) -> torch.Tensor:
        shift = torch.rand(rows.shape, generator=generator).to(rows) - 0.5
        return rows + shift * NOISE * 512 / len(lesson.ids)

    losses = [eagle1_loss(step, lesson) for step in drafted_steps(head, lesson, recipe.steps, noisy)]
    return torch.stack(losses).sum()


def _new_eagle3(recipe: Recipe, given: Given) -> Eagle3Head:
    """It reads an early, a middle and a late layer, and begins with the target's output layer."""
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


def _loss_eagle3(head: Eagle3Head, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    longer = torch.rand(lesson.length, generator=generator).to(lesson.ids.device) < recipe.rounds
    steps = drafted_steps(head, lesson, recipe.steps, longer=longer)
    return torch.stack([eagle3_loss(step, lesson, head.tokens, recipe.rounds) for step in steps]).sum()


def _new_glide(recipe: Recipe, given: Given) -> GlideHead:
    """It begins with the target's embeddings and output layer."""
    if recipe.depth > given.depth:
        raise ModelError(
            f"A GliDe head of {recipe.depth} layers reads as many of the target, which has {given.depth}.",
            f"Let --depth be at most {given.depth}.",
        )
    config = GlideConfig(given.shape, given.vocabulary, recipe.depth, recipe.steps, given.shape.max_positions)
    head = drawn(GlideHead(config, VerifierKeys(given.target, top_layers(given.depth, recipe.depth))))
    head.embed_tokens.weight.data.copy_(given.embeddings.weight)
    head.lm_head.weight.data.copy_(given.output.weight)
    return head


def _loss_glide(head: GlideHead, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    offset = int(torch.randint(recipe.steps, (), generator=generator))
    return text_loss(stretched(head, lesson, recipe.steps, offset), lesson)


def _new_mtp(_: Recipe, given: Given) -> MtpHead:
    head = MtpHead(given.target).float()
    head.share(given.embeddings, given.output)
    return drawn(head)


def _loss_mtp(head: MtpHead, lesson: Lesson, recipe: Recipe, _: torch.Generator) -> torch.Tensor:
    losses = [mtp_loss(step, lesson, recipe.steps) for step in drafted_steps(head, lesson, recipe.steps)]
    return torch.stack(losses).sum()


def _new_dflash(recipe: Recipe, given: Given) -> BlockHead:
    return drawn(BlockHead(_block(recipe, given), None, given.embeddings, given.output))


def _loss_dflash(head: BlockHead, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    blocks = _anchored(head, lesson, recipe, generator)
    return dflash_loss(blocks, lesson, recipe.gamma, head.tokens) * lesson.length


def _new_dspark(recipe: Recipe, given: Given) -> BlockHead:
    """Its sequential head begins by adding nothing."""
    config = replace(
        _block(recipe, given),
        block_size=recipe.steps,
        from_anchor=True,
        markov="vanilla",
        markov_rank=recipe.markov_rank,
        confidence=True,
        confidence_reads_token=True,
    )
    head = drawn(BlockHead(config, None, given.embeddings, given.output))
    nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head


def _loss_dspark(head: BlockHead, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    blocks = _anchored(head, lesson, recipe, generator)
    return dspark_loss(blocks, lesson, recipe.gamma, head.tokens) * lesson.length


def _block(recipe: Recipe, given: Given) -> BlockConfig:
    """DFlash's block: a place for the newest token, then one for each token to draft."""
    layers = given.existing(layer + 1 for layer in spread_layers(max(given.depth, 4), SOURCES))
    return BlockConfig(
        replace(given.shape, qk_norm=True),
        layers,
        given.vocabulary,
        draft_vocabulary=given.vocabulary,
        num_layers=recipe.depth,
        block_size=recipe.steps + 1,
        mask_token=given.mask_token,
        context=given.shape.max_positions,
    )


def _anchored(head: BlockHead, lesson: Lesson, recipe: Recipe, generator: torch.Generator) -> Blocks:
    """Blocks from random places of the answer."""
    count = min(recipe.anchors, lesson.length - 1)
    chosen = torch.randperm(lesson.length - 1, generator=generator)[:count].sort().values
    return drafted_blocks(head, lesson, chosen.to(lesson.ids.device) + lesson.first - 1)


_BLOCK_FLAGS = frozenset({"depth", "steps", "anchors"})
COURSES = {
    course.recipe.kind: course
    for course in (
        Course(Recipe("eagle1"), frozenset({"depth"}), _new_eagle1, _loss_eagle1),
        Course(Recipe("eagle3", steps=7), frozenset({"depth", "steps", "draft_vocabulary"}), _new_eagle3, _loss_eagle3),
        Course(Recipe("glide", steps=5), frozenset({"depth", "steps"}), _new_glide, _loss_glide),
        Course(Recipe("mtp", steps=3), frozenset({"steps"}), _new_mtp, _loss_mtp),
        Course(
            Recipe("dflash", depth=5, steps=15, anchors=512, gamma=7.0),
            _BLOCK_FLAGS,
            _new_dflash,
            _loss_dflash,
        ),
        Course(
            Recipe("dspark", depth=5, steps=7, anchors=512, gamma=4.0, markov_rank=256),
            _BLOCK_FLAGS,
            _new_dspark,
            _loss_dspark,
        ),
    )
}
"""By kind."""


def new_head(
    recipe: Recipe, target: PreTrainedModel, tokens: torch.Tensor | None, mask_token: int, seed: int
) -> ChainHead | BlockHead:
    """A head to train, in float32 on the device of the target's embeddings; the same seed gives the same weights.

    What it shares with the target are copies in float32, neither trained nor written.

    Args:
        recipe: its kind and size.
        target: the model that it is to draft for.
        tokens: ids ``(D,)`` of its draft vocabulary, rising; None for all.
        mask_token: stands for what a block head is to draft.
        seed: of the weights.

    Raises:
        ModelError: the target has no output layer that can be copied, or no layer that an MTP head could be.
    """
    given = Given.of(target, tokens, mask_token)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"draft head/{seed}/{recipe.kind}").getrandbits(63))
        head = COURSES[recipe.kind].new(recipe, given)
    return head.to(given.embeddings.weight.device)
