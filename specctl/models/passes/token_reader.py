"""What reads a token's numbers within the pass that makes its logits."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Numbers

Foresee = Callable[["torch.Tensor"], "torch.Tensor"]
"""For a token ``()`` drawn from the last pass's logits, the predicted probability ``()`` float32 that the token drafted
after it is accepted if all before it are; 0 where no token can follow."""

Token: TypeAlias = "int | torch.Tensor"
"""An id, or ``()`` of any dtype on the device of the model that reads it, as a `TokenReader` gives it."""


class TokenReader(Protocol):
    """Reads numbers off one token's forward pass. Pure and hashable, so that it may become part of the pass.

    Attributes:
        hidden: whether it reads the token's last hidden state.
    """

    @property
    def hidden(self) -> bool: ...

    def __call__(
        self,
        logits: "torch.Tensor",
        uniform: "torch.Tensor | None",
        hidden: "torch.Tensor | None" = None,
        previous: "torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """The numbers ``(F,)`` float64, the id drawn first of all, and the distribution ``(V,)`` if it is needed later.

        Args:
            logits: ``(V,)``.
            uniform: ``()`` float64, a draw's randomness.
            hidden: ``(D,)``.
            previous: ``(S,)``, what an earlier call found and this one reads.
            foresee: `Runner.foresee` of a draft head that predicts acceptance.
        """

    def read_rows(
        self, logits: "Numbers", uniforms: "Sequence[float | None]"
    ) -> "list[tuple[list[float], Numbers | None]]":
        """What a call gives for each of several texts at once, the numbers on the host; not where it is `hidden`.

        Args:
            logits: ``(R, V)``, which the laws may be parts of.
            uniforms: of each row.
        """
