"""A draft head that learns."""

import random
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.training.drafts.courses import COURSES
from specctl.training.drafts.lessons import Teacher
from specctl.training.drafts.recipes import Recipe
from specctl.training.drafts.target_answers import Answer
from specctl.training.epochs import Learner


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
        self._loss = COURSES[recipe.kind].loss
        self.facts = {"recipe": asdict(recipe)}
        self.loss: float | None = None

    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:  # noqa: ARG002 - the step tells it
        """Add up the gradients of a batch's mean loss by answer token."""
        generator = torch.Generator().manual_seed(random.Random(f"step/{self._seed}/{step}").getrandbits(63))
        answers = [self._answers[index] for index in batch]
        tokens, total = sum(len(answer.tokens) for answer in answers), 0.0
        for answer in answers:
            lesson = self._teacher.lesson(answer.prompt, answer.tokens)
            loss = self._loss(self.head, lesson, self._recipe, generator) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.loss = total


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
