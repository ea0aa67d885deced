"""What speculation can bring a pair at most, before anything has run: passes priced by the bytes that they read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specctl.doctor.bandwidth import Bandwidth
from specctl.doctor.expectations import WIDEST, Expectation
from specctl.replay.costs import CostTable

CACHED = 1000
"""Tokens in the caches of the passes that are priced."""
RATES = (0.6, 0.7, 0.8, 0.9)
"""Acceptance rates for which the speedup is told."""
LONGEST = WIDEST - 1
PRECISION = 0.01


@dataclass(frozen=True, slots=True)
class Gain:
    """The best that drafts of one length bring at an acceptance rate: over target-only decoding."""

    acceptance_rate: float
    draft_length: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a pair's passes take at least, and what its drafts can bring at most.

    Attributes:
        step_ms: by key, the least time of a pass over one token; None where the weights are on several kinds of devices
            or a bandwidth is not known.
        verify_ms: the least time of the target's pass over 6 tokens; None likewise.
        cost_ratio: a pass of the draft over one of the target, by bytes; None without a draft or a time.
        layer_ratio: the draft's layers over the target's, which is the ratio where the launching of kernels takes the
            time and not memory; None without a draft that has layers.
        pays_from: the acceptance rate from which drafts save time, at `cost_ratio`; None if none is high enough.
        pays_from_full: the same with as many tokens in the caches as both hold.
        pays_from_launched: the same at `layer_ratio`.
        gains: for each of `RATES`.
    """

    step_ms: Mapping[str, float | None]
    verify_ms: float | None
    cost_ratio: float | None
    layer_ratio: float | None
    pays_from: float | None
    pays_from_full: float | None
    pays_from_launched: float | None
    gains: tuple[Gain, ...]


def outlook(models: Sequence[Expectation], bandwidths: Mapping[str, Bandwidth | None]) -> Outlook:
    """What can be told of the target and its first draft.

    Args:
        models: the target first.
        bandwidths: by device.
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
    """The costs with so many tokens in the caches, where all passes have times."""
    most = min(draft.longest or LONGEST, LONGEST)
    steps = [milliseconds(target, bandwidths, width, cached) or 0.0 for width in range(1, most + 2)]
    return priced(milliseconds(draft, bandwidths, 1, cached) or 0.0, steps, blocks=draft.blocks)


def milliseconds(
    model: Expectation, bandwidths: Mapping[str, Bandwidth | None], width: int, cached: int = CACHED
) -> float | None:
    """The least time of a pass over some tokens behind ``cached`` others: what reading its weights and cache takes.

    A model that is spread over devices of one kind has its parts read one after the other. None where some of its
    weights wait in the memory of the CPU or on disk for another device, for they come by a bus that nobody measured,
    and where a bandwidth is not known.
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
    """A table without overhead for drafts of 0, 1, ... tokens.

    Args:
        draft_ms: of one pass of the draft.
        verify_ms: of the target's passes over 1, 2, ... tokens.
        blocks: whether one pass of the draft writes a draft of any length.
    """
    lengths = np.arange(len(verify_ms), dtype=np.float64)
    passes = np.minimum(lengths, 1) if blocks else lengths
    return CostTable(np.zeros(1), lengths, draft_ms * passes[None], np.array([verify_ms]), {}, 0.0)


def best_gain(table: CostTable, acceptance_rate: float) -> Gain:
    """The draft length that brings most if each token is accepted with this probability, whatever the others are.

    A round of K draft tokens then brings 1 + a + ... + a^K tokens (Leviathan et al. 2023, arXiv 2211.17192, equation 1;
    its Theorem 3.8 is the speedup where every verification takes as long as a pass over one token).
    """
    tokens = np.cumsum(acceptance_rate**table.lengths)  # (K + 1,)
    milliseconds = table.draft_ms[0] + table.verify_ms[0]
    speedups = tokens * milliseconds[0] / milliseconds
    length = int(speedups.argmax())
    return Gain(acceptance_rate, length, float(speedups[length]))


def pays_from(table: CostTable) -> float | None:
    """The least acceptance rate, in steps of `PRECISION`, at which some draft is faster than none; None if none is."""
    for step in range(round(1 / PRECISION) + 1):
        if best_gain(table, step * PRECISION).speedup > 1:
            return step * PRECISION
    return None
