"""Answers of a target, and the folder that stores them."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.errors import UsageError
from specctl.learning.shards import ShardFolder, joined


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the target.

    Attributes:
        number: index of the prompt in its suite, from 0; the turns of a conversation share it.
        greedy: whether each token is the target's likeliest, not drawn.
        prompt: ``(P,)`` int32, the ids before the answer.
        tokens: ``(A,)`` int32, the target's.
    """

    number: int
    greedy: bool
    prompt: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """Answers for training and, to other prompts, for evaluation."""

    train: list[Answer]
    dev: list[Answer]


class AnswerFolder(ShardFolder):
    """Answers in a folder of shards."""

    command, contents = "train-draft", "answers"

    def add(self, answers: Sequence[Answer], prompts: int, left_out: dict[str, str], seconds: float) -> None:
        """Add the answers to the next ``prompts`` prompts; see `ShardFolder.write`."""
        tensors = {
            "numbers": torch.tensor([answer.number for answer in answers], dtype=torch.int32),
            "greedy": torch.tensor([answer.greedy for answer in answers], dtype=torch.bool),
            "prompt_lengths": torch.tensor([len(answer.prompt) for answer in answers], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(answer.tokens) for answer in answers], dtype=torch.int32),
            "tokens": joined([part for answer in answers for part in (answer.prompt, answer.tokens)], torch.int32),
        }
        self.write(tensors, prompts, left_out, seconds)

    def split(self) -> Split:
        """Every answer of at least two tokens, by what `is_dev` says.

        Raises:
            UsageError: prompts are still unanswered, a shard is damaged, or there are too few answers.
        """
        split = Split([], [])
        for tensors in self.shards():
            for answer in _answers(tensors):
                if len(answer.tokens) > 1:
                    (split.dev if self.is_dev(answer.number) else split.train).append(answer)
        if not split.train or not split.dev:
            raise UsageError(f"{self.path} has too few answers to train on", "use thousands of prompts")
        return split


def answered_greedily(number: int) -> bool:
    """Whether a prompt is to be answered greedily: every second one, of those for evaluation too."""
    return (number + number // 10) % 2 == 0


def batches(answers: Sequence[Answer], size: int, epoch: int, seed: int) -> Iterator[list[Answer]]:
    """One pass over the answers in an order that depends on the seed and the epoch only."""
    order = list(range(len(answers)))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    for first in range(0, len(order), size):
        yield [answers[index] for index in order[first : first + size]]


def frequent_tokens(answers: Sequence[Answer], vocabulary: int, size: int) -> torch.Tensor | None:
    """The ids ``(size,)`` int64, rising, that the answers use most; None if that is the whole vocabulary.

    Args:
        answers: whose tokens are counted.
        vocabulary: V; ids that no answer uses fill up the list, the lowest first.
        size: how many ids.
    """
    if size >= vocabulary:
        return None
    counts = Counter(token for answer in answers for token in answer.tokens.tolist())
    ranked = sorted(range(vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def _answers(tensors: dict[str, torch.Tensor]) -> Iterator[Answer]:
    prompts, answers = tensors["prompt_lengths"].tolist(), tensors["answer_lengths"].tolist()
    lengths = [length for pair in zip(prompts, answers, strict=True) for length in pair]
    tokens = tensors["tokens"].split(lengths)
    for index, (number, greedy) in enumerate(zip(tensors["numbers"].tolist(), tensors["greedy"].tolist(), strict=True)):
        yield Answer(number, greedy, tokens[2 * index], tokens[2 * index + 1])
