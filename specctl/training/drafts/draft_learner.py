"""A draft head that learns."""

import random
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.glide import GlideHead
from specctl.models.head_files.draft_head import HeadKind
from specctl.training.drafts.blocks import drafted_blocks
from specctl.training.drafts.chains import drafted_steps
from specctl.training.drafts.lessons import Lesson, Teacher
from specctl.training.drafts.losses import dflash_loss, dspark_loss, eagle1_loss, eagle3_loss, mtp_loss, text_loss
from specctl.training.drafts.recipes import Recipe
from specctl.training.drafts.stretches import stretched
from specctl.training.drafts.target_answers import Answer
from specctl.training.epochs import Learner

NOISE = 0.2
"""Width of EAGLE-1's uniform noise on states, for a text of 512 tokens."""


class DraftLearner(Learner):
    """A draft head that learns from a target's answers.

    Args:
        head: its weights change.
        recipe: how it drafts in training.
        teacher: the target, which reads every answer anew in every epoch: its states would fill a disk.
        answers: at least one.
        seed: of noise and anchors.

    Attributes:
        loss: of the last step, in nats for most kinds; None before the first.
    """

    warm_up = 0.04
    clip = 0.5

    def __init__(
        self, head: ChainHead | BlockHead, recipe: Recipe, teacher: Teacher, answers: Sequence[Answer], seed: int
    ) -> None:
        self.head, self._recipe, self._teacher, self._answers, self._seed = head, recipe, teacher, answers, seed
        self.networks, self.optimizers = [head], _optimizers(head, recipe.optimizer)
        self.facts = {"recipe": asdict(recipe)}
        self.loss: float | None = None

    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:  # noqa: ARG002 - the step tells it
        """Add up the gradients of a batch's mean loss by answer token."""
        generator = torch.Generator().manual_seed(random.Random(f"step/{self._seed}/{step}").getrandbits(63))
        answers = [self._answers[index] for index in batch]
        tokens, total = sum(len(answer.tokens) for answer in answers), 0.0
        for answer in answers:
            lesson = self._teacher.lesson(answer.prompt, answer.tokens)
            loss = lesson_loss(self.head, self._recipe, lesson, generator) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.loss = total


def lesson_loss(
    head: ChainHead | BlockHead, recipe: Recipe, lesson: Lesson, generator: torch.Generator
) -> torch.Tensor:
    """The loss of one answer, a sum over its tokens ``()``.

    Args:
        head: of the recipe's kind.
        recipe: how it drafts.
        lesson: an answer of at least two tokens.
        generator: on the CPU, for noise and anchors.
    """
    vocabulary: torch.Tensor | None = getattr(head, "tokens", None)
    if isinstance(head, BlockHead):
        count = min(recipe.anchors, lesson.length - 1)
        chosen = torch.randperm(lesson.length - 1, generator=generator)[:count].sort().values
        blocks = drafted_blocks(head, lesson, chosen.to(lesson.ids.device) + lesson.first - 1)
        of_blocks = dspark_loss if recipe.kind is HeadKind.DSPARK else dflash_loss
        return of_blocks(blocks, lesson, recipe.gamma, vocabulary) * lesson.length
    if isinstance(head, GlideHead):
        offset = int(torch.randint(recipe.steps, (), generator=generator))
        return text_loss(stretched(head, lesson, recipe.steps, offset), lesson)
    if recipe.kind is HeadKind.EAGLE1:

        def noisy(rows: torch.Tensor) -> torch.Tensor:
            shift = torch.rand(rows.shape, generator=generator).to(rows) - 0.5
            return rows + shift * NOISE * 512 / len(lesson.ids)

        losses = [eagle1_loss(step, lesson) for step in drafted_steps(head, lesson, recipe.steps, noisy)]
    elif recipe.kind is HeadKind.MTP:
        losses = [mtp_loss(step, lesson, recipe.steps) for step in drafted_steps(head, lesson, recipe.steps)]
    else:
        longer = torch.rand(lesson.length, generator=generator).to(lesson.ids.device) < recipe.rounds
        steps = drafted_steps(head, lesson, recipe.steps, longer=longer)
        losses = [eagle3_loss(step, lesson, vocabulary, recipe.rounds) for step in steps]
    return torch.stack(losses).sum()


def _optimizers(head: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    named = [(name, weight) for name, weight in head.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if kind == "muon":
        outer = ("embed_tokens", "lm_head", "markov_head", "confidence")
        matrices = [weight for name, weight in named if weight.ndim == 2 and not name.startswith(outer)]
    inner = {id(weight) for weight in matrices}
    others = [weight for _, weight in named if id(weight) not in inner]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    if matrices:
        # Scaled so that it takes the same learning rate as AdamW.
        found.append(torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found
