"""Waiting for a device, which still works after a pass has returned, and avoiding such waits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def wait(*devices: "torch.device") -> None:
    """Wait until these devices have finished all their work; a CPU always has."""
    for device in set(devices):
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        elif device.type in ("mps", "xpu"):
            import torch

            torch.accelerator.synchronize(device)


def staged(numbers: "Sequence[float] | torch.Tensor", device: "torch.device", dtype: "torch.dtype") -> "torch.Tensor":
    """Host numbers in memory from which a copy to the device with ``non_blocking`` does not wait.

    A copy from ordinary memory waits until the device has finished all earlier work.
    """
    import torch

    made = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=dtype)
    return made.pin_memory() if device.type == "cuda" else made


def sent(
    numbers: "Sequence[float] | torch.Tensor", device: "torch.device", dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """Host numbers on a device, without waiting for it.

    Args:
        numbers: ``(N,)``, or a tensor of any shape, which keeps its dtype.
        device: the destination.
        dtype: for numbers that are not a tensor; int64 by default.
    """
    import torch

    return staged(numbers, device, dtype or torch.int64).to(device, non_blocking=True)
