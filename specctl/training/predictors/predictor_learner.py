"""Training of several heads at once on one frozen draft."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch.nn.functional import logsigmoid

from specctl.models.predictors.acceptance_head import AcceptanceHead
from specctl.training import saved_state
from specctl.training.predictors.disco_network import DiscoNetwork, new_network
from specctl.training.predictors.draft_states import DraftStates
from specctl.training.predictors.examples import Example
from specctl.training.predictors.mixing import Mixed, acceptance, signals
from specctl.training.saved_state import SavedState

Trained = AcceptanceHead | DiscoNetwork
MIX = 0.15
"""SpecDec++'s share of the target's tokens in what a draft model reads."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One head of a training run.

    Attributes:
        depth: D, the number of residual blocks; None for a DISCO head, which has none.
        reject_weight: w_rej, the weight of a rejection in the loss; an acceptance has weight 1.
    """

    depth: int | None = 3
    reject_weight: float = 6.0

    @property
    def name(self) -> str:
        return f"d{self.depth}-w{self.reject_weight:g}" if self.depth is not None else f"w{self.reject_weight:g}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Settings shared by all heads of a training run; the defaults are SpecDec++'s for 40k prompts and a 7B draft.

    Attributes:
        mix: r, the share of the target's tokens in the sequences that a draft model reads; 0 for a draft head.
        epochs: passes over the examples; each pass uses a new mix, if there is one.
        batch_size: sequences in a step.
        lr: Adam's learning rate at the start; it falls to 0 along half a cosine.
        seed: seed of the heads' initial weights, the order of the examples and the mixing.
        signals: whether the heads also read the draft's signals, which SpecDec++'s heads do not.
    """

    mix: float = MIX
    epochs: int = 3
    batch_size: int = 32
    lr: float = 5e-5
    seed: int = 0
    signals: bool = False

    def steps(self, examples: int) -> int:
        return self.epochs * math.ceil(examples / self.batch_size)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * 0.5 * (1 + math.cos(math.pi * step / steps))


def weighted_loss(logits: torch.Tensor, accepted: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """Weighted binary cross-entropy with soft labels: the weighted mean over positions, a scalar.

    Args:
        logits: ``(N,)`` logits of the predicted acceptance.
        accepted: ``(N,)`` acceptance probabilities P.
        reject_weight: w_rej, the weight of a rejection.
    """
    rejected = reject_weight * (1 - accepted)
    return -(accepted * logsigmoid(logits) + rejected * logsigmoid(-logits)).sum() / (accepted + rejected).sum()


class Training:
    """Trains one head for each recipe; all heads use the same hidden states of the draft.

    Args:
        draft: gives the draft's hidden states, which do not change.
        recipes: one for each head, all different.
        schedule: settings shared by all heads.
        examples: the training examples, at least one.
        checkpoint: file with the state of the training. If it exists, the training continues from this state, with the
            same result as without an interruption.

    Attributes:
        heads: the heads, in the order of the recipes.
        step, steps: number of steps done, and in total.
        seconds: training time so far, over all runs.

    Raises:
        UsageError: the checkpoint is damaged or belongs to another training run.
    """

    def __init__(
        self,
        draft: DraftStates,
        recipes: Sequence[Recipe],
        schedule: Schedule,
        examples: Sequence[Example],
        checkpoint: Path,
    ) -> None:
        self._draft, self._schedule, self._examples = draft, schedule, examples
        self._recipes = list(recipes)
        width = draft.width(examples)
        self.heads: list[Trained] = [
            new_network(examples, schedule.seed) if r.depth is None else new_head(width, r.depth, schedule)
            for r in recipes
        ]
        for head in self.heads:
            head.to(draft.device).train()
        self._optimizers = [torch.optim.Adam(head.parameters(), lr=schedule.lr) for head in self.heads]
        facts = {"recipes": [asdict(r) for r in recipes], "schedule": asdict(schedule), "examples": len(examples)}
        self._saved = SavedState(checkpoint, facts, self.heads, self._optimizers)
        self.steps = schedule.steps(len(examples))
        self.step, self.seconds = self._saved.restore()

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end."""
        per_epoch = self.steps // self._schedule.epochs
        saved = perf_counter()
        while self.step < self.steps:
            epoch, done = divmod(self.step, per_epoch)
            # Depends on the seed and the epoch only, so that a resumed run needs no random state.
            mixed = self._draft.mix(self._examples, self._schedule.mix, f"mix/{self._schedule.seed}/{epoch}")
            order = list(range(len(self._examples)))
            random.Random(f"order/{self._schedule.seed}/{epoch}").shuffle(order)
            for first in range(done * self._schedule.batch_size, len(order), self._schedule.batch_size):
                began = perf_counter()
                batch = order[first : first + self._schedule.batch_size]
                self._update([self._examples[index] for index in batch], [mixed[index] for index in batch])
                self.step += 1
                self.seconds += perf_counter() - began
                after_step()
                if perf_counter() - saved > saved_state.SAVE_SECONDS or first + self._schedule.batch_size >= len(order):
                    self._saved.save(self.step, self.seconds)
                    saved = perf_counter()
        for head in self.heads:
            head.eval()

    def _update(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> None:
        accepted = acceptance(examples, mixed)
        if not len(accepted):
            return
        hidden = self._draft.of(examples, mixed)
        accepted, seen = accepted.to(hidden.device), signals(examples, mixed).to(hidden.device)
        for head, optimizer, recipe in zip(self.heads, self._optimizers, self._recipes, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self._schedule.rate(self.step, self.steps)
            optimizer.zero_grad()
            weighted_loss(head(hidden, seen), accepted, recipe.reject_weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def new_head(hidden_size: int, depth: int, schedule: Schedule) -> AcceptanceHead:
    """An untrained head; the same seed and depth always give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"head/{schedule.seed}/{depth}").getrandbits(63))
        return AcceptanceHead(hidden_size, depth, reads_signals=schedule.signals)
