"""The training loop over epochs, and its state in one file, from which it resumes bit for bit."""

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.optim import Optimizer

from specctl.errors import UsageError
from specctl.outputs import naming, write_whole

SAVE_SECONDS = 20.0  # Time between two checkpoints: the most training time lost when a run is killed


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a training."""

    epochs: int = 3  # passes over the items, each in a new order
    batch_size: int = 8  # items in a step
    lr: float = 5e-5  # the highest learning rate; it falls to 0 along half a cosine
    seed: int = 0  # of the weights, the order of the items, and all other random choices of a learner

    def rate(self, step: int, steps: int, warm_up: float) -> float:
        """The learning rate of a step, counted from 0; ``warm_up`` is the share of the steps in which it rises."""
        warm = max(1, round(warm_up * steps))
        return self.lr * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Learner(ABC):
    """Networks that learn from numbered items.

    Attributes:
        warm_up: share of the steps in which the learning rate rises.
    """

    networks: Sequence[nn.Module]  # the networks to train
    optimizers: Sequence[Optimizer]  # of their weights
    # what the training depends on, besides schedule and number of items, as JSON values
    facts: dict[str, Any]
    warm_up = 0.0
    clip: float | None = None  # the largest gradient norm of a network; None for no limit

    @abstractmethod
    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:
        """Accumulate the gradients of the items with these indices; random draws depend on the arguments and a seed
        only.

        ``epoch`` and ``step`` are counted from 0.
        """


class Training:
    """Trains networks, and can resume where an earlier run ended.

    Args:
        learner: its weights change.
        schedule: epochs, batch size, learning rate and seed.
        items: the number of items to learn from, at least one.
        checkpoint: file with the state of the training. If it exists, the training continues from this state, with the
            same result as without an interruption.

    Attributes:
        step, steps: number of steps done, and in total.
        seconds: training time so far, over all runs.

    Raises:
        UsageError: the checkpoint is damaged or belongs to another training run.
    """

    def __init__(self, learner: Learner, schedule: Schedule, items: int, checkpoint: Path) -> None:
        self._learner, self._schedule, self._items, self._path = learner, schedule, items, checkpoint
        self._facts = json.dumps({**learner.facts, "schedule": asdict(schedule), "items": items})
        self._per_epoch = math.ceil(items / schedule.batch_size)
        self.steps = schedule.epochs * self._per_epoch
        self.step, self.seconds = 0, 0.0
        if checkpoint.is_file():
            self._restore()

    def run(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Train to the end. An interrupt leaves a checkpoint of the last whole step."""
        saved, changing = perf_counter(), False
        for network in self._learner.networks:
            network.train()
        try:
            while self.step < self.steps:
                epoch, done = divmod(self.step, self._per_epoch)
                for batch in batches(self._items, self._schedule, epoch)[done:]:
                    began = perf_counter()
                    for optimizer in self._learner.optimizers:
                        optimizer.zero_grad()
                    self._learner.gradients(batch, epoch, self.step)
                    changing = True
                    self._descend()
                    self.step += 1
                    changing = False
                    self.seconds += perf_counter() - began
                    after_step()
                    if perf_counter() - saved > SAVE_SECONDS or self.step % self._per_epoch == 0:
                        self._save()
                        saved = perf_counter()
        except KeyboardInterrupt:
            if not changing and self.step:
                self._save()
            raise
        for network in self._learner.networks:
            network.eval()

    def _descend(self) -> None:
        if self._learner.clip is not None:
            for network in self._learner.networks:
                nn.utils.clip_grad_norm_(network.parameters(), self._learner.clip)
        rate = self._schedule.rate(self.step, self.steps, self._learner.warm_up)
        for optimizer in self._learner.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def _save(self) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for number, network in enumerate(self._learner.networks):
            tensors |= {f"module/{number}/{name}": weight for name, weight in network.state_dict().items()}
        for number, optimizer in enumerate(self._learner.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer/{number}/{index}/{name}": value for name, value in state.items()}
        metadata = {"facts": self._facts, "step": str(self.step), "seconds": str(self.seconds)}
        with naming(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_whole(self._path, save(plain, metadata))

    def _restore(self) -> None:
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("facts") != self._facts:
                    hint = "resume with the same options, or delete it"
                    raise UsageError(f"{self._path} belongs to another training run", hint)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self._path} is damaged ({error})", "delete it to train from the start") from error
        for number, network in enumerate(self._learner.networks):
            network.load_state_dict(_below(tensors, f"module/{number}/"))
        for number, optimizer in enumerate(self._learner.optimizers):
            states: dict[int, dict[str, Any]] = {}
            for name, tensor in _below(tensors, f"optimizer/{number}/").items():
                index, _, key = name.partition("/")
                states.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def batches(items: int, schedule: Schedule, epoch: int) -> list[list[int]]:
    """The indices of items for each step of an epoch, in an order that depends on seed and epoch only."""
    order = list(range(items))
    random.Random(f"order/{schedule.seed}/{epoch}").shuffle(order)
    return [order[first : first + schedule.batch_size] for first in range(0, items, schedule.batch_size)]
