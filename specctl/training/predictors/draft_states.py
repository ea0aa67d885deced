"""Where heads get a draft's hidden states from while they are trained and evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of
from specctl.models.predictors.disco_head import FEATURES
from specctl.training.predictors.disco_network import features_of
from specctl.training.predictors.examples import Example
from specctl.training.predictors.mixing import Mixed, mix, states


class DraftStates(Protocol):
    """Gives the hidden states at the draft tokens of examples."""

    @property
    def device(self) -> torch.device:
        """Where heads are trained."""

    def width(self, examples: Sequence[Example]) -> int:
        """H, the width of the states, with at least one example."""

    def mix(self, examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:
        """What is read in one pass over the examples; the same seed gives the same."""

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:
        """Float32 ``(N, H)`` on `device`: the states at the draft tokens in use of all examples, in order."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """States of a draft model, which reads a mix of the target's tokens and its own."""

    model: PreTrainedModel

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def width(self, examples: Sequence[Example]) -> int:  # noqa: ARG002 - the model tells
        size: int = self.model.config.get_text_config().hidden_size
        return size

    def mix(self, examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:
        return mix(examples, share, seed)

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - those of the mix
        return states(self.model, mixed)


@dataclass(frozen=True, slots=True)
class StoredStates:
    """States of a draft head, stored with the examples as they were in its rounds: every draft token is in use."""

    device: torch.device

    def width(self, examples: Sequence[Example]) -> int:
        return _stored(examples[0]).shape[1]

    def mix(self, examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:  # noqa: ARG002 - no mix
        return [Mixed(each.prompt[:0], torch.ones(len(each.proposals), dtype=torch.bool)) for each in examples]

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - all in use
        return torch.cat([_stored(example) for example in examples]).to(self.device).float()


@dataclass(frozen=True, slots=True)
class Laws:
    """What DISCO heads read in place of states: the draft's distributions, stored with the examples."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def width(self, examples: Sequence[Example]) -> int:  # noqa: ARG002 - always the same
        return FEATURES

    def mix(self, examples: Sequence[Example], share: float, seed: str) -> list[Mixed]:  # noqa: ARG002 - no mix
        return [Mixed(each.prompt[:0], torch.ones(len(each.proposals), dtype=torch.bool)) for each in examples]

    def of(self, examples: Sequence[Example], mixed: Sequence[Mixed]) -> torch.Tensor:  # noqa: ARG002 - all in use
        return features_of(examples)


def _stored(example: Example) -> torch.Tensor:
    assert example.hidden is not None, "an example of a draft head"
    return example.hidden
