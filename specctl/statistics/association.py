"""How two series of numbers go together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.statistics.intervals import Floats

BINS = 10
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens whose signal lies between low and high, and the mean of something about them.

    ``lower`` and ``upper`` are the Wilson 95% interval of a frequency, or the quartiles of a number.
    """

    low: float
    high: float
    middle: float
    count: int
    value: float
    lower: float
    upper: float


def auroc(signal: Floats, accepted: Floats) -> float | None:
    """The chance that an accepted token has a higher signal than a refused one, ties counting half.

    Args:
        signal: ``(N,)``.
        accepted: ``(N,)`` probability of acceptance: such a token counts for both sides.
    """
    values, place = np.unique(signal, return_inverse=True)
    yes = np.bincount(place, accepted, len(values))
    no = np.bincount(place, 1 - accepted, len(values))
    pairs = yes.sum() * no.sum()
    return float((yes * (np.cumsum(no) - no / 2)).sum() / pairs) if pairs > 0 else None


def spearman(one: Floats, other: Floats) -> float | None:
    """Rank correlation, ties sharing their mean rank; None where one of them does not vary."""
    first, second = _ranks(one), _ranks(other)
    if not len(first) or not np.ptp(first) or not np.ptp(second):
        return None
    return float(np.corrcoef(first, second)[0, 1])


def wilson(successes: float, count: int) -> tuple[float, float]:
    """95% interval of a frequency."""
    share, weight = successes / count, _Z**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * np.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def binned(signal: Floats, values: Floats, *, frequency: bool = False) -> list[Bin]:
    """Means of ``values`` in bins that hold equally many tokens."""
    edges = np.unique(np.quantile(signal, np.linspace(0, 1, BINS + 1)))
    place = np.searchsorted(edges[1:-1], signal, side="right")
    bins = []
    for number in np.unique(place):
        inside, chosen = signal[place == number], values[place == number]
        if frequency:
            lower, upper = wilson(float(chosen.sum()), len(chosen))
        else:
            lower, upper = map(float, np.quantile(chosen, (0.25, 0.75)))
        extent = float(inside.min()), float(inside.max()), float(inside.mean())
        bins.append(Bin(*extent, len(chosen), float(chosen.mean()), lower, upper))
    return bins


def quantiles(values: Floats, weights: Floats, at: Sequence[float]) -> list[float]:
    """Smallest values that hold at least these shares of the weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = np.searchsorted(reached, np.asarray(at) * reached[-1])
    return [float(value) for value in values[order[np.minimum(places, len(values) - 1)]]]


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Floats = np.cumsum(counts) - (counts - 1) / 2
    return means[place]
