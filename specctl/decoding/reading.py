"""One drafted token out of the draft's logits, with everything a stopping policy may want to know of them."""

from collections.abc import Set
from dataclasses import dataclass

import torch

from specctl.decoding.sampling import Sampling, race
from specctl.decoding.signals import read_signals
from specctl.models.acceptance_head import SIGNALS
from specctl.policies import Signal


@dataclass(frozen=True, slots=True)
class Reader:
    """Draws a token and computes signals: tensors in, tensors out, so that it can be compiled or captured.

    Attributes:
        sampling: how the token is drawn.
        wanted: signals to compute, of the softmax of the raw logits.
    """

    sampling: Sampling
    wanted: frozenset[Signal] = frozenset()

    def __call__(
        self, logits: torch.Tensor, arrivals: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The token, then the wanted signals in the order of `SIGNALS`, each ``()``; and the distribution drawn from.

        Args:
            logits: ``(V,)``.
            arrivals: ``(V,)`` float32 from `sampling.arrivals`, the draw's randomness; None when greedy.
        """
        probs = None if arrivals is None else self.sampling.probs(logits)  # (V,)
        token = logits.argmax(-1) if probs is None or arrivals is None else race(probs, arrivals)
        return [token, *read_signals(logits, token, self.wanted, probs, self.sampling).values()], probs

    def names(self) -> list[Signal]:
        """The signals that follow the token."""
        return [name for name in SIGNALS if name in self.wanted]


def numbers(found: list[torch.Tensor]) -> list[float]:
    """Scalars as Python numbers, in a single transfer where there is a device to wait for."""
    if found[0].device.type == "cpu":
        return [value.item() for value in found]
    # float64 holds ids and probabilities alike
    values: list[float] = torch.stack([value.double() for value in found]).tolist()
    return values


def reader(sampling: Sampling, wanted: Set[Signal]) -> Reader:
    """A reader of those signals that logits can tell."""
    return Reader(sampling, frozenset(name for name in SIGNALS if name in wanted))
