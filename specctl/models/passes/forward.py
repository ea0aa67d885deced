"""What a forward pass gives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

from specctl.models.passes.watching import States, joined_states

if TYPE_CHECKING:
    import torch

Numbers = Union[npt.NDArray[np.float32], "torch.Tensor"]
"""Rows of numbers where they are: numpy's of a pass whose results are numpy's, else torch's."""


class Forward:
    """The outputs of one forward pass.

    Args:
        rows: ``(keep, V)`` logits of the last ``keep`` tokens, V the pair's shared vocabulary: float32 of numpy where a
            pass on the host gives those, for which nobody needs torch, and then the runner's next pass may overwrite
            them; else a tensor of the model's dtype.
        hidden: ``(keep, D)`` last hidden states of the same tokens; None if not asked for.
        states: of all tokens of the pass, for the layers that are watched; None if none is.
    """

    __slots__ = ("hidden", "rows", "states")

    def __init__(self, rows: Numbers, hidden: "torch.Tensor | None" = None, states: States | None = None) -> None:
        self.rows = rows
        self.hidden = hidden
        self.states = states

    @property
    def logits(self) -> "torch.Tensor":
        """The rows as a tensor, whoever made them; of memory of its own, where the next pass may overwrite them."""
        if isinstance(self.rows, np.ndarray):
            import torch

            return torch.from_numpy(self.rows.copy())
        return self.rows


def joined(parts: Sequence[Forward]) -> Forward:
    """The rows of several passes as one."""
    states = joined_states([part.states for part in parts])
    rows = joined_numbers([part.rows for part in parts])
    hidden = [part.hidden for part in parts if part.hidden is not None]
    if not hidden:
        return Forward(rows, None, states)
    import torch

    return Forward(rows, torch.cat(hidden), states)


def joined_numbers(parts: Sequence[Numbers]) -> Numbers:
    """Rows ``(R, V)`` one below the other: numpy's if all of them are."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    import torch

    return torch.cat([torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts])
