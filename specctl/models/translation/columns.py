"""Some columns of a draft's logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Numbers


class Columns:
    """Takes some columns of rows of numbers, wherever these are.

    Args:
        ids: ``(N,)`` int64, those taken.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self.ids = ids
        self._there: dict[str, torch.Tensor] = {}

    def of(self, numbers: "Numbers", rows: Sequence[int]) -> "Numbers":
        """These columns ``(R, N)`` of R of the rows, in memory of their own."""
        if isinstance(numbers, np.ndarray):
            found: npt.NDArray[np.float32] = numbers[np.array(rows, np.int64)[:, None], self.ids]
            return found
        import torch

        kept = (
            numbers
            if len(rows) == len(numbers) == 1
            else numbers[torch.tensor(rows, device=numbers.device, dtype=torch.long)]
        )
        return kept.index_select(1, self._on(kept.device))

    def _on(self, device: "torch.device") -> "torch.Tensor":
        if str(device) not in self._there:
            import torch

            with torch.inference_mode(False):
                self._there[str(device)] = torch.from_numpy(self.ids).to(device)
        return self._there[str(device)]
