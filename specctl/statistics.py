"""Bootstrap intervals, rank statistics, logistic curves and Pareto fronts over plain arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 20240531
CONFIDENCE = 0.95
FEW = 10  # From fewer prompts than this, a bootstrap interval is too narrow: few resamples differ
_CHUNK = 4_000_000  # How many resampling weights may be in memory at once

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A value and its 95% bootstrap interval."""

    value: float  # from all prompts
    # low, high: the bounds; None for fewer than two prompts
    low: float | None = None
    high: float | None = None
    # the number of prompts; None for a value that is not an estimate, such as a speed over itself
    prompts: int | None = None

    @property
    def doubt(self) -> str:
        """The reason why the bounds cannot be trusted; empty where they can."""
        if self.prompts is not None and self.prompts < FEW:
            return f"only {self.prompts} prompt{'s' * (self.prompts != 1)}"
        if self.low is not None and self.low == self.high and self.value != 1:
            return "an interval of no width says nothing"
        return ""


def is_clear(ratio: Interval) -> bool:
    """Whether a ratio has an interval that excludes 1."""
    return ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def bootstrap(statistic: Callable[[Floats], Floats], prompts: int, resamples: int = RESAMPLES) -> Interval:
    """Percentile interval of a statistic under resampling of prompts; the same prompts are drawn at every call.

    Args:
        statistic: computes values (R,) from weights (R, prompts), the number of times each prompt was drawn.
        prompts: at least 1.
        resamples: number of resamples.
    """
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < 2:
        return Interval(value, prompts=prompts)
    generator = np.random.default_rng(SEED)
    even = np.full(prompts, 1 / prompts)
    chunk = max(1, _CHUNK // prompts)
    values = [
        statistic(generator.multinomial(prompts, even, size=min(chunk, resamples - start)).astype(np.float64))
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(values), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high), prompts)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that are not dominated: no other point is as low in both coordinates and lower in one."""
    return [
        index
        for index, point in enumerate(points)
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    ]


_NEWTON_STEPS = 50
_LONGEST_STEP = 2.0
_RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class Logistic:
    """The logit of acceptance as ``intercept + slope * signal``."""

    intercept: float
    slope: float

    def logits(self, signal: Floats) -> Floats:
        return self.intercept + self.slope * signal


def sigmoid(logits: Floats) -> Floats:
    """Probabilities from logits of any shape; small ones keep their precision."""
    found: Floats = np.exp(-np.logaddexp(0.0, -logits))
    return found


def fit_logistic(signal: Floats, accepted: Floats, reject_weight: float = 1.0) -> Logistic:
    """Fit a logistic curve through one signal by weighted binary cross-entropy.

    Args:
        signal: ``(N,)``.
        accepted: ``(N,)`` probability of acceptance.
        reject_weight: weight of a rejection; an acceptance weighs 1.
    """
    centre, spread = float(signal.mean()), float(signal.std()) or 1.0
    features = np.stack([np.ones(len(signal)), (signal - centre) / spread], axis=1)  # (N, 2)
    intercept, slope = fit_weights(features, accepted, ridge=_RIDGE, reject_weight=reject_weight)
    return Logistic(float(intercept - slope * centre / spread), float(slope / spread))


def fit_weights(features: Floats, accepted: Floats, *, ridge: float, reject_weight: float = 1.0) -> Floats:
    """The weights (F,) of a logistic regression, by Newton's method on the cross-entropy summed over tokens.

    Args:
        features: ``(N, F)``, of similar scale.
        accepted: ``(N,)`` probability of acceptance.
        ridge: ``ridge / 2 * |weights|^2`` is added to the loss; above 0, so that separable data have a solution.
        reject_weight: weight of a rejection; an acceptance weighs 1.
    """
    importance = accepted + reject_weight * (1 - accepted)  # (N,)
    penalty = ridge * np.eye(features.shape[1])
    weights = np.zeros(features.shape[1])
    for _ in range(_NEWTON_STEPS):
        predicted = sigmoid(features @ weights)  # (N,)
        gradient = features.T @ (accepted - importance * predicted) - penalty @ weights
        curvature = (features.T * (importance * predicted * (1 - predicted))) @ features + penalty
        step = np.linalg.solve(curvature, gradient)
        longest = float(np.abs(step).max())
        # A whole Newton step may overshoot where the curve is flat.
        weights = weights + step * min(1.0, _LONGEST_STEP / max(longest, 1e-12))
        if longest < 1e-9:
            break
    return weights


BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens whose signal lies between ``low`` and ``high``, with the mean of some value of these tokens."""

    # low, high, middle: smallest, largest and mean signal in the bin
    low: float
    high: float
    middle: float
    count: int  # tokens in the bin
    value: float  # mean of the value
    # lower, upper: the Wilson 95% interval where the value is a frequency, else the quartiles of the value
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
    return low if successes else 0.0, high if successes < count else 1.0  # without rounding errors


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
