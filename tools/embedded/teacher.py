"""The data that the target makes for its students: generated text, and the likeliest tokens at every position."""

import random
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tools.embedded.corpus import Corpus, question_prompt
from tools.embedded.recipe import Recipe


@torch.inference_mode()
def continue_prompts(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], sample: bool, max_new_tokens: int, label: str
) -> list[torch.Tensor]:
    """Each prompt with the model's continuation up to and including its end token, in batches of similar length."""
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
        generate: Any = model.generate
        output: torch.Tensor = generate(ids, attention_mask=mask, generation_config=config)
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
    """The target's continuations of training prompts and of questions that it makes up."""
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
    """The target's ``count`` likeliest next tokens at every position; each document is read separately.

    Returns int16 ids and float16 log-probabilities, both ``(N, count)`` over the N tokens of all documents in order.
    """
    if path.exists():
        ids, log_probs = torch.load(path, weights_only=True)
        return ids, log_probs
    offsets = torch.tensor([0, *map(len, documents)]).cumsum(0)
    ids = torch.empty(int(offsets[-1]), count, dtype=torch.int16)
    log_probs = torch.empty(int(offsets[-1]), count, dtype=torch.float16)
    order = sorted(range(len(documents)), key=lambda index: len(documents[index]))
    for start in range(0, len(order), 16):
        group = order[start : start + 16]
        batch = torch.nn.utils.rnn.pad_sequence([documents[index] for index in group], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(batch).logits  # (B, L, V); no token attends to the padding on its right
        top = logits.float().log_softmax(-1).topk(count, dim=-1)
        for row, index in enumerate(group):
            length, at = len(documents[index]), int(offsets[index])
            ids[at : at + length] = top.indices[row, :length].to(torch.int16)
            log_probs[at : at + length] = top.values[row, :length].half()
        if start % 1600 == 0:
            print(f"likeliest tokens {start}/{len(order)} documents", flush=True)
    torch.save((ids, log_probs), path)
    return ids, log_probs
