"""The ids that a draft can write, where these are only a part of its target's."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Numbers

Floats = npt.NDArray[np.float32]


class DraftVocabulary:
    """The ids that the N columns of a draft's logits stand for (FR-Spec, arXiv 2502.14856; ``d2t`` of EAGLE-3 heads).

    Draft tokens are drawn from a distribution over these ids; all other ids have probability 0 in it. The emitted
    tokens still follow the target's distribution.

    Args:
        ids: the target's ids; those from ``whole`` on are dropped.
        whole: V, the pair's shared vocabulary.

    Attributes:
        ids: ``(N,)`` int64, ascending, so that the lowest id comes first among equal logits, as it does among all V.
        whole: V.
    """

    def __init__(self, ids: Iterable[int], whole: int) -> None:
        self.ids: npt.NDArray[np.int64] = np.array(sorted({id_ for id_ in ids if id_ < whole}), dtype=np.int64)
        self.whole = whole
        self._columns = np.zeros(whole, dtype=np.int64)  # (V,), the columns of ids that have one
        self._columns[self.ids] = np.arange(len(self.ids))
        self._there: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """A hash of the ids, which identifies files made for them."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]

    def ids_on(self, device: "torch.device") -> "torch.Tensor":
        """``(N,)`` int64: the ids on a device."""
        return self._on(device)[0]

    def columns_of(self, tokens: "torch.Tensor") -> "torch.Tensor":
        """The columns of ids on their device, in the same shape; every id must have one."""
        found: torch.Tensor = self._on(tokens.device)[1][tokens]
        return found

    def columns(self, tokens: Iterable[int]) -> npt.NDArray[np.int64]:
        """The columns of those ids that have one."""
        return self._columns[[*tokens]]

    def _on(self, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
        if str(device) not in self._there:
            import torch

            with torch.inference_mode(False):  # compiled or captured passes need ordinary tensors
                found = torch.from_numpy(self.ids).to(device), torch.from_numpy(self._columns).to(device)
            self._there[str(device)] = found
        return self._there[str(device)]

    def widened(self, columns: "Numbers", fill: float) -> "Numbers":
        """Rows ``(R, V)`` of columns ``(R, N)``, with ``fill`` for every other id."""
        if isinstance(columns, np.ndarray):
            found = np.full((len(columns), self.whole), fill, dtype=columns.dtype)
            found[:, self.ids] = columns
            return found
        return columns.new_full((len(columns), self.whole), fill).index_copy(1, self.ids_on(columns.device), columns)

    @overload
    def less(self, rows: Floats, columns: Floats) -> Floats: ...
    @overload
    def less(self, rows: "torch.Tensor", columns: "torch.Tensor") -> "torch.Tensor": ...
    def less(self, rows: "Numbers", columns: "Numbers") -> "Numbers":
        """Rows ``(..., V)`` minus columns ``(..., N)``; other ids keep their values."""
        if isinstance(rows, np.ndarray):
            found = rows.copy()
            found[..., self.ids] -= columns
            return found
        return rows.index_add(-1, self.ids_on(rows.device), columns, alpha=-1)  # type: ignore[arg-type]
