"""Draft heads that predict whether a token will be accepted before the token is drawn."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Foresee = Callable[["torch.Tensor"], "torch.Tensor"]
"""For a token ``()`` drawn from the last pass's logits, the predicted probability ``()`` float32 that the token drafted
after it is accepted if all before it are; 0 where no token can follow."""


@runtime_checkable
class Foreseeing(Protocol):
    """A `Runner` that may predict the acceptance of tokens that are not drawn yet.

    Attributes:
        foresees: whether it does; if so, and it reads passes within them, it gives the reader its ``foresee``.
    """

    @property
    def foresees(self) -> bool: ...

    def next_accept_prob(self, token: "torch.Tensor") -> "torch.Tensor":
        """A `Foresee` for the last pass."""


def foresight_of(runner: object) -> Foresee | None:
    """What a runner predicts of tokens that are not drawn yet; None if nothing."""
    return runner.next_accept_prob if isinstance(runner, Foreseeing) and runner.foresees else None
