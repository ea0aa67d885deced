"""What a forward pass gives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specctl.models.passes.watching import States, joined_states

if TYPE_CHECKING:
    import torch


class Forward:
    """The outputs of one forward pass.

    Args:
        logits: ``(keep, V)``, or numpy's where a pass on the host gives those.

    Attributes:
        rows: the logits as numpy's if they were given so, float32: reading a few of them with numpy takes a third of
            torch's time.
        hidden: ``(keep, D)`` last hidden states of the same tokens; None if not asked for.
        states: of all tokens of the pass, for the layers that are watched; None if none is.
    """

    __slots__ = ("_logits", "hidden", "rows", "states")

    def __init__(
        self,
        logits: "torch.Tensor | npt.NDArray[np.float32]",
        hidden: "torch.Tensor | None" = None,
        states: States | None = None,
    ) -> None:
        self._logits = None if isinstance(logits, np.ndarray) else logits
        self.rows = logits if isinstance(logits, np.ndarray) else None
        self.hidden = hidden
        self.states = states

    def part(self, rows: slice) -> "Forward":
        """The logits of some tokens, and nothing else."""
        return Forward(self.logits[rows] if self.rows is None else self.rows[rows])

    @property
    def logits(self) -> "torch.Tensor":
        """``(keep, V)`` of the last ``keep`` tokens, in the model's dtype, V the pair's shared vocabulary."""
        if self._logits is None:
            assert self.rows is not None, "one of both was given"
            import torch

            self._logits = torch.from_numpy(self.rows)
        return self._logits


def joined(parts: Sequence[Forward]) -> Forward:
    """The rows of several passes as one."""
    import torch

    hidden = [part.hidden for part in parts if part.hidden is not None]
    return Forward(
        torch.cat([part.logits for part in parts]),
        torch.cat(hidden) if hidden else None,
        joined_states([part.states for part in parts]),
    )
