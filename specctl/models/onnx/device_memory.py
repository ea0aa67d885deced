"""Where the buffers of a graph's passes lie on a device: they are torch's tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specctl.models.onnx.host_memory import Integers

KINDS = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
}


class DeviceMemory:
    """`Memory` of a device.

    What is filled anew in each pass must not be an inference tensor.

    Args:
        device: where the graph runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @torch.inference_mode(False)
    def zeros(self, shape: Sequence[int], kind: str) -> torch.Tensor:
        return torch.zeros(*shape, dtype=KINDS[kind], device=self.device)

    def address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr()

    def copied(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @torch.inference_mode(False)
    def beside(self, numbers: Integers) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        for host, there in numbers:
            there.copy_(torch.from_numpy(host))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
