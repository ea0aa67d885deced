"""A target's greedy answers with what a draft learns from: its likeliest tokens and its states at every position.

The answers are written in large batches: one pass over the weights writes a token of every answer.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors.torch import load_file, save
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from specctl.models.passes.cache import cache_argument
from specctl.outputs import write_whole

LIKELIEST = 16  # tokens kept at each position
MARK = "\0"  # stands for a user's message


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's answer, T tokens, and what the target says where those from ``first`` on stand."""

    ids: torch.Tensor  # (T,) int64: chat template, prompt, answer and its end token
    first: int  # the first token to learn, at least 1; N = T - first
    top_ids: torch.Tensor  # (N, LIKELIEST) int64, the likeliest tokens
    top_log_probs: torch.Tensor  # (N, LIKELIEST) float16
    states: torch.Tensor  # (N, H) float16, the normalised states that the target's logits are computed from


class Given(Protocol):
    """An answer of ``specctl train-draft --answers-only``: int ids ``(P,)`` and ``(A,)``."""

    @property
    def prompt(self) -> torch.Tensor: ...

    @property
    def tokens(self) -> torch.Tensor: ...


def pack(answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """The answers of one file as tensors; `unpack` is its inverse."""
    return {
        "lengths": torch.tensor([len(a.ids) for a in answers], dtype=torch.int32),
        "firsts": torch.tensor([a.first for a in answers], dtype=torch.int32),
        "ids": torch.cat([a.ids for a in answers]).int(),
        "top_ids": torch.cat([a.top_ids for a in answers]).int(),
        "top_log_probs": torch.cat([a.top_log_probs for a in answers]).half(),
        "states": torch.cat([a.states for a in answers]).half(),
    }


def unpack(tensors: dict[str, torch.Tensor]) -> list[Answer]:
    lengths, firsts = tensors["lengths"].tolist(), tensors["firsts"].tolist()
    counts = [length - first for length, first in zip(lengths, firsts, strict=True)]
    ids = torch.split(tensors["ids"].long(), lengths)
    top_ids = torch.split(tensors["top_ids"].long(), counts)
    others = (torch.split(tensors[name], counts) for name in ("top_log_probs", "states"))
    return [Answer(*parts) for parts in zip(ids, firsts, top_ids, *others, strict=True)]


class AnswerShards:
    """A folder of shards, each written whole; ``shard-N`` holds the answers to the prompts of batch N."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05}.safetensors"

    def write(self, number: int, answers: Sequence[Answer]) -> None:
        write_whole(self.path(number), save(pack(answers)))

    def read(self) -> list[Answer]:
        paths = sorted(self.folder.glob("shard-*.safetensors"))
        return [answer for path in paths for answer in unpack(load_file(path))]


class Target:
    """A chat model in bfloat16 that answers prompts and reads given answers."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        generation: Any = model.generation_config
        ends = generation.eos_token_id
        self.ends = torch.tensor(ends if isinstance(ends, list) else [ends])
        opened = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
        self.opening = self._ids(opened.partition(MARK)[0])  # (O,) what comes before a user's message

    @classmethod
    def load(cls, folder: Path) -> Self:
        from transformers import AutoTokenizer

        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.train(False)
        return cls(model, AutoTokenizer.from_pretrained(folder))

    def encode(self, prompt: str) -> torch.Tensor:
        """(P,) int64: the prompt as a user's message, up to where the answer begins."""
        messages = [{"role": "user", "content": prompt}]
        return self._ids(str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def learn(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(N, H)`` states to likeliest ids ``(N, LIKELIEST)``, their log-probabilities, and float16 states."""
        ids, log_probs = [], []
        for piece in torch.split(states, 256):
            logits = self.model.lm_head(piece).float()  # (N, V)
            top = logits.topk(LIKELIEST, dim=-1)
            ids.append(top.indices)
            log_probs.append((top.values - logits.logsumexp(-1, keepdim=True)).half())
        return torch.cat(ids), torch.cat(log_probs), states.half()

    @torch.inference_mode()
    def read(self, ids: torch.Tensor, first: int) -> Answer:
        """Read a text ``(T,)`` that is already there; its tokens from ``first`` on are to be learned."""
        states = self.model.model(ids[None, :-1]).last_hidden_state[0]  # (T - 1, H)
        return Answer(ids, first, *self.learn(states[first - 1 :]))

    @torch.inference_mode()
    def write(self, prompts: Sequence[torch.Tensor], length: int, temperature: float = 0.0) -> list[Answer]:
        """Answer prompts together, each with at most ``length`` tokens; greedily at temperature 0.

        The users' messages are to be learned too, since reading them costs nothing more.
        """
        width, count, first = max(map(len, prompts)), len(prompts), len(self.opening)
        ids = torch.full((count, width), int(self.ends[0]))
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        base: Any = self.model.model
        cache = DynamicCache(config=self.model.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        finished = torch.zeros(count, dtype=torch.bool)
        columns: list[tuple[torch.Tensor, ...]] = []
        read: list[tuple[torch.Tensor, ...]] = []
        for _ in range(length):
            states = base(
                ids, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_argument(type(base)): cache}
            ).last_hidden_state  # (B, L, H)
            if not read:
                starts = [width - len(prompt) + first - 1 for prompt in prompts]
                read = [self.learn(states[row, start:-1]) for row, start in enumerate(starts)]
            top_ids, log_probs, newest = self.learn(states[:, -1])
            chosen = top_ids[:, 0]
            if temperature:
                weights = (log_probs.float() / temperature).softmax(-1)
                chosen = top_ids.gather(1, torch.multinomial(weights, 1))[:, 0]
            columns.append((chosen, top_ids, log_probs, newest))
            finished |= torch.isin(chosen, self.ends)
            if finished.all():
                break
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(count, 1, dtype=mask.dtype)], 1)
        tokens, *learned = (torch.stack(parts, 1) for parts in zip(*columns, strict=True))  # (B, A, ...)
        answers = []
        for row, prompt in enumerate(prompts):
            ended = torch.isin(tokens[row], self.ends).nonzero()
            stop = int(ended[0]) + 1 if len(ended) else tokens.shape[1]
            parts = [torch.cat([old, new[row, :stop]]) for old, new in zip(read[row], learned, strict=True)]
            answers.append(Answer(torch.cat([prompt, tokens[row, :stop]]), first, *parts))
        return answers

    def invent(self, count: int) -> list[str]:
        """Prompts that the target makes up, sampled after an empty beginning of a user's message (Xu et al. 2024).

        Source: "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing",
        arXiv 2406.08464.
        """
        made = self.write([self.opening] * count, 64, temperature=1.0)
        new = (a.ids[len(self.opening) :] for a in made)
        texts = (str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in new)
        return list(dict.fromkeys(text for text in texts if text))


def read_prompts(path: Path) -> list[str]:
    """The texts of a file of prompts, one JSON object with ``prompt`` a line."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row["prompt"] for row in rows]


def prompt_batches(
    prompts: Sequence[str], questions: Sequence[str], held_back: set[str], size: int, seed: int
) -> Iterator[list[str] | None]:
    """Batches of prompts in a fixed order; None stands for a batch that the target invents.

    All prompts come first, each third batch after them is invented, the others are questions. Held-back prompts are
    left out.
    """
    chosen = [prompt for prompt in dict.fromkeys(prompts) if prompt not in held_back]
    shuffled = [question for question in dict.fromkeys(questions) if question not in held_back]
    random.Random(seed).shuffle(shuffled)
    batches: list[list[str]] = []
    for texts in (chosen, shuffled):
        batches += [list(texts[start : start + size]) for start in range(0, len(texts), size)]
    given = -(-len(chosen) // size)
    for number, batch in enumerate(batches):
        if number >= given and (number - given) % 2 == 0:
            yield None
        yield batch


def write_answers(
    target: Target, batches: Iterator[list[str] | None], shards: AnswerShards, longest: int, length: int, seed: int
) -> Iterator[tuple[int, int]]:
    """Write a shard for each batch that has none; yields each shard's number and its tokens.

    Prompts of more than ``longest`` tokens are left out.
    """
    for number, batch in enumerate(batches):
        if shards.path(number).exists():
            continue
        torch.manual_seed(seed + number)
        texts = target.invent(64) if batch is None else batch
        prompts = sorted((ids for ids in map(target.encode, texts) if len(ids) <= longest), key=len)
        answers = target.write(prompts, length) if prompts else []
        if answers:
            shards.write(number, answers)
            yield number, sum(len(answer.top_ids) for answer in answers)


def read_answers(
    target: Target, given: Sequence[Given], shards: AnswerShards, size: int, answers_only: bool
) -> Iterator[tuple[int, int]]:
    """Read given answers, ``size`` a shard; yields each new shard's number and its tokens to learn.

    Those are the answers only, or the users' messages too.
    """
    for number, start in enumerate(range(0, len(given), size)):
        if shards.path(number).exists():
            continue
        some = given[start : start + size]
        firsts = (len(a.prompt) if answers_only else len(target.opening) for a in some)
        texts = (torch.cat([torch.as_tensor(part).long() for part in (a.prompt, a.tokens)]) for a in some)
        answers = [target.read(text, first) for text, first in zip(texts, firsts, strict=True)]
        shards.write(number, answers)
        yield number, sum(len(answer.top_ids) for answer in answers)
