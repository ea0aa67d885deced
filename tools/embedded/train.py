"""Train the embedded family from text: ``python -m tools.embedded.train --corpus DIR``.

Each stage is skipped if its result is in the work folder, and resumed from its last checkpoint:

1. tokenizer: byte-level BPE over the training documents;
2. target: next-token training with Muon on the matrices and AdamW on the rest, a warm-up / stable / decay schedule,
   short windows first and the whole context in the decay;
3. generated: the target continues training prompts (80 % greedily, the others sampled) and writes questions of its own;
4. likeliest: the target's likeliest next tokens at every position of that text and of some of the corpus;
5. mid and draft: each learns those distributions (forward KL); the most likely token counts extra, because greedy
   verification accepts only that token;
6. export: bfloat16 safetensors, the tokenizer and a model card with losses and checksums.

Mid and draft learn from the target's rounded weights, which ship.

Deterministic given ``--seed`` on one machine and one number of threads.
"""

import argparse
import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from specctl.profile.schema import model_path
from tools.embedded.card import write_card
from tools.embedded.corpus import encode_documents, question_prompt, read_corpus, train_tokenizer
from tools.embedded.recipe import Recipe
from tools.embedded.teacher import generate_documents, likeliest
from tools.embedded.training import distil_student, train_target, validation_loss


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Write bfloat16 safetensors, config and tokenizer; returns the weights' sha256."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
    model.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with *.txt stories and *.jsonl questions")
    parser.add_argument("--work", type=Path, default=Path("embedded-training"), help="checkpoints and generated text")
    parser.add_argument("--output", type=Path, default=model_path("target").parent, help="where the finished models go")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward passes")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    args.work.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus(args.corpus)
    tokenizer_folder = args.work / "tokenizer"
    if not tokenizer_folder.exists():
        train_tokenizer(corpus.training_documents()).save_pretrained(tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    documents = encode_documents(tokenizer, corpus.training_documents())
    target = train_target(recipe, documents, args.work, args.compile)
    generated = generate_documents(recipe, corpus, target, tokenizer, args.work / "generated.pt")
    share = round(len(generated) * recipe.corpus_share / (1 - recipe.corpus_share))
    mixed = generated + random.Random(recipe.seed).sample(documents, min(share, len(documents)))
    top = likeliest(target, mixed, recipe.accepted_tokens, args.work / "likeliest.pt")
    steps = {"target": recipe.target_steps, "mid": recipe.mid_steps, "draft": recipe.draft_steps}
    models = {"target": target} | {
        name: distil_student(name, steps[name], recipe, mixed, top, args.work, args.compile)
        for name in ("draft", "mid")
    }

    valid_questions = [f"{question_prompt(question)} {answer}" for question, answer in corpus.valid_questions]
    valid = {
        "stories": encode_documents(tokenizer, corpus.valid_stories[:150]),
        "maths": encode_documents(tokenizer, valid_questions),
    }
    facts: dict[str, Any] = {
        "recipe": asdict(recipe),
        "torch": torch.__version__,
        "corpus_tokens": sum(map(len, documents)),
        "generated_tokens": sum(map(len, generated)),
        "models": {},
    }
    for name, model in models.items():
        losses = {domain: validation_loss(model, held_out) for domain, held_out in valid.items()}
        facts["models"][name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": steps[name],
            "tokens_seen": steps[name] * recipe.tokens_per_step,
            "validation_loss": losses,
            "sha256": export(model, tokenizer, args.output / name),
        }
    (args.work / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    write_card(args.output / "MODEL_CARD.md", facts)


if __name__ == "__main__":
    main()
