"""Training examples of predictors: their folder, the mixes that a draft reads, and its states."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of
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


@dataclass(frozen=True, slots=True)
class Mixed:
    """The mix Z of an example's target tokens X and draft tokens Y.

    Attributes:
        tokens: ``(P + T,)`` the prompt and Z.
        drafted: ``(T,)`` bool, positions at which Z has a draft token; only these are used in training.
    """

    tokens: torch.Tensor
    drafted: torch.Tensor


def mix(examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:
    """Mix every example; the same seed gives the same mix.

    Args:
        examples: the examples to mix.
        share: r, the probability of X at each position.
        seed: seed of the random choices.
    """
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    mixed = []
    for example in examples:
        drafted = torch.rand(len(example.answer), generator=generator) >= share
        tokens = torch.cat([example.prompt, torch.where(drafted, example.proposals, example.answer)])
        mixed.append(Mixed(tokens, drafted))
    return mixed


def states(draft: PreTrainedModel, mixed: Sequence[Mixed]) -> torch.Tensor:
    """Float32 ``(N, H)``: the draft's last hidden states at the draft tokens of all sequences, in order."""
    with torch.no_grad():
        whole = last_hidden_states(draft, [item.tokens for item in mixed])
    answers = (state[-len(item.drafted) :] for state, item in zip(whole, mixed, strict=True))
    return torch.cat([state[item.drafted.to(state.device)] for state, item in zip(answers, mixed, strict=True)]).float()


def signals(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N, 3)`` float32: the draft's `DISTRIBUTION_SIGNALS` when it drew the draft tokens of Z."""
    pairs = list(zip(examples, mixed, strict=True))
    columns = [torch.cat([getattr(e, name)[item.drafted] for e, item in pairs]) for name in DISTRIBUTION_SIGNALS]
    return torch.stack(columns, dim=1)


def acceptance(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N,)`` float32: acceptance probabilities of the draft tokens of Z."""
    return torch.cat([example.acceptance[item.drafted] for example, item in zip(examples, mixed, strict=True)])


TOKENS_AT_ONCE = 8192


def last_hidden_states(model: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ``hidden`` states of `Slot.extend`, for several sequences at once and without logits.

    Args:
        model: a causal language model in eval mode.
        sequences: ids, each ``(T,)``.

    Returns:
        ``(T, H)`` of each sequence, in the model's dtype, on the device of its input embeddings.
    """
    device = device_of(model)
    states: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for group in _groups([len(sequence) for sequence in sequences]):
        # Padded on the right only: later tokens do not change a token's state.
        ids = pad_sequence([sequences[index].long() for index in group], batch_first=True).to(device)  # (B, T)
        output = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        for row, index in enumerate(group):
            states[index] = output[row, : len(sequences[index])].to(device)
    return states


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in groups of similar length: at most `TOKENS_AT_ONCE` when padded, or a single sequence."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > TOKENS_AT_ONCE:
            groups.append([])
        groups[-1].append(index)
    return groups


MIX = 0.15
"""SpecDec++'s share of the target's tokens in what a draft model reads."""


class DraftStates(Protocol):
    """Gives the hidden states at the draft tokens of examples.

    Attributes:
        mixed: r, the share of the target's tokens in what the draft reads.
    """

    @property
    def mixed(self) -> float: ...

    @property
    def device(self) -> torch.device:
        """Where heads are trained."""

    def mix(self, examples: Sequence[Example], seed: str) -> list[Mixed]:
        """What is read in one pass over the examples; the same seed gives the same."""

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
        """Float32 ``(N, H)`` on `device`: the states at the draft tokens in use of all examples, in order."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """States of a draft model, which reads a mix of the target's tokens and its own; by default SpecDec++'s."""

    model: PreTrainedModel
    mixed: float = MIX

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def mix(self, examples: Sequence[Example], seed: str) -> list[Mixed]:
        return mix(examples, self.mixed, seed)

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - those of the mix
        return states(self.model, mixed)


def stored_states(examples: Sequence[Example]) -> torch.Tensor:
    """``(N, H)``: the states of a draft head in its rounds."""
    states = [example.hidden for example in examples if example.hidden is not None]
    assert len(states) == len(examples), "examples of a draft head"
    return torch.cat(states)


@dataclass(frozen=True, slots=True)
class Stored:
    """What is stored with the examples: every draft token is in use.

    Attributes:
        device: where heads are trained.
        read: `stored_states`, or for DISCO `features_of`.
    """

    device: torch.device
    read: Callable[[Sequence[Example]], torch.Tensor]
    mixed: float = 0.0

    def mix(self, examples: Sequence[Example], seed: str) -> list[Mixed]:  # noqa: ARG002 - no mix
        return [Mixed(each.prompt[:0], torch.ones(len(each.proposals), dtype=torch.bool)) for each in examples]

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - all in use
        return self.read(examples).to(self.device).float()
