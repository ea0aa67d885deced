"""Where heads get a draft's hidden states from while they are trained and evaluated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of
from specctl.training.predictors.examples import Example
from specctl.training.predictors.mixing import Mixed, mix, states

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
