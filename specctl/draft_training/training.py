"""The training of one draft head."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from specctl.draft_training.answers import Answer, batches
from specctl.draft_training.courses import COURSES
from specctl.draft_training.lessons import Teacher
from specctl.draft_training.recipes import Recipe, Schedule
from specctl.learning import saved_state
from specctl.learning.saved_state import SavedState
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead

WARM_UP = 0.04
"""Share of the steps in which the learning rate rises."""
CLIP = 0.5
"""The longest gradient."""


class Training:
    """Trains a head on a target's answers.

    Args:
        head: its weights change.
        recipe: how it drafts in training.
        schedule: the course.
        teacher: the target, which reads every answer anew in every epoch: its states would fill a disk.
        answers: at least one.
        checkpoint: file with the state of the training. If it exists, the training continues from this state, with the
            same result as without an interruption.

    Attributes:
        step, steps: number of steps done, and in total.
        seconds: training time so far, over all runs.
        loss: of the last step, in nats for most kinds; None before the first.

    Raises:
        UsageError: the checkpoint is damaged or belongs to another training run.
    """

    def __init__(
        self,
        head: ChainHead | BlockHead,
        recipe: Recipe,
        schedule: Schedule,
        teacher: Teacher,
        answers: Sequence[Answer],
        checkpoint: Path,
    ) -> None:
        self.head, self._recipe, self._schedule = head, recipe, schedule
        self._loss = COURSES[recipe.kind].loss
        self._teacher, self._answers = teacher, answers
        self._optimizers = _optimizers(head, schedule)
        facts = {"recipe": asdict(recipe), "schedule": asdict(schedule), "answers": len(answers)}
        self._saved = SavedState(checkpoint, facts, [head], self._optimizers)
        self._per_epoch = math.ceil(len(answers) / schedule.batch_size)
        self.steps = schedule.epochs * self._per_epoch
        self.step, self.seconds = self._saved.restore()
        self.loss: float | None = None

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end. An interrupt leaves a checkpoint of the last whole step."""
        saved, changing = perf_counter(), False
        self.head.train()
        try:
            while self.step < self.steps:
                epoch, done = divmod(self.step, self._per_epoch)
                size, seed = self._schedule.batch_size, self._schedule.seed
                for number, batch in enumerate(batches(self._answers, size, epoch, seed)):
                    if number < done:
                        continue
                    began = perf_counter()
                    self.loss = self._gradients(batch)
                    changing = True
                    self._descend()
                    self.step += 1
                    changing = False
                    self.seconds += perf_counter() - began
                    after_step()
                    if perf_counter() - saved > saved_state.SAVE_SECONDS or self.step == self.steps:
                        self._saved.save(self.step, self.seconds)
                        saved = perf_counter()
        except KeyboardInterrupt:
            if not changing and self.step:
                self._saved.save(self.step, self.seconds)
            raise
        self.head.eval()

    def _gradients(self, batch: Sequence[Answer]) -> float:
        """Add up the gradients of a batch's mean loss by answer token; that loss."""
        # Depends on the seed and the step only, so that a resumed run needs no random state.
        seed = random.Random(f"step/{self._schedule.seed}/{self.step}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        tokens, total = sum(len(answer.tokens) for answer in batch), 0.0
        for answer in batch:
            lesson = self._teacher.lesson(answer.prompt, answer.tokens)
            loss = self._loss(self.head, lesson, self._recipe, generator) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def _descend(self) -> None:
        nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(self._schedule.lr, self.step, self.steps)
            optimizer.step()


def rate(highest: float, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0."""
    warm = max(1, round(WARM_UP * steps))
    return highest * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _optimizers(head: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    named = [(name, weight) for name, weight in head.named_parameters() if weight.requires_grad]
    matrices: list[nn.Parameter] = []
    if schedule.optimizer == "muon":
        outer = ("embed_tokens", "lm_head", "markov_head", "confidence")
        matrices = [weight for name, weight in named if weight.ndim == 2 and not name.startswith(outer)]
    inner = {id(weight) for weight in matrices}
    others = [weight for _, weight in named if id(weight) not in inner]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=schedule.lr, betas=(0.9, 0.95), weight_decay=0.0)
    ]
    if matrices:
        # Scaled so that it takes the same learning rate as AdamW.
        found.append(torch.optim.Muon(matrices, lr=schedule.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found
