"""Training examples of heads, and the folder that stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.errors import UsageError
from specctl.learning.shards import ShardFolder, joined
from specctl.policies import DISTRIBUTION_SIGNALS

_PER_TOKEN = ("proposals", "acceptance", *DISTRIBUTION_SIGNALS)


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target, and one draft token at each position of the answer.

    Attributes:
        number: index of the prompt in its suite, from 0; the turns of a conversation share it.
        prompt: ``(P,)`` int32, the ids before the answer.
        answer: ``(T,)`` int32, the target's tokens: X of the SpecDec++ paper.
        proposals: ``(T,)`` int32, the draft tokens: Y of the paper. Token i is drawn from the draft after the prompt
            and the first i tokens of the answer.
        acceptance: ``(T,)`` float32, the acceptance probability min(1, p(Y)/q(Y)), p and q the target's and the draft's
            distribution after temperature and filters.
        entropy, top_prob, token_prob: ``(T,)`` float32, the draft's signals when it drew Y, as in `DraftStep`.
    """

    number: int
    prompt: torch.Tensor
    answer: torch.Tensor
    proposals: torch.Tensor
    acceptance: torch.Tensor
    entropy: torch.Tensor
    top_prob: torch.Tensor
    token_prob: torch.Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """Examples for training and, from other prompts, for evaluation."""

    train: list[Example]
    dev: list[Example]


class DataFolder(ShardFolder):
    """Examples in a folder of shards."""

    command, contents = "train-head", "examples"

    def add(self, examples: Sequence[Example], prompts: int, left_out: dict[str, str], seconds: float) -> None:
        """Write the examples of the next ``prompts`` prompts as a shard, then add the shard to the index.

        Args:
            examples: of the prompts, in order.
            prompts: number of prompts, including those left out.
            left_out: reasons by prompt id.
            seconds: wall time of collecting them.
        """
        tensors = {
            "numbers": torch.tensor([example.number for example in examples], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(example.prompt) for example in examples], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(example.answer) for example in examples], dtype=torch.int32),
            "tokens": joined([part for example in examples for part in (example.prompt, example.answer)], torch.int32),
        }
        for field in _PER_TOKEN:
            kind = torch.int32 if field == "proposals" else torch.float32
            tensors[field] = joined([getattr(example, field) for example in examples], kind)
        self.write(tensors, prompts, left_out, seconds)

    def split(self) -> Split:
        """Every example, by what `is_dev` says.

        Raises:
            UsageError: prompts are still unanswered, a shard is damaged, or there are too few examples.
        """
        split = Split([], [])
        for tensors in self.shards():
            for example in _examples(tensors):
                (split.dev if self.is_dev(example.number) else split.train).append(example)
        if not split.train or not split.dev:
            raise UsageError(f"{self.path} has too few answers to train on", "use thousands of prompts")
        return split


def _examples(tensors: dict[str, torch.Tensor]) -> Iterator[Example]:
    answers = tensors["answer_lengths"].tolist()
    lengths = [length for pair in zip(tensors["prompt_lengths"].tolist(), answers, strict=True) for length in pair]
    tokens = tensors["tokens"].split(lengths)
    columns = [tensors[field].split(answers) for field in _PER_TOKEN]
    for index, number in enumerate(tensors["numbers"].tolist()):
        yield Example(number, tokens[2 * index], tokens[2 * index + 1], *(column[index] for column in columns))
