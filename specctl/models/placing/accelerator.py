"""The machine's accelerator, looked for without torch where that can be."""

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.versions import torch_builds

if TYPE_CHECKING:
    import torch

DEVICES = Path("/dev")
DRIVERS = {
    "cuda": ("nvidia*", "nvhost*", "nvmap", "dxg"),
    "hip": ("kfd", "dxg"),
    "xpu": ("dri/render*", "dxg"),
}
"""Device files of those that torch may be built for; the last one stands for all under Windows."""


def accelerator() -> "torch.device | None":
    """That which torch finds; torch is not imported on a Linux where it would find none."""
    if "torch" not in sys.modules and sys.platform == "linux" and not may_be_there():
        return None
    import torch

    return torch.accelerator.current_accelerator(check_available=True)


def may_be_there(devices: Path = DEVICES) -> bool:
    """Whether a Linux has a driver of an accelerator that torch was built for, or torch a backend of another package.

    Args:
        devices: the folder of device files.
    """
    if entry_points(group="torch.backends"):
        return True
    kinds = [kind for kind, built in torch_builds().items() if built is not None]
    return any(any(devices.glob(name)) for kind in kinds for name in DRIVERS[kind])
