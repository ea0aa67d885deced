"""A DISCO head while it is trained."""

import random
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import relu

from specctl.models.predictors.disco_predictor import FEATURES
from specctl.training.predictors.examples import Example

WIDTH = 16
"""Hidden units: the paper asks for two layers and names no width."""


class DiscoNetwork(nn.Module):
    """The two layers of a `DiscoPredictor`, which read features of mean 0 and variance 1.

    Args:
        features: ``(N, 12)`` of the training examples, which the mean and the spread are taken of.
    """

    mean: torch.Tensor  # (12,)
    spread: torch.Tensor  # (12,)

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        spread = features.std(dim=0, correction=0)
        self.register_buffer("mean", features.mean(dim=0))
        self.register_buffer("spread", torch.where(spread > 0, spread, 1.0))
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.output = nn.Linear(WIDTH, 1)

    def forward(self, features: torch.Tensor, signals: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Logits of the acceptance probability, ``(N,)``.

        Args:
            features: ``(N, 12)``, as `DiscoPredictor` reads them.
            signals: not read: the features hold them.
        """
        logits: torch.Tensor = self.output(relu(self.hidden((features - self.mean) / self.spread))).squeeze(-1)
        return logits

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of a `DiscoPredictor`, which reads the features as they are."""
        weight = self.hidden.weight.detach() / self.spread  # (16, 12)
        return {
            "hidden.weight": weight,
            "hidden.bias": self.hidden.bias.detach() - weight @ self.mean,
            "output.weight": self.output.weight.detach(),
            "output.bias": self.output.bias.detach(),
        }


def features_of(examples: Sequence[Example]) -> torch.Tensor:
    """``(N, 12)`` float32: what a DISCO head reads of the draft tokens of all examples, in order."""
    rows = []
    for example in examples:
        assert example.top_probs is not None, "an example of DISCO"
        assert example.index is not None, "an example of DISCO"
        rows.append(torch.cat([example.top_probs, example.entropy[:, None], example.index[:, None].float()], dim=1))
    return torch.cat(rows)


def new_network(examples: Sequence[Example], seed: int) -> DiscoNetwork:
    """An untrained network; the same seed and examples always give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"disco/{seed}").getrandbits(63))
        return DiscoNetwork(features_of(examples))
