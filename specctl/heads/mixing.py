"""Token mixing: the sequences a head sees while it learns (SpecDec++, arXiv 2405.19715, section 4.4)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specctl.heads.examples import Example
from specctl.models.running.states import last_hidden_states
from specctl.policies import DISTRIBUTION_SIGNALS


@dataclass(frozen=True, slots=True)
class Mixed:
    """An example's Z, which holds X with a given probability and Y otherwise.

    Attributes:
        tokens: ``(P + T,)`` the prompt and Z.
        drafted: ``(T,)`` bool, where Z holds Y: what a head can learn from.
    """

    tokens: torch.Tensor
    drafted: torch.Tensor


def mix(examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:
    """Mix every example; the same seed mixes alike.

    Args:
        examples: to be mixed.
        share: r, the probability of X.
        seed: of the coins.
    """
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    mixed = []
    for example in examples:
        drafted = torch.rand(len(example.answer), generator=generator) >= share
        tokens = torch.cat([example.prompt, torch.where(drafted, example.proposals, example.answer)])
        mixed.append(Mixed(tokens, drafted))
    return mixed


def states(draft: PreTrainedModel, mixed: Sequence[Mixed]) -> torch.Tensor:
    """Float32 ``(N, H)``: the draft's last hidden states where Z holds Y, of one sequence after the other."""
    with torch.no_grad():
        whole = last_hidden_states(draft, [one.tokens for one in mixed])
    answers = (state[-len(one.drafted) :] for state, one in zip(whole, mixed, strict=True))
    return torch.cat([state[one.drafted.to(state.device)] for state, one in zip(answers, mixed, strict=True)]).float()


def signals(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N, 3)`` float32: `DISTRIBUTION_SIGNALS` where Z holds Y, as the draft had them when it drew Y."""
    pairs = list(zip(examples, mixed, strict=True))
    return torch.stack(
        [torch.cat([getattr(e, name)[one.drafted] for e, one in pairs]) for name in DISTRIBUTION_SIGNALS], dim=1
    )


def acceptance(examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
    """``(N,)`` float32: P where Z holds Y."""
    return torch.cat([example.acceptance[one.drafted] for example, one in zip(examples, mixed, strict=True)])
