"""One drafted token out of the draft's logits, with everything a stopping policy may want to know of them."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

import torch

from specctl.decoding.sampling import Sampling, race, read_signals
from specctl.policies import DISTRIBUTION_SIGNALS, Signal


class Judge(Protocol):
    """Foretells whether a drafted token will be accepted, as `AcceptanceHead` does.

    Attributes:
        reads_signals: whether it wants the token's own signals too.
    """

    @property
    def reads_signals(self) -> bool: ...

    def accept_prob(self, hidden: torch.Tensor, signals: torch.Tensor | None) -> torch.Tensor:
        """The chances ``(...)`` for tokens of the last hidden states ``(..., H)``, drawn with signals ``(..., 3)``."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Draws a token and computes signals: tensors in, tensors out, so that it can be compiled or captured.

    Attributes:
        sampling: how the token is drawn.
        wanted: signals to compute, of the softmax of the raw logits.
        judge: foretells acceptance, on the model's device; None for none.
    """

    sampling: Sampling
    wanted: frozenset[Signal] = frozenset()
    judge: Judge | None = None

    @property
    def hidden(self) -> bool:
        """Whether it reads hidden states."""
        return self.judge is not None

    def __call__(
        self,
        logits: torch.Tensor,
        arrivals: torch.Tensor | None,
        hidden: torch.Tensor | None = None,
        before: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The token, then the wanted signals in the order of `DISTRIBUTION_SIGNALS`, each ``()``; and the
        distribution that it was drawn from.

        With a judge and a hidden state, the chance that the token fed will be accepted comes last.

        Args:
            logits: ``(V,)``.
            arrivals: ``(V,)`` float32 from `sampling.arrivals`, the draw's randomness; None when greedy.
            hidden: ``(H,)``, the last hidden state of the token that was fed.
            before: ``(3,)``, the signals with which that token was drawn; for a judge that reads them.
        """
        probs = None if arrivals is None else self.sampling.probs(logits)  # (V,)
        token = logits.argmax(-1) if probs is None or arrivals is None else race(probs, arrivals)
        found = [token, *read_signals(logits, token, self.wanted, probs, self.sampling).values()]
        if self.judge is not None and hidden is not None:
            found.append(self.judge.accept_prob(hidden, before))
        return found, probs

    def names(self) -> list[Signal]:
        """The signals that follow the token, what a judge says left out."""
        return [name for name in DISTRIBUTION_SIGNALS if name in self.wanted]


def numbers(found: list[torch.Tensor]) -> list[float]:
    """Scalars as Python numbers, in a single transfer where there is a device to wait for."""
    if found[0].device.type == "cpu":
        return [value.item() for value in found]
    # float64 holds ids and probabilities alike
    values: list[float] = torch.stack([value.double() for value in found]).tolist()
    return values


def reader(sampling: Sampling, wanted: Set[Signal], judge: Judge | None = None) -> Reader:
    """A reader of those signals that logits can tell, and of what a judge says."""
    return Reader(sampling, frozenset(name for name in DISTRIBUTION_SIGNALS if name in wanted), judge)
