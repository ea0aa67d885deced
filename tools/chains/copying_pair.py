"""A pair of models that follow edits: ``python -m tools.chains.copying_pair --corpus DIR --output FOLDER``.

The embedded target answers an edit with a few tokens of a story. A chain of a lookup and a model is worth most where a
target copies, so the embedded target and draft learn from edits (`tools.chains.edits`) and stories here, and are
written to FOLDER/target and FOLDER/draft. Deterministic given ``--seed`` on one machine and one number of threads.
"""

import argparse
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from specctl.profile.schema import model_path
from tools.chains.edits import edit
from tools.embedded.corpus import encode_documents, read_corpus
from tools.embedded.recipe import finished

STORIES = 0.25
"""The share of the texts that are stories as they stand."""
BATCH, LONGEST, PADDING = 8, 640, -1
"""Texts of a batch, tokens of one at most, and what is behind shorter ones, on which nothing is learned."""


def texts(chooser: random.Random, stories: list[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """A batch ``(B, L)`` int64, shorter ones padded."""
    some = []
    for _ in range(BATCH):
        if chooser.random() < STORIES:
            some.append(chooser.choice(stories))
        else:
            one = edit(chooser, stories)
            some.append(one.prompt + one.edited)
    tokens = [each[:LONGEST] for each in encode_documents(tokenizer, some)]
    return pad_sequence(tokens, batch_first=True, padding_value=PADDING)


def learn(
    name: str, steps: int, lr: float, seed: int, stories: list[str], tokenizer: PreTrainedTokenizerBase
) -> LlamaForCausalLM:
    """The embedded model of this name after so many steps."""
    model = LlamaForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    chooser = random.Random(seed)
    for step in range(steps):
        batch = texts(chooser, stories, tokenizer)  # (B, L)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1].clamp(min=1)).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{name}: step {step}/{steps}  loss {loss.item():.3f}", flush=True)
    return finished(model.bfloat16())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with *.txt stories and *.jsonl questions")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    stories = read_corpus(args.corpus).stories
    tokenizer = AutoTokenizer.from_pretrained(model_path("target"))
    for name in ("target", "draft"):
        model = learn(name, args.steps, args.lr, args.seed, stories, tokenizer)
        model.save_pretrained(args.output / name)
        tokenizer.save_pretrained(args.output / name)


if __name__ == "__main__":
    main()
