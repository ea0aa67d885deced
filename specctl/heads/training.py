"""Heads learn together from one frozen draft."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from specctl.errors import UsageError
from specctl.heads.examples import Example
from specctl.heads.mixing import Mixed, acceptance, mix, signals, states
from specctl.models.running.acceptance_head import AcceptanceHead

SAVE_SECONDS = 20.0
"""What a kill can cost."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One head of a training.

    Attributes:
        depth: D, residual blocks.
        reject_weight: w_rej, how much a refusal counts; an acceptance counts 1.
    """

    depth: int = 3
    reject_weight: float = 6.0

    @property
    def name(self) -> str:
        return f"d{self.depth}-w{self.reject_weight:g}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the heads of a training share; the defaults are SpecDec++'s for 40k prompts and a 7B draft.

    Attributes:
        mix: r, the share of the target's tokens in what the draft reads.
        epochs: passes over the examples, each mixed anew.
        batch_size: sequences in a step.
        lr: Adam's at first; it follows half a cosine to 0.
        seed: of the heads, the order and the mixing.
        signals: whether the heads read the draft's signals too, which is not in the paper.
    """

    mix: float = 0.15
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
    """Weighted binary cross-entropy with soft labels, the weighted mean over positions.

    Args:
        logits: ``(N,)`` of acceptance.
        accepted: ``(N,)`` P.
        reject_weight: w_rej.
    """
    refused = reject_weight * (1 - accepted)
    return -(accepted * logsigmoid(logits) + refused * logsigmoid(-logits)).sum() / (accepted + refused).sum()


class Training:
    """Trains one head for each recipe; each pass of the draft feeds them all.

    Args:
        draft: frozen.
        recipes: one for each head, no two alike.
        schedule: what they share.
        examples: at least one.
        checkpoint: where the state is kept; if it is there, the training goes on from it as if nothing had happened.

    Attributes:
        heads: in the order of the recipes.
        step, steps: how many are done, and how many there are.
        seconds: of training so far, over all runs.

    Raises:
        UsageError: the checkpoint is damaged or of another training.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        recipes: Sequence[Recipe],
        schedule: Schedule,
        examples: Sequence[Example],
        checkpoint: Path,
    ) -> None:
        self._draft, self._schedule, self._examples, self._checkpoint = draft, schedule, examples, checkpoint
        self._recipes = list(recipes)
        device = next(draft.parameters()).device
        self.heads = [new_head(draft.config.get_text_config().hidden_size, r, schedule) for r in recipes]
        for head in self.heads:
            head.to(device).train()
        self._optimizers = [torch.optim.Adam(head.parameters(), lr=schedule.lr) for head in self.heads]
        self.step, self.steps = 0, schedule.steps(len(examples))
        self.seconds = 0.0
        self._facts = json.dumps(
            {"recipes": [asdict(r) for r in recipes], "schedule": asdict(schedule), "examples": len(examples)}
        )
        if checkpoint.is_file():
            self._restore()

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end."""
        per_epoch = self.steps // self._schedule.epochs
        saved = perf_counter()
        while self.step < self.steps:
            epoch, done = divmod(self.step, per_epoch)
            # Made from the seed and the epoch alone: a resumed run needs no state of a generator.
            mixed = mix(self._examples, self._schedule.mix, f"mix/{self._schedule.seed}/{epoch}")
            order = list(range(len(self._examples)))
            random.Random(f"order/{self._schedule.seed}/{epoch}").shuffle(order)
            for first in range(done * self._schedule.batch_size, len(order), self._schedule.batch_size):
                began = perf_counter()
                places = order[first : first + self._schedule.batch_size]
                self._update([self._examples[place] for place in places], [mixed[place] for place in places])
                self.step += 1
                self.seconds += perf_counter() - began
                after_step()
                if perf_counter() - saved > SAVE_SECONDS or first + self._schedule.batch_size >= len(order):
                    self._save()
                    saved = perf_counter()
        for head in self.heads:
            head.eval()

    def _update(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> None:
        accepted = acceptance(examples, mixed)
        if not len(accepted):
            return
        hidden = states(self._draft, mixed)
        accepted, seen = accepted.to(hidden.device), signals(examples, mixed).to(hidden.device)
        for head, optimizer, recipe in zip(self.heads, self._optimizers, self._recipes, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self._schedule.rate(self.step, self.steps)
            optimizer.zero_grad()
            weighted_loss(head(hidden, seen), accepted, recipe.reject_weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _save(self) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for place, (head, optimizer) in enumerate(zip(self.heads, self._optimizers, strict=True)):
            tensors |= {f"{place}/head/{name}": weight for name, weight in head.state_dict().items()}
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{place}/adam/{index}/{name}": value for name, value in state.items()}
        metadata = {"facts": self._facts, "step": str(self.step), "seconds": str(self.seconds)}
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        part = self._checkpoint.with_name(f"{self._checkpoint.name}.part")
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        part.write_bytes(save(plain, metadata))
        part.replace(self._checkpoint)

    def _restore(self) -> None:
        try:
            with safe_open(self._checkpoint, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("facts") != self._facts:
                    raise UsageError(
                        f"{self._checkpoint} is of another training", "resume with the same options, or delete it"
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self._checkpoint} is damaged ({error})", "delete it to train from the start") from error
        for place, (head, optimizer) in enumerate(zip(self.heads, self._optimizers, strict=True)):
            head.load_state_dict(_below(tensors, f"{place}/head/"))
            state: dict[int, dict[str, Any]] = {}
            for name, tensor in _below(tensors, f"{place}/adam/").items():
                index, _, key = name.partition("/")
                state.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])


def new_head(hidden_size: int, recipe: Recipe, schedule: Schedule) -> AcceptanceHead:
    """An untrained head; the same seed makes the same one whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"head/{schedule.seed}/{recipe.depth}").getrandbits(63))
        return AcceptanceHead(hidden_size, recipe.depth, reads_signals=schedule.signals)


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
