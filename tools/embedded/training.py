"""The training of one model: its optimisers, its schedule, its losses, and its checkpoints."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from tools.embedded.corpus import batches
from tools.embedded.recipe import CONTEXT, SHAPES, Recipe, build_model, finished

Batch = TypeVar("Batch")


class Trainee:
    """A model, its two optimisers and the schedule they share."""

    def __init__(
        self, name: str, model: LlamaForCausalLM, recipe: Recipe, total_steps: int, compile_forward: bool = False
    ) -> None:
        self.name, self.model, self.recipe, self.total_steps = name, model, recipe, total_steps
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        muon_ids = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in muon_ids]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peak_rates = [recipe.muon_lr, recipe.adamw_lr]
        self.forward: Callable[..., Any] = torch.compile(self.model, dynamic=False) if compile_forward else self.model

    @classmethod
    def embedded(cls, name: str, recipe: Recipe, total_steps: int, compile_forward: bool) -> Self:
        torch.manual_seed(recipe.seed + list(SHAPES).index(name))
        return cls(name, build_model(name), recipe, total_steps, compile_forward)

    @property
    def decay_start(self) -> int:
        return round(self.total_steps * (1 - self.recipe.decay_share))

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:  # (B, L) -> (B, L, V)
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = self.forward(inputs).logits
        return out

    def update(self, loss: torch.Tensor, step: int) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        warm = min(1.0, (step + 1) / self.recipe.warmup_steps)
        decayed = min(1.0, (self.total_steps - step) / max(1, self.total_steps - self.decay_start))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peak_rates, strict=True):
            optimizer.param_groups[0]["lr"] = peak * warm * decayed
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def staged_batches(
    documents: list[torch.Tensor], recipe: Recipe, decay_start: int, start_step: int
) -> Iterator[torch.Tensor]:
    """Batches of short windows until the decay starts, of whole-context windows after it."""
    if start_step < decay_start:
        short = batches(documents, recipe.window, recipe.tokens_per_step, recipe.seed, skip=start_step)
        for _, batch in zip(range(start_step, decay_start), short, strict=False):
            yield batch
    skip = max(0, start_step - decay_start)
    yield from batches(documents, CONTEXT, recipe.tokens_per_step, recipe.seed + 10_000, skip=skip)


def staged(documents: list[torch.Tensor], trainee: Trainee) -> Callable[[int], Iterator[torch.Tensor]]:
    return partial(staged_batches, documents, trainee.recipe, trainee.decay_start)


def run_steps(
    trainees: list[Trainee],
    batches_from: Callable[[int], Iterator[Batch]],
    checkpoint: Path,
    losses: Callable[[Batch], list[torch.Tensor]],
    report: Callable[[], None] = lambda: None,
) -> None:
    """Train until ``total_steps`` on the batches from a step on; save a checkpoint every 200 steps, and resume from it.

    ``report`` is called after each checkpoint.
    """
    recipe, total = trainees[0].recipe, trainees[0].total_steps
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        for trainee in trainees:
            trainee.load(saved[trainee.name])
    began, first = time.monotonic(), step
    for batch in batches_from(step):
        if step >= total:
            break
        values = losses(batch)
        for trainee, loss in zip(trainees, values, strict=True):
            trainee.update(loss, step)
        step += 1
        if step % 20 == 0:
            rate = (time.monotonic() - began) / (step - first)
            shown = "  ".join(f"{t.name} {v.item():.3f}" for t, v in zip(trainees, values, strict=True))
            print(
                f"step {step}/{total}  {shown}  {recipe.tokens_per_step / rate:.0f} tokens/s  "
                f"{(total - step) * rate / 60:.0f} min left",
                flush=True,
            )
        if step % 200 == 0 or step == total:
            state = {"step": step} | {t.name: t.state() for t in trainees}
            torch.save(state, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
            report()


def train_target(recipe: Recipe, documents: list[torch.Tensor], work: Path, compile_forward: bool) -> LlamaForCausalLM:
    trainee = Trainee.embedded("target", recipe, recipe.target_steps, compile_forward)

    def next_token_loss(batch: torch.Tensor) -> list[torch.Tensor]:
        logits = trainee.logits(batch[:, :-1])
        return [cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())]

    run_steps([trainee], staged(documents, trainee), work / "target.pt", next_token_loss)
    rounded = trainee.model.bfloat16().float()  # type: ignore[no-untyped-call]
    return finished(rounded)


def distil_student(
    name: str,
    steps: int,
    recipe: Recipe,
    documents: list[torch.Tensor],
    top: tuple[torch.Tensor, torch.Tensor],
    work: Path,
    compile_forward: bool,
) -> LlamaForCausalLM:
    """Train a student on the target's likeliest tokens (`likeliest`): forward KL, plus the argmax as a label."""
    top_ids, top_log_probs = top
    tokens = torch.cat(documents)
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0).tolist()
    positions = [torch.arange(start, end) for start, end in pairwise(offsets)]
    trainee = Trainee.embedded(name, recipe, steps, compile_forward)

    def distillation_loss(batch: torch.Tensor) -> list[torch.Tensor]:  # (B, L + 1) positions in `tokens`
        here = batch[:, :-1]
        found = trainee.logits(tokens[here]).float().log_softmax(-1)  # (B, L, V)
        wanted_ids, wanted = top_ids[here].long(), top_log_probs[here].float()
        found_there = found.gather(-1, wanted_ids)  # (B, L, count)
        divergence = (wanted.exp() * (wanted - found_there)).sum(-1).mean()
        return [divergence - recipe.argmax_weight * found_there[..., 0].mean()]

    run_steps([trainee], staged(positions, trainee), work / f"{name}.pt", distillation_loss)
    return finished(trainee.model)


@torch.inference_mode()
def validation_loss(model: LlamaForCausalLM, documents: list[torch.Tensor]) -> float:
    """Mean next-token cross-entropy in nats over whole documents."""
    total, count = 0.0, 0
    for document in documents:
        ids = document[None, : CONTEXT + 1]
        logits = model(ids[:, :-1]).logits[0].float()
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count
