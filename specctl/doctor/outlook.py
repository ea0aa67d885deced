"""An upper bound of a pair's speedup before any run: passes are priced by the bytes they read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from specctl.doctor.expectations import WIDEST, Expectation
from specctl.models.placing.memory import DeviceMemory
from specctl.replay.costs import CostTable

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
"""Memory bandwidth in GB/s (10^9 bytes) by the driver's name of a card, without ``NVIDIA``, ``GeForce`` and ``Tesla``.
From NVIDIA's data sheets and GeForce specifications. Laptop cards have other names.
"""
MOST, LEAST = 1 << 28, 1 << 20  # The limits of the bytes read in one measurement
REPEATS = 5

Measure = Callable[[str, int], float]
"""Measures a device's bytes per second while it reads a number of bytes."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second, and whether they were measured here or published by the maker."""

    bytes_per_second: float
    source: Literal["measured", "published"]

    def milliseconds(self, size: float) -> float:
        """The time to read this number of bytes."""
        return size / self.bytes_per_second * 1e3

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.0f} GB/s ({self.source})"


def published(label: str) -> Bandwidth | None:
    """The published bandwidth of a card, by the driver's name; None for unknown cards."""
    name = label
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    found = PUBLISHED.get(name.strip())
    return None if found is None else Bandwidth(found * 1e9, "published")


def measured(device: str, size: int) -> float:
    """Bytes per second: the fastest of a few tries within about a second.

    A CPU sums the bytes with torch's threads, as a pass reads weights; small sizes stay in its caches, as small weights
    do. Other devices copy the bytes, which reads and writes.

    Args:
        device: named as in torch.
        size: bytes per try, clipped to 1 to 256 MiB.
    """
    import torch

    count = min(max(size, LEAST), MOST) // 4
    source = torch.ones(count, device=device)
    other = None if device == "cpu" else torch.empty_like(source)
    best = float("inf")
    for _ in range(REPEATS + 1):  # the first try also allocates memory and loads kernels
        began = perf_counter()
        if other is None:
            source.sum()
        else:
            other.copy_(source)
            torch.accelerator.synchronize(source.device)
        best = min(best, perf_counter() - began)
    return count * 4 * (1 if other is None else 2) / best


