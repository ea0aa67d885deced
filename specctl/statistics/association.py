"""Measures of how two series of numbers go together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from specctl.statistics.intervals import CONFIDENCE, Floats

BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens whose signal lies between ``low`` and ``high``, with the mean of some value of these tokens.

    Attributes:
        low, high, middle: smallest, largest and mean signal in the bin.
        count: tokens in the bin.
        value: mean of the value.
        lower, upper: the Wilson 95% interval where the value is a frequency, else the quartiles of the value.
    """

    low: float
    high: float
    middle: float
    count: int
    value: float
    lower: float
    upper: float


def auroc(signal: Floats, accepted: Floats) -> float | None:
    """The probability that an accepted token has a higher signal than a rejected one, ties counting half.

    Args:
        signal: ``(N,)``.
        accepted: ``(N,)`` probability of acceptance; a token counts as accepted with this weight and as rejected with
            the remaining weight.

    Returns:
        None where no token was accepted or none was rejected.
    """
    values, position = np.unique(signal, return_inverse=True)
    yes = np.bincount(position, accepted, len(values))
    no = np.bincount(position, 1 - accepted, len(values))
    pairs = yes.sum() * no.sum()
    return float((yes * (np.cumsum(no) - no / 2)).sum() / pairs) if pairs > 0 else None


def spearman(one: Floats, other: Floats) -> float | None:
    """Rank correlation of two ``(N,)`` arrays, ties sharing their mean rank; None where one of them does not vary."""
    if not len(one) or not np.ptp(one) or not np.ptp(other):
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    """The rank ``(N,)`` of each number; equal ones share their mean rank."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[position]
    return ranks


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The Wilson 95% interval of a frequency (Wilson 1927)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, reach = successes / count, z * z / count
    middle = share + reach / 2
    wide = sqrt(reach * (share * (1 - share) + reach / 4))
    low, high = (middle - wide) / (1 + reach), (middle + wide) / (1 + reach)
    return low if successes else 0.0, high if successes < count else 1.0  # and nothing that rounding left


def binned(signal: Floats, values: Floats, *, frequency: bool = False) -> list[Bin]:
    """Means of ``values`` in bins that contain equally many tokens.

    Args:
        signal: ``(N,)``; tokens of equal signal share a bin.
        values: ``(N,)``.
        frequency: whether the values are all 0 or 1, so that their mean has a Wilson interval.
    """
    edges = np.unique(np.quantile(signal, np.linspace(0, 1, BINS + 1)))
    position = np.searchsorted(edges[1:-1], signal, side="right")
    bins = []
    for number in np.unique(position):
        inside, chosen = signal[position == number], values[position == number]
        if frequency:
            lower, upper = wilson(round(chosen.sum()), len(chosen))
        else:
            lower, upper = map(float, np.quantile(chosen, (0.25, 0.75)))
        extent = float(inside.min()), float(inside.max()), float(inside.mean())
        bins.append(Bin(*extent, len(chosen), float(chosen.mean()), lower, upper))
    return bins


def quantiles(values: Floats, weights: Floats, at: Sequence[float]) -> list[float]:
    """For each share in ``at``, the smallest of the ``(N,)`` values up to which that share of the weight lies."""
    found: Floats = np.quantile(values, np.asarray(at), weights=weights, method="inverted_cdf")
    return [float(value) for value in found]
