"""Whether this machine has an accelerator, told without torch where that can be."""

import sys
from pathlib import Path

DEVICES = Path("/dev")
DRIVERS = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd", "dri/render*", "accel*", "davinci*")
"""Device files of those that torch knows: CUDA, on small boards and under Windows too, ROCm, XPU and others."""


def has_accelerator(devices: Path = DEVICES) -> bool:
    """Whether torch finds an accelerator; it is not imported for that on a Linux without any driver of one.

    Args:
        devices: the folder of device files.
    """
    if "torch" not in sys.modules and sys.platform == "linux" and not any(any(devices.glob(one)) for one in DRIVERS):
        return False
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is not None
