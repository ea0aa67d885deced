"""The host as a device, told without torch, which need not be there where numpy computes; and who draws for whom."""

from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


class _Host(str):
    """``cpu``, as a name that torch's functions take, with what is asked of a `torch.device`."""

    __slots__ = ()
    type = "cpu"
    index = None  # type: ignore[assignment]  # a device of torch has none, and nobody searches the name

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return str(other) != "cpu"

    def __hash__(self) -> int:
        return hash("cpu")


HOST = cast("torch.device", _Host("cpu"))
"""What equals ``torch.device("cpu")`` and stands for it where torch has not been imported."""

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Kinds of devices that have no float64; of Intel's some have it."""


@cache
def draws(device: "torch.device") -> bool:
    """Whether tokens can be drawn on a device, which takes float64; for one that cannot the host reads its logits."""
    if device.type == "xpu":
        import torch

        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in WITHOUT_FLOAT64
