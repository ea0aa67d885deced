"""Token mixing: the sequences that the draft reads in a head's training (SpecDec++, arXiv 2405.19715, section 4.4).

X are the target's tokens and Y the draft tokens of an `Example`; the mix Z takes X or Y at each position.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.training.predictors.examples import Example


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
    """The ``hidden`` states of `Runner.extend`, for several sequences at once and without logits.

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
