"""Training examples of heads, and the folder that stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.learning.shards import ShardFolder, joined, parts_of
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


class DataFolder(ShardFolder[Example]):
    """Examples in a folder of shards."""

    command, contents = "train-head", "examples"

    def pack(self, items: Sequence[Example]) -> dict[str, torch.Tensor]:
        tensors = {
            "numbers": torch.tensor([example.number for example in items], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(example.prompt) for example in items], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(example.answer) for example in items], dtype=torch.int32),
            "tokens": joined([part for example in items for part in (example.prompt, example.answer)], torch.int32),
        }
        for field in _PER_TOKEN:
            kind = torch.int32 if field == "proposals" else torch.float32
            tensors[field] = joined([getattr(example, field) for example in items], kind)
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Example]:
        answers = tensors["answer_lengths"].tolist()
        texts = parts_of(tensors)
        columns = [torch.split(tensors[field], answers) for field in _PER_TOKEN]
        for index, number in enumerate(tensors["numbers"].tolist()):
            yield Example(number, *texts[index], *(column[index] for column in columns))
