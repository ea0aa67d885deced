"""Where the buffers of a graph's passes lie: on the host they are arrays of numpy. No torch here."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from specctl.models.passes.host_device import HOST

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]
KINDS: dict[str, Any] = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
LINE = 64
"""Bytes of a line of the processor's caches, at which buffers begin."""


class Memory(Protocol):
    """Memory that passes read and write.

    Attributes:
        device: where it is.
    """

    @property
    def device(self) -> "torch.device": ...

    def zeros(self, shape: Sequence[int], kind: str) -> Any:
        """A buffer; ``kind`` is onnxruntime's name of its numbers, such as ``tensor(float)``."""

    def address(self, buffer: Any) -> int:
        """Where a buffer begins."""

    def copied(self, rows: Any) -> Any:
        """Rows in memory of their own."""

    def beside(self, numbers: Integers) -> Any:
        """A buffer for numbers that are filled in on the host, which takes numpy a tenth of torch's time for so few."""

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        """Bring numbers to the buffers `beside` them, and wait until all that was given to the device is done."""


class HostMemory:
    """`Memory` of the processor's own, which needs nothing to be sent."""

    device = HOST

    def zeros(self, shape: Sequence[int], kind: str) -> npt.NDArray[Any]:
        dtype = np.dtype(KINDS[kind])
        size = prod(shape) * dtype.itemsize
        whole = np.zeros(size + LINE, dtype=np.uint8)
        start = -self.address(whole) % LINE
        found: npt.NDArray[Any] = whole[start : start + size].view(dtype).reshape(shape)
        return found

    def address(self, buffer: npt.NDArray[Any]) -> int:
        return buffer.ctypes.data

    def copied(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return rows.copy()

    def beside(self, numbers: Integers) -> Integers:
        return numbers

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        pass
