"""Waiting for a device, which works on after a pass has returned."""

import torch


def wait(device: torch.device) -> None:
    """Return when the device has finished all its work; immediately on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
