"""Collect a target's answers for a draft: ``python -m tools.real_draft.collect --target DIR --output DIR ...``.

A shard is written after every batch, and a second start goes on after the last one. The folder gets

- ``given``: the training answers of a folder that ``specctl train-draft --answers-only`` wrote, read by the target;
- ``dev``: that folder's other answers, for the agreement that training reports;
- ``written``: new answers to prompts, to a corpus' questions and to prompts that the target makes up.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from specctl.training.draft_heads import AnswerFolder
from tools.real_draft.answers import AnswerShards, Target, prompt_batches, read_answers, read_prompts, write_answers

HELD_BACK = Path(__file__).parents[1] / "real_prompts.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True, help="safetensors folder of a Llama-like chat model")
    parser.add_argument("--output", type=Path, required=True, help="folder for the answers")
    parser.add_argument("--answers", type=Path, help="folder of specctl train-draft --answers-only")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON Lines files with a prompt a line")
    parser.add_argument("--questions", type=Path, nargs="*", default=[], help="JSON Lines files with a question a line")
    parser.add_argument("--held-back", type=Path, default=HELD_BACK, help="prompts that are never trained on")
    parser.add_argument("--batch", type=int, default=64, help="answers written together")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a prompt at most")
    parser.add_argument("--length", type=int, default=160, help="tokens of an answer at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new batch begins after this number of minutes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    target = Target.load(args.target)

    def work() -> Iterator[tuple[str, int, int]]:
        prompts = [prompt for path in args.prompts for prompt in read_prompts(path)]
        answered: list[str] = []
        if args.answers is not None:
            split = AnswerFolder.open(args.answers).split()
            for name, given in (("dev", split.dev), ("given", split.train)):
                shards = AnswerShards(args.output / name)
                for number, tokens in read_answers(target, given, shards, args.batch, name == "dev"):
                    yield name, number, tokens
            known = {tuple(answer.prompt.tolist()) for answer in (*split.train, *split.dev)}
            answered = [prompt for prompt in prompts if tuple(target.encode(prompt).tolist()) in known]
        held_back = {*read_prompts(args.held_back), *answered}
        rows = [json.loads(line) for path in args.questions for line in path.read_text(encoding="utf-8").splitlines()]
        batches = prompt_batches(prompts, [row["question"] for row in rows], held_back, args.batch, args.seed)
        shards = AnswerShards(args.output / "written")
        for number, tokens in write_answers(target, batches, shards, args.longest, args.length, args.seed):
            yield "written", number, tokens

    total = 0
    for name, number, tokens in work():
        total += tokens
        minutes = (time.monotonic() - began) / 60
        print(f"{name} {number}: {tokens} tokens, {total} in {minutes:.1f} min", flush=True)
        if minutes > args.minutes:
            break


if __name__ == "__main__":
    main()
