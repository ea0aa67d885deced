"""A pass over some sequences whose buffers are bound."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime

Array = npt.NDArray[Any]


@dataclass(slots=True)
class BoundPass:
    """Passes of some sequences whose buffers are bound, and what was bound for the last of them."""

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    sizes: Array  # (S,) tokens of each
    before: Array  # (S, 1) tokens that it holds, less one
    total: Array  # (S, 1) and behind the pass
    longest: Array  # (1,) of these
    kind: tuple[int, int] = (0, 0)  # N tokens and R rows of logits of the last pass
    ids: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    positions: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (R,)
    logits: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # (R, V)
    states: dict[int, Array] = field(default_factory=dict)  # (N, D) by layer

    @classmethod
    def of(cls, session: onnxruntime.InferenceSession, count: int) -> Self:
        """One over so many sequences, of which nothing is bound."""
        before, total = np.zeros((2, count, 1), dtype=np.int32)
        sizes, longest = np.ones(count, dtype=np.int64), np.zeros(1, dtype=np.int32)
        return cls(session, session.io_binding(), sizes, before, total, longest)

    def give(self, name: str, array: Array) -> None:
        """Let an input be read there."""
        self.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def take(self, name: str, array: Array) -> None:
        """Let a result be written there."""
        self.binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
