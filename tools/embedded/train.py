"""Train the embedded family from text: ``python -m tools.embedded.train --corpus DIR``.

Stages, each skipped when its result is in the work folder, each resumed from its last checkpoint:

1. tokenizer: byte-level BPE over the training documents;
2. target: next-token training with Muon on the matrices and AdamW on the rest, a warm-up / stable / decay schedule,
   short windows first and the whole context in the decay;
3. generated: the target continues training prompts (80 % greedily, the rest sampled) and writes questions of its own;
4. likeliest: the target's likeliest next tokens at every position of that text and of some of the corpus;
5. mid and draft: each learns those distributions (forward KL); the most likely token counts extra, because that is
   what greedy verification asks for;
6. export: bfloat16 safetensors, the tokenizer and a model card with losses and checksums.

The students' target is the rounded one that ships.

Deterministic given ``--seed`` on one machine and one number of threads.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tools.embedded.card import write_card
from tools.embedded.corpus import (
    VOCABULARY_SIZE,
    Corpus,
    batches,
    encode_documents,
    question_prompt,
    read_corpus,
    train_tokenizer,
)

CONTEXT = 1024
SHAPES = {  # layers, width, feed-forward width, heads
    "target": (12, 192, 512, 6),
    "mid": (4, 128, 352, 4),
    "draft": (1, 128, 352, 4),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights. Lengths in tokens, learning rates per optimiser."""

    seed: int = 0
    target_steps: int = 2000
    mid_steps: int = 1600
    draft_steps: int = 9000
    tokens_per_step: int = 4096
    window: int = 256
    warmup_steps: int = 100
    decay_share: float = 0.25
    muon_lr: float = 4e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    story_prompts: int = 3600
    question_prompts: int = 5000
    own_questions: int = 2000
    greedy_share: float = 0.8
    corpus_share: float = 0.1
    kept_tokens: int = 48
    argmax_weight: float = 1.0


def build_model(name: str) -> LlamaForCausalLM:
    layers, width, feed_forward, heads = SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def finished(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.train(False)
    return model


class Trainee:
    """A model, its two optimisers and the schedule they share."""

    def __init__(self, name: str, recipe: Recipe, total_steps: int, compile_forward: bool) -> None:
        self.name, self.recipe, self.total_steps = name, recipe, total_steps
        torch.manual_seed(recipe.seed + list(SHAPES).index(name))
        self.model = build_model(name)
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        muon_ids = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if id(p) not in muon_ids]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.peak_rates = [recipe.muon_lr, recipe.adamw_lr]
        self.forward: Callable[..., Any] = torch.compile(self.model, dynamic=False) if compile_forward else self.model

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
    """Short windows until the decay starts, whole-context windows from there on."""
    if start_step < decay_start:
        short = batches(documents, recipe.window, recipe.tokens_per_step, recipe.seed, skip=start_step)
        for _, batch in zip(range(start_step, decay_start), short, strict=False):
            yield batch
    skip = max(0, start_step - decay_start)
    yield from batches(documents, CONTEXT, recipe.tokens_per_step, recipe.seed + 10_000, skip=skip)


def run_steps(
    trainees: list[Trainee],
    documents: list[torch.Tensor],
    checkpoint: Path,
    losses: Callable[[torch.Tensor], list[torch.Tensor]],
) -> None:
    """Train until ``total_steps``, saving every 200 steps and resuming from what was saved."""
    recipe, total = trainees[0].recipe, trainees[0].total_steps
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        for trainee in trainees:
            trainee.load(saved[trainee.name])
    began, first = time.monotonic(), step
    for batch in staged_batches(documents, recipe, trainees[0].decay_start, step):
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


def train_target(recipe: Recipe, documents: list[torch.Tensor], work: Path, compile_forward: bool) -> LlamaForCausalLM:
    trainee = Trainee("target", recipe, recipe.target_steps, compile_forward)

    def next_token_loss(batch: torch.Tensor) -> list[torch.Tensor]:
        logits = trainee.logits(batch[:, :-1])
        return [cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())]

    run_steps([trainee], documents, work / "target.pt", next_token_loss)
    rounded = trainee.model.bfloat16().float()  # type: ignore[no-untyped-call]
    return finished(rounded)


