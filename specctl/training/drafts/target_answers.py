"""Answers of a target, and the folder that stores them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.training.material import Material, joined, parts_of


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


class AnswerFolder(Material[Answer]):
    """Answers in a folder of shards."""

    command, contents = "train-draft", "answers"

    @classmethod
    def pack(cls, items: Sequence[Answer]) -> dict[str, torch.Tensor]:
        return {
            "numbers": torch.tensor([answer.number for answer in items], dtype=torch.int32),
            "greedy": torch.tensor([answer.greedy for answer in items], dtype=torch.bool),
            "prompt_lengths": torch.tensor([len(answer.prompt) for answer in items], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(answer.tokens) for answer in items], dtype=torch.int32),
            "tokens": joined([part for answer in items for part in (answer.prompt, answer.tokens)], torch.int32),
        }

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Answer]:
        numbers, greedy = tensors["numbers"].tolist(), tensors["greedy"].tolist()
        for number, likeliest, text in zip(numbers, greedy, parts_of(tensors), strict=True):
            yield Answer(number, likeliest, *text)


def answered_greedily(number: int) -> bool:
    """Whether a prompt is to be answered greedily: every second one, of those for evaluation too."""
    return (number + number // 10) % 2 == 0


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