def bandwidth(device: DeviceMemory, size: int, *, here: bool, measure: Measure = measured) -> Bandwidth | None:
    """A device's bandwidth: measured if torch can use it (``here``), else published; None if neither is known.

    ``size`` is the bytes of the weights to be priced.
    """
    if here and device.free >= 4 * LEAST:
        return Bandwidth(measure(device.name, min(size, device.free // 4)), "measured")
    return published(device.label)


CACHED = 1000  # Tokens in the caches of the passes that are priced
RATES = (0.6, 0.7, 0.8, 0.9)  # Acceptance rates for which the speedup is given
LONGEST = WIDEST - 1
PRECISION = 0.01


@dataclass(frozen=True, slots=True)
class Gain:
    """The best draft length at an acceptance rate, and its speedup over target-only decoding."""

    acceptance_rate: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Lower bounds of a pair's pass times, and upper bounds of its speedup."""

    # by key, the least time of a pass over one token; None where the weights are on several kinds of devices or a
    # bandwidth is not known
    step_ms: Mapping[str, float | None]
    verify_ms: float | None  # the least time of the target's pass over 6 tokens; None as above
    cost_ratio: float | None  # a pass of the draft over one of the target, by bytes; None without a draft or a time
    # the draft's layers over the target's: the cost ratio where launching kernels takes the time and not memory. None
    # without a draft that has layers.
    layer_ratio: float | None
    # the break-even acceptance rate at `cost_ratio`; None if no rate is high enough
    pays_from: float | None
    pays_from_full: float | None  # the same with the caches as full as both models' contexts allow
    pays_from_launched: float | None  # the same at `layer_ratio`
    gains: tuple[Gain, ...]  # for each of `RATES`


def outlook(models: Sequence[Expectation], bandwidths: Mapping[str, Bandwidth | None]) -> Outlook:
    """The outlook of the target and its first draft; the target is the first of ``models``, ``bandwidths`` are by
    device.
    """
    target, *drafts = models
    step_ms = {one.key: milliseconds(one, bandwidths, 1) for one in models}
    verify_ms = milliseconds(target, bandwidths, 6)
    draft_ms, one = step_ms[drafts[0].key] if drafts else None, step_ms[target.key]
    if draft_ms is None or one is None:
        return Outlook(step_ms, verify_ms, None, None, None, None, None, ())
    blocks, table = drafts[0].blocks, _at(target, drafts[0], bandwidths, CACHED)
    most = len(table.lengths) - 1
    layers = drafts[0].layers / target.layers if drafts[0].layers and target.layers else None
    launched = None if layers is None else priced(layers, [1.0] * (most + 1), blocks=blocks)
    return Outlook(
        step_ms=step_ms,
        verify_ms=verify_ms,
        cost_ratio=draft_ms / one,
        layer_ratio=layers,
        pays_from=pays_from(table),
        pays_from_full=pays_from(_at(target, drafts[0], bandwidths, drafts[0].context)),
        pays_from_launched=None if launched is None else pays_from(launched),
        gains=tuple(best_gain(table, rate) for rate in RATES),
    )


def _at(target: Expectation, draft: Expectation, bandwidths: Mapping[str, Bandwidth | None], cached: int) -> CostTable:
    """The costs with a number of cached tokens; None if a pass has no known time."""
    most = min(draft.longest or LONGEST, LONGEST)
    steps = [milliseconds(target, bandwidths, width, cached) or 0.0 for width in range(1, most + 2)]
    return priced(milliseconds(draft, bandwidths, 1, cached) or 0.0, steps, blocks=draft.blocks)


def milliseconds(
    model: Expectation, bandwidths: Mapping[str, Bandwidth | None], width: int, cached: int = CACHED
) -> float | None:
    """The least time of a pass over some tokens after ``cached`` others: the time to read its weights and cache.

    The parts of a model on several devices of one kind are read one after another. None if a bandwidth is unknown, or
    if weights are offloaded to CPU memory or disk, because the bus was not measured.
    """
    if not model.reads:
        return 0.0
    if len({name.partition(":")[0] for name in model.devices}) > 1:
        return None
    size = model.reads[width - 1] + model.cache * cached
    parts = [(share / model.weights * size, bandwidths.get(name)) for name, share in model.devices.items()]
    found = [speed.milliseconds(part) for part, speed in parts if speed is not None]
    return sum(found) if len(found) == len(parts) else None


def priced(draft_ms: float, verify_ms: Sequence[float], *, blocks: bool) -> CostTable:
    """A cost table without overhead for drafts of 0, 1, ... tokens.

    Args:
        draft_ms: of one pass of the draft.
        verify_ms: of the target's passes over 1, 2, ... tokens.
        blocks: whether one pass of the draft writes a draft of any length.
    """
    lengths = np.arange(len(verify_ms), dtype=np.float64)
    passes = np.minimum(lengths, 1) if blocks else lengths
    return CostTable(np.zeros(1), lengths, draft_ms * passes[None], np.array([verify_ms]), {}, 0.0)


def best_gain(table: CostTable, acceptance_rate: float) -> Gain:
    """The draft length with the highest speedup if each token is accepted with this probability, independently.

    A round of K draft tokens then yields 1 + a + ... + a^K tokens (Leviathan et al. 2023, arXiv 2211.17192, equation 1;
    its Theorem 3.8 is the speedup where every verification takes as long as a pass over one token).
    """
    tokens = np.cumsum(acceptance_rate**table.lengths)  # (K + 1,)
    milliseconds = table.draft_ms[0] + table.verify_ms[0]
    speedups = tokens * milliseconds[0] / milliseconds
    length = int(speedups.argmax())
    return Gain(acceptance_rate, length, float(speedups[length]))


def pays_from(table: CostTable) -> float | None:
    """The least acceptance rate, in steps of `PRECISION`, at which drafts save time; None if there is none."""
    for step in range(round(1 / PRECISION) + 1):
        if best_gain(table, step * PRECISION).speedup > 1:
            return step * PRECISION
    return None
