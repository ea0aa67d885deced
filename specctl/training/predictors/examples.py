"""Training examples of heads, and the folder that stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.training.material import Material, joined, parts_of

_PER_TOKEN = ("proposals", "acceptance", *DISTRIBUTION_SIGNALS)


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target, and the N draft tokens along it: of a draft model one at each position, so that N = T.

    Attributes:
        number: index of the prompt in its suite, from 0; the turns of a conversation share it.
        prompt: ``(P,)`` int32, the ids before the answer.
        answer: ``(T,)`` int32, the target's tokens: X of the SpecDec++ paper.
        proposals: ``(N,)`` int32, the draft tokens: Y of the paper. A draft model's token i is drawn after the prompt
            and the first i tokens of the answer; those of a draft head are `example_rounds.RoundTokens`.
        acceptance: ``(N,)`` float32, the acceptance probability min(1, p(Y)/q(Y)), p and q the target's and the draft's
            distribution after temperature and filters.
        entropy, top_prob, token_prob: ``(N,)`` float32, the draft's signals when it drew Y, as in `DraftStep`.
        hidden: ``(N, H)`` in the draft's dtype, the states after the draft has read Y; None for a draft model, which
            can read Y again, and for DISCO.
        top_probs, index: for DISCO, ``(N, 10)`` float32, the draft's largest probabilities when it drew Y, and ``(N,)``
            int32, the number of Y in its round, from 1; else None. N is then T at most for a draft model too.
    """

    number: int
    prompt: torch.Tensor
    answer: torch.Tensor
    proposals: torch.Tensor
    acceptance: torch.Tensor
    entropy: torch.Tensor
    top_prob: torch.Tensor
    token_prob: torch.Tensor
    hidden: torch.Tensor | None = None
    top_probs: torch.Tensor | None = None
    index: torch.Tensor | None = None


class ExampleFolder(Material[Example]):
    """Examples in a folder of shards."""

    command, contents = "train-head", "examples"

    @classmethod
    def pack(cls, items: Sequence[Example]) -> dict[str, torch.Tensor]:
        tensors = {
            "numbers": torch.tensor([example.number for example in items], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(example.prompt) for example in items], dtype=torch.int32),
            "answer_lengths": torch.tensor([len(example.answer) for example in items], dtype=torch.int32),
            "tokens": joined([part for example in items for part in (example.prompt, example.answer)], torch.int32),
        }
        for field in _PER_TOKEN:
            kind = torch.int32 if field == "proposals" else torch.float32
            tensors[field] = joined([getattr(example, field) for example in items], kind)
        if states := [example.hidden for example in items if example.hidden is not None]:
            tensors["draft_lengths"] = torch.tensor([len(state) for state in states], dtype=torch.int32)
            tensors["hidden"] = torch.cat(states)
        for field in ("top_probs", "index"):
            if parts := [part for example in items if (part := getattr(example, field)) is not None]:
                tensors["draft_lengths"] = torch.tensor([len(part) for part in parts], dtype=torch.int32)
                tensors[field] = torch.cat(parts)
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Example]:
        answers = tensors["answer_lengths"].tolist()
        texts = parts_of(tensors)
        drafted = tensors["draft_lengths"].tolist() if "draft_lengths" in tensors else answers
        columns = [torch.split(tensors[field], drafted) for field in _PER_TOKEN]
        # Of a draft head's states, which may be larger than memory, only those in use are read from the file.
        more: list[Sequence[torch.Tensor | None]] = [
            torch.split(tensors[field], drafted) if field in tensors else [None] * len(answers)
            for field in ("hidden", "top_probs", "index")
        ]
        for place, number in enumerate(tensors["numbers"].tolist()):
            drawn, accepted, entropy, top_prob, token_prob = (column[place] for column in columns)
            signals = entropy, top_prob, token_prob
            yield Example(number, *texts[place], drawn, accepted, *signals, *(column[place] for column in more))
