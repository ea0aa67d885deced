"""The machine's accelerator, looked for without torch where that can be."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICES = Path("/dev")
DRIVERS = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd", "dri/render*", "accel*", "davinci*")
"""Device files of those that torch knows: CUDA, on small boards and under Windows too, ROCm, XPU and others."""


def accelerator(devices: Path = DEVICES) -> "torch.device | None":
    """That which torch finds; torch is not imported on a Linux without any driver of one.

    Args:
        devices: the folder of device files.
    """
    if "torch" not in sys.modules and sys.platform == "linux" and not any(any(devices.glob(one)) for one in DRIVERS):
        return None
    import torch

    return torch.accelerator.current_accelerator(check_available=True)
