"""Token mixing: the sequences that the draft reads in a head's training (SpecDec++, arXiv 2405.19715, section 4.4).

X are the target's tokens and Y the draft tokens of an `Example`; the mix Z takes X or Y at each position.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.training.predictors.examples import Example
from specctl.training.predictors.last_states import last_hidden_states


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
