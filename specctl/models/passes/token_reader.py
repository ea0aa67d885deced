"""What reads numbers within the pass that makes the logits: of a token, or of several texts at once."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Forward, Numbers

Foresee = Callable[["torch.Tensor"], "torch.Tensor"]
"""For a token ``()`` drawn from the last pass's logits, the predicted probability ``()`` float32 that the token drafted
after it is accepted if all before it are; 0 where no token can follow."""

Token: TypeAlias = "int | torch.Tensor"
"""An id, or ``()`` of any dtype on the device of the model that reads it, as a `TokenReader` gives it."""


class PassReader(Protocol):
    """Reads the passes of several texts at once. Hashable: those of texts that are equal are one."""

    def read_rows(self, forwards: "Sequence[Forward]", about: Sequence[Any]) -> Sequence[Any]:
        """What each text wants to know, all numbers on the host; an exception is that text's alone.

        Asked again about the same it gives the same. What it gives is memory of its own, but for the passes themselves.

        Args:
            forwards: of one model, which the next pass may overwrite.
            about: of each text.
        """


class TokenReader(PassReader, Protocol):
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
            foresee: `Slot.foresee` of a draft head that predicts acceptance.
        """

    def read_rows(
        self, forwards: "Sequence[Forward]", about: "Sequence[float | None]"
    ) -> "list[tuple[list[float], Numbers | None]]":
        """What a call gives for the one row of each pass; not where it is `hidden`.

        Args:
            forwards: as in `PassReader`.
            about: of each text the draw's randomness, or None.
        """
