"""How fast a device reads its memory: what its maker publishes, and what is measured where it is at hand."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from specctl.models.placing.memory import DeviceMemory

PUBLISHED = {
    "B200": 8000,
    "H200": 4800,
    "H100 80GB HBM3": 3350,
    "H100 NVL": 3900,
    "H100 PCIe": 2000,
    "A100-SXM4-80GB": 2039,
    "A100 80GB PCIe": 1935,
    "A100-SXM4-40GB": 1555,
    "A100-PCIE-40GB": 1555,
    "A40": 696,
    "A30": 933,
    "A10": 600,
    "A10G": 600,
    "L40S": 864,
    "L40": 864,
    "L4": 300,
    "V100-SXM2-16GB": 900,
    "V100-SXM2-32GB": 900,
    "T4": 320,
    "RTX 6000 Ada Generation": 960,
    "RTX A6000": 768,
    "RTX 5090": 1792,
    "RTX 5080": 960,
    "RTX 4090": 1008,
    "RTX 4080 SUPER": 736,
    "RTX 4080": 717,
    "RTX 4070 Ti": 504,
    "RTX 4070": 504,
    "RTX 4060": 272,
    "RTX 3090 Ti": 1008,
    "RTX 3090": 936,
}
"""GB/s (10^9 bytes) by the driver's name of a card without ``NVIDIA``, ``GeForce`` and ``Tesla``; from NVIDIA's data
sheets of data centre and workstation cards and its GeForce specifications. Laptops' cards have names of their own."""
MOST, LEAST = 1 << 28, 1 << 20
"""Bytes that a measurement reads at once."""
REPEATS = 5

Measure = Callable[[str, int], float]
"""Bytes a second of a device, named as in torch, when it reads this many bytes."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, and whether they were measured here or are what the maker publishes."""

    bytes_per_second: float
    source: Literal["measured", "published"]

    def milliseconds(self, size: float) -> float:
        """What reading this many bytes takes."""
        return size / self.bytes_per_second * 1e3

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.0f} GB/s ({self.source})"


def published(label: str) -> Bandwidth | None:
    """What the maker of a card publishes; None for cards that are not in the table.

    Args:
        label: the driver's name of the card.
    """
    name = label
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    found = PUBLISHED.get(name.strip())
    return None if found is None else Bandwidth(found * 1e9, "published")


def measured(device: str, size: int) -> float:
    """Bytes a second, the fastest of a few tries that take a second at most in all.

    A CPU sums the bytes with torch's threads, which reads them as a pass reads weights: few bytes come from its caches,
    as weights do that fit in there. Other devices copy them, which reads and writes.

    Args:
        device: named as in torch.
        size: bytes that are read in each try, between 1 and 256 MiB.
    """
    import torch

    count = min(max(size, LEAST), MOST) // 4
    source = torch.ones(count, device=device)
    other = None if device == "cpu" else torch.empty_like(source)
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first try also finds memory and loads kernels
        began = perf_counter()
        if other is None:
            source.sum()
        else:
            other.copy_(source)
            torch.accelerator.synchronize(source.device)
        best = min(best, perf_counter() - began)
    return count * 4 * (1 if other is None else 2) / best


def bandwidth(device: DeviceMemory, size: int, *, here: bool, measure: Measure = measured) -> Bandwidth | None:
    """A device's bandwidth: measured if torch can use it, else published; None if neither is known.

    Args:
        device: the device.
        size: bytes of the weights whose reading is to be priced.
        here: whether torch can use it.
        measure: measures one that it can use.
    """
    if here and device.free >= 4 * LEAST:
        return Bandwidth(measure(device.name, min(size, device.free // 4)), "measured")
    return published(device.label)