@torch.inference_mode()
def continue_prompts(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], sample: bool, max_new_tokens: int, label: str
) -> list[torch.Tensor]:
    """Each prompt with the model's continuation up to and including its end token, in batches of like length."""
    documents: list[torch.Tensor] = []
    ordered, end = sorted(prompts, key=len), 1
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=sample, max_new_tokens=max_new_tokens, top_k=0, bos_token_id=0, eos_token_id=end, pad_token_id=end
    )
    for start in range(0, len(ordered), 64):
        group = ordered[start : start + 64]
        width = max(map(len, group))
        ids = torch.full((len(group), width), end)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(group):  # padded on the left
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment, misc]
        output = generate(ids, attention_mask=mask, generation_config=config)
        for row, prompt in enumerate(group):
            new = output[row, width:]
            ends = (new == end).nonzero()
            new = new[: int(ends[0]) + 1] if len(ends) else new
            documents.append(torch.cat([prompt, new]))
        print(f"{label} {min(start + 64, len(ordered))}/{len(ordered)}", flush=True)
    return documents


def generate_documents(
    recipe: Recipe, corpus: Corpus, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, path: Path
) -> list[torch.Tensor]:
    """The target's own text over training prompts and over questions that it makes up."""
    if path.exists():
        loaded: list[torch.Tensor] = torch.load(path, weights_only=True)
        return loaded
    chooser = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)

    def encoded(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text)["input_ids"])

    stories = [encoded(s)[: chooser.randint(4, 40)] for s in chooser.sample(corpus.stories, recipe.story_prompts)]
    chosen = chooser.sample(corpus.questions, recipe.question_prompts)
    questions = [encoded(question_prompt(question)) for question, _ in chosen]
    own = continue_prompts(target, [encoded("Question:")] * recipe.own_questions, True, 160, "own questions")
    for document in own:
        text = str(tokenizer.decode(document[1:], skip_special_tokens=True))
        question, answer_mark, _ = text.removeprefix("Question:").partition("\nAnswer:")
        if answer_mark:
            questions.append(encoded(question_prompt(question)))
    documents = []
    for label, prompts, limit in (("stories", stories, 240), ("answers", questions, 180)):
        chooser.shuffle(prompts)
        split = round(len(prompts) * recipe.greedy_share)
        documents += continue_prompts(target, prompts[:split], False, limit, f"{label}, greedy")
        documents += continue_prompts(target, prompts[split:], True, limit, f"{label}, sampled")
    torch.save(documents, path)
    return documents


@torch.no_grad()
def likeliest(
    target: LlamaForCausalLM, documents: list[torch.Tensor], count: int, path: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's ``count`` likeliest next tokens at every position of the documents, each read alone.

    Returns int16 ids and float16 log-probabilities, both ``(N, count)`` over the N tokens of all documents in order.
    """
    if path.exists():
        ids, log_probs = torch.load(path, weights_only=True)
        return ids, log_probs
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0)
    ids = torch.empty(int(offsets[-1]), count, dtype=torch.int16)
    log_probs = torch.empty(int(offsets[-1]), count, dtype=torch.float16)
    order = sorted(range(len(documents)), key=lambda place: len(documents[place]))
    for start in range(0, len(order), 16):
        group = order[start : start + 16]
        batch = torch.nn.utils.rnn.pad_sequence([documents[place] for place in group], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(batch).logits  # (B, L, V); padding on the right is never looked at
        top = logits.float().log_softmax(-1).topk(count, dim=-1)
        for row, place in enumerate(group):
            length, at = len(documents[place]), int(offsets[place])
            ids[at : at + length] = top.indices[row, :length].to(torch.int16)
            log_probs[at : at + length] = top.values[row, :length].half()
        if start % 1600 == 0:
            print(f"likeliest tokens {start}/{len(order)} documents", flush=True)
    torch.save((ids, log_probs), path)
    return ids, log_probs


def distil_student(
    name: str,
    steps: int,
    recipe: Recipe,
    documents: list[torch.Tensor],
    top: tuple[torch.Tensor, torch.Tensor],
    work: Path,
    compile_forward: bool,
) -> LlamaForCausalLM:
    """A student of the target's likeliest tokens (`likeliest`): forward KL to them, plus its argmax as a label."""
    top_ids, top_log_probs = top
    tokens = torch.cat(documents)
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0).tolist()
    places = [torch.arange(start, end) for start, end in pairwise(offsets)]
    trainee = Trainee(name, recipe, steps, compile_forward)

    def distillation_loss(batch: torch.Tensor) -> list[torch.Tensor]:  # (B, L + 1) places in `tokens`
        here = batch[:, :-1]
        found = trainee.logits(tokens[here]).float().log_softmax(-1)  # (B, L, V)
        wanted_ids, wanted = top_ids[here].long(), top_log_probs[here].float()
        found_there = found.gather(-1, wanted_ids)  # (B, L, count)
        divergence = (wanted.exp() * (wanted - found_there)).sum(-1).mean()
        return [divergence - recipe.argmax_weight * found_there[..., 0].mean()]

    run_steps([trainee], places, work / f"{name}.pt", distillation_loss)
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
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where the finished models go")
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
    top = likeliest(target, mixed, recipe.kept_tokens, args.work / "likeliest.pt")
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
