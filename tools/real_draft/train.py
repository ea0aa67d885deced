"""Distil a draft from collected answers: ``python -m tools.real_draft.train --target DIR --answers DIR --work DIR``.

Answers come from `tools.real_draft.collect`, which may still be writing: new shards are read when an epoch starts. The
learning rates stay constant until the last ``--decay-share`` of ``--steps``; a run that was stopped goes on from its
checkpoint, with another number of steps too, so that a run of unknown speed is given its end when it nears. After each
checkpoint the draft is written to ``--output`` and its agreement with the target on the ``dev`` answers is printed.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from specctl.models.files.token_counts import TokenCounts
from specctl.outputs import write_whole
from specctl.training.draft_heads import TOKEN_COUNTS
from tools.embedded.recipe import Recipe
from tools.embedded.training import Trainee, run_steps
from tools.real_draft.answers import Answer, unpack
from tools.real_draft.student import (
    Batch,
    Reduction,
    agreement,
    candidates,
    collate,
    distillation_loss,
    drafted_states,
    frequencies,
    new_student,
    reduce_output,
)


class Lessons:
    """The answers of a folder, their states reduced to the draft's width; `refresh` reads new shards."""

    def __init__(self, folder: Path, names: Sequence[str], projection: torch.Tensor) -> None:
        self.folder, self.names, self.projection = folder, names, projection
        self.seen: set[Path] = set()
        self.answers: list[Answer] = []
        self.refresh()

    def refresh(self) -> None:
        for name in self.names:
            for path in sorted((self.folder / name).glob("shard-*.safetensors")):
                if path not in self.seen:
                    self.seen.add(path)
                    for answer in unpack(load_file(path)):
                        reduced = (answer.states.float() @ self.projection).half()
                        self.answers.append(replace(answer, states=reduced))

    def epochs(self, tokens: int, seed: int) -> Iterator[Batch]:
        """Endless batches of at most ``tokens`` tokens, padding included, of answers of similar length."""
        epoch = 0
        while True:
            self.refresh()
            yield from epoch_batches(self.answers, tokens, seed + epoch)
            epoch += 1


def epoch_batches(answers: Sequence[Answer], tokens: int, seed: int) -> Iterator[Batch]:
    """Each answer once, in batches of at most ``tokens`` tokens (or one answer), in a seeded order."""
    chooser = random.Random(seed)
    lengths = [len(answer.ids) for answer in answers]
    order = sorted(range(len(answers)), key=lambda index: lengths[index] + chooser.uniform(-8, 8))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not groups or longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    chooser.shuffle(groups)
    for group in groups:
        yield collate([answers[index] for index in group])


def reduction_of(target: Path, answers: Path, width: int, path: Path) -> Reduction:
    """The reduction that a run started from; computed from the answers there are when it starts."""
    if path.exists():
        return Reduction(**torch.load(path, weights_only=True))
    with safe_open(target / "model.safetensors", "pt") as weights:  # tied: the embedding is the output layer
        output = weights.get_tensor("model.embed_tokens.weight").float()
    files = sorted(answers.glob("[gw]*/shard-*.safetensors"))
    known = [answer for file in files for answer in unpack(load_file(file))]
    states = torch.cat([answer.states for answer in known]).float()
    reduction = reduce_output(output, states, frequencies(known, len(output)), width)
    torch.save({name: getattr(reduction, name) for name in Reduction.__slots__}, path)
    return reduction


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True, help="safetensors folder with tied embeddings")
    parser.add_argument("--answers", type=Path, required=True, help="folder of tools.real_draft.collect")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="where the draft goes")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--feed-forward", type=int, default=512)
    parser.add_argument("--head", type=int, default=64, help="width of an attention head")
    parser.add_argument("--always", type=int, default=3072, help="most frequent tokens that every loss compares")
    parser.add_argument("--drawn", type=int, default=1024, help="other tokens that every loss compares")
    parser.add_argument("--argmax-weight", type=float, default=1.0)
    parser.add_argument("--state-weight", type=float, default=1.0)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adamw-lr", type=float, default=1e-3)
    parser.add_argument("--decay-share", type=float, default=0.25)
    parser.add_argument("--warmup-steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    reduction = reduction_of(args.target, args.answers, args.width, args.work / "reduction.pt")
    lessons = Lessons(args.answers, ("given", "written"), reduction.states)
    held_out = list(epoch_batches(Lessons(args.answers, ("dev",), reduction.states).answers, 2048, 0))
    recipe = replace(
        Recipe(),
        seed=args.seed,
        tokens_per_step=args.tokens_per_step,
        muon_lr=args.muon_lr,
        adamw_lr=args.adamw_lr,
        decay_share=args.decay_share,
        warmup_steps=args.warmup_steps,
    )
    torch.manual_seed(args.seed)
    config = LlamaConfig.from_pretrained(args.target)
    model = new_student(config, reduction, args.layers, args.feed_forward, args.head)
    trainee = Trainee("draft", model, recipe, args.steps)
    generator = torch.Generator().manual_seed(args.seed)

    def losses(batch: Batch) -> list[torch.Tensor]:
        chosen = candidates(batch.top_ids, reduction.frequent, args.always, args.drawn, generator)
        table = model.model.embed_tokens.weight
        with torch.autocast("cpu", torch.bfloat16):
            states = drafted_states(model, batch)
            return [
                distillation_loss(
                    states, table, batch, chosen, args.argmax_weight, args.state_weight, reduction.importance
                )
            ]

    def report() -> None:
        few = reduction.frequent[:8192]
        shown = f"agreement {agreement(model, held_out):.4f}, of 8192 tokens {agreement(model, held_out, few):.4f}"
        print(f"{shown}, {sum(len(a.top_ids) for a in lessons.answers)} tokens to learn from", flush=True)
        model.generation_config = GenerationConfig.from_pretrained(args.target)
        model.save_pretrained(args.output)
        AutoTokenizer.from_pretrained(args.target).save_pretrained(args.output)
        counts = TokenCounts.of(answer.top_ids[:, 0].tolist() for answer in lessons.answers)
        write_whole(args.output / TOKEN_COUNTS, counts.text())

    run_steps(
        [trainee],
        lambda step: lessons.epochs(args.tokens_per_step, args.seed + step),
        args.work / "draft.pt",
        losses,
        report,
    )


if __name__ == "__main__":
    main()
