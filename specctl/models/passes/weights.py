"""The weights of a model: how much they are, and where."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def weight_bytes(model: "nn.Module") -> int:
    """The memory that a model's parameters take, wherever they are."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def device_of(model: "nn.Module") -> "torch.device":
    """The device that a model's ids belong to: that of its first weight.

    Weights that accelerate keeps in main memory or on disk are on meta between passes, and are computed with on the
    first of the other devices.
    """
    import torch

    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))
