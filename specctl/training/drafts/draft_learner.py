"""The training of one draft head."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.glide import GlideHead
from specctl.models.head_files.draft_head import HeadKind
from specctl.training import saved_state
from specctl.training.drafts.blocks import drafted_blocks
from specctl.training.drafts.chains import drafted_steps
from specctl.training.drafts.lessons import Lesson, Teacher
from specctl.training.drafts.losses import dflash_loss, dspark_loss, eagle1_loss, eagle3_loss, mtp_loss, text_loss
from specctl.training.drafts.recipes import Recipe, Schedule
from specctl.training.drafts.stretches import stretched
from specctl.training.drafts.target_answers import Answer, batches
from specctl.training.saved_state import SavedState

WARM_UP = 0.04
"""Share of the steps in which the learning rate rises."""
CLIP = 0.5
"""The longest gradient."""
NOISE = 0.2
"""Width of EAGLE-1's uniform noise on states, for a text of 512 tokens."""


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
            loss = lesson_loss(self.head, self._recipe, lesson, generator) / tokens
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
