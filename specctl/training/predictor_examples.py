"""Training examples of predictors, the folder that stores them, and the draft's states at their draft tokens."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.training.material import Material, joined, parts_of

MIX = 0.15  # SpecDec++'s share of target tokens in a draft model's input
TOKENS_AT_ONCE = 8192
_PER_TOKEN = ("proposals", "acceptance", *DISTRIBUTION_SIGNALS)


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the target, and the N draft tokens along it. A draft model has one at each position, N = T."""

    number: int  # index of the prompt in its suite, from 0; the turns of a conversation share it
    prompt: torch.Tensor  # ``(P,)`` int32, the ids before the answer
    answer: torch.Tensor  # ``(T,)`` int32, the target's tokens: X of the SpecDec++ paper
    # ``(N,)`` int32, the draft tokens: Y of the paper. A draft model's token i is sampled after the prompt and the
    # first i tokens of the answer; those of a draft head are `predictor_rounds.RoundTokens`.
    proposals: torch.Tensor
    # ``(N,)`` float32, the acceptance probability min(1, p(Y)/q(Y)), p and q the target's and the draft's distribution
    # after temperature and filters
    acceptance: torch.Tensor
    # entropy, top_prob, token_prob: ``(N,)`` float32, the draft's signals when it sampled Y, as in `DraftStep`
    entropy: torch.Tensor
    top_prob: torch.Tensor
    token_prob: torch.Tensor
    # ``(N, H)`` in the draft's dtype, the states after the draft has read Y; None for a draft model, which can read Y
    # again, and for DISCO
    hidden: torch.Tensor | None = None
    # top_probs, index: for DISCO, ``(N, 10)`` float32, the draft's largest probabilities when it sampled Y, and
    # ``(N,)`` int32, the number of Y in its round, from 1; else None. N is then at most T for a draft model too.
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
        for field in ("hidden", "top_probs", "index"):
            if parts := [part for example in items if (part := getattr(example, field)) is not None]:
                tensors["draft_lengths"] = torch.tensor([len(part) for part in parts], dtype=torch.int32)
                tensors[field] = torch.cat(parts)
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> Iterator[Example]:
        answers = tensors["answer_lengths"].tolist()
        drafted = tensors["draft_lengths"].tolist() if "draft_lengths" in tensors else answers
        # A draft head's states may be larger than memory, so only those in use are read from the file.
        columns: list[Sequence[torch.Tensor | None]] = [
            torch.split(tensors[field], drafted) if field in tensors else [None] * len(answers)
            for field in (*_PER_TOKEN, "hidden", "top_probs", "index")
        ]
        for number, text, *rest in zip(tensors["numbers"].tolist(), parts_of(tensors), *columns, strict=True):
            yield Example(number, *text, *rest)


@dataclass(frozen=True, slots=True)
class Mixed:
    """The mix Z of an example's target tokens X and draft tokens Y."""

    tokens: torch.Tensor  # ``(P + T,)`` the prompt and Z
    drafted: torch.Tensor  # ``(T,)`` bool, positions of draft tokens in Z; only these are used in training


def mix(examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:
    """Take X at each position with probability ``share``, else Y (SpecDec++, arXiv 2405.19715, section 4.4).

    The same seed gives the same mix.
    """
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    mixed = []
    for example in examples:
        drafted = torch.rand(len(example.answer), generator=generator) >= share
        tokens = torch.cat([example.prompt, torch.where(drafted, example.proposals, example.answer)])
        mixed.append(Mixed(tokens, drafted))
    return mixed


def signals(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N, 3)`` float32: the draft's `DISTRIBUTION_SIGNALS` when it sampled the draft tokens of Z."""
    pairs = list(zip(examples, mixed, strict=True))
    columns = [torch.cat([getattr(e, name)[item.drafted] for e, item in pairs]) for name in DISTRIBUTION_SIGNALS]
    return torch.stack(columns, dim=1)


def acceptance(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N,)`` float32: acceptance probabilities of the draft tokens of Z."""
    return torch.cat([example.acceptance[item.drafted] for example, item in zip(examples, mixed, strict=True)])


@dataclass(frozen=True, slots=True)
class Stored:
    """Predictors' inputs that are stored with the examples; every draft token is used."""

    device: torch.device  # the device for training predictors
    stored: Callable[[Sequence[Example]], torch.Tensor]  # `stored_states`, or for DISCO `features_of`
    mixed: float = 0.0  # r, the share of target tokens in the draft's input

    def mix(self, examples: Sequence[Example], seed: str) -> list[Mixed]:  # noqa: ARG002 - no mix
        """The mix for one pass over the examples; the same seed gives the same mix."""
        return [Mixed(each.prompt[:0], torch.ones(len(each.proposals), dtype=torch.bool)) for each in examples]

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - all in use
        """The inputs, float32 ``(N, H)`` on `device`, at the used draft tokens of all examples, in order."""
        return self.stored(examples).to(self.device).float()


def stored_states(examples: Sequence[Example]) -> torch.Tensor:
    """``(N, H)``: the states of a draft head in its rounds."""
    states = [example.hidden for example in examples if example.hidden is not None]
    assert len(states) == len(examples), "examples of a draft head"
    return torch.cat(states)


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Like `Stored`, but computed by a draft model that reads a mix of the target's tokens and its own, by default
    SpecDec++'s.
    """

    model: PreTrainedModel
    mixed: float = MIX

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def mix(self, examples: Sequence[Example], seed: str) -> list[Mixed]:
        return mix(examples, self.mixed, seed)

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - those of the mix
        with torch.no_grad():
            whole = last_hidden_states(self.model, [item.tokens for item in mixed])
        answers = (state[-len(item.drafted) :] for state, item in zip(whole, mixed, strict=True))
        return torch.cat(
            [each[item.drafted.to(each.device)] for each, item in zip(answers, mixed, strict=True)]
        ).float()


DraftStates = Stored | ModelStates


def last_hidden_states(model: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ``hidden`` states ``(T, H)`` of `Slot.extend`, of several sequences of ids ``(T,)`` at once and without
    logits.

    The model must be in eval mode. The states have its dtype and are on the device of its input embeddings.
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
