"""Logistic regression that learns from one observation at a time and slowly forgets old ones. Pure Python on floats."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from math import exp, log

FLAT = 1e-4
"""Smallest variance of an outcome, so that even a certain prediction can still change. Probabilities are also kept this
far from 0 and 1 before they become log-odds."""
LARGEST = log((1 - FLAT) / FLAT)
LARGEST_SCORE = 30.0
"""From minus this on the probability is its score's exponential function, which cannot be too large a number."""
FEATURES = 3
"""The most features of an `OnlineLogistic`, besides the constant."""


def log_odds(probability: float) -> float:
    if probability < FLAT:
        return -LARGEST
    return log(probability / (1 - probability)) if probability < 1 - FLAT else LARGEST


@dataclass(slots=True)
class OnlineLogistic:
    """Logistic regression on up to three features whose weights drift: an extended Kalman filter.

    With f = (1, x, y, z), p = sigma(w f) and v = p (1 - p), an outcome o moves w by P f (o - p) / (1 + v f P f), and
    the covariance P shrinks by v P f (P f)' / (1 + v f P f): one online Newton step for each observation. Before each
    update the variance of every weight grows by ``drift`` times its prior variance, at most to the prior variance, so
    that old observations count less.

    It learns several times a round, where Python's own time counts: the sums are written out, which takes a quarter of
    the time of loops. A feature that is not used is 0, and so is all that it adds.

    Args:
        means: of the weights' prior: of the constant and of each feature.
        variances: variances of the prior, one for each weight.
        drift: share of the prior variance that each observation adds to the variance of a weight.

    Raises:
        ValueError: there are more than three features.
    """

    means: InitVar[Sequence[float]]
    variances: InitVar[Sequence[float]]
    drift: InitVar[float]
    weights: tuple[float, ...] = field(init=False)
    _limits: tuple[float, ...] = field(init=False, repr=False)
    _growth: tuple[float, ...] = field(init=False, repr=False)
    _covariance: tuple[float, ...] = field(init=False, repr=False)  # its upper triangle, row by row

    def __post_init__(self, means: Sequence[float], variances: Sequence[float], drift: float) -> None:
        unused = 1 + FEATURES - len(means)
        if unused < 0:
            raise ValueError(f"{len(means) - 1} features; at most {FEATURES} are possible")
        self.weights = (*means, *[0.0] * unused)
        self._limits = c, x, y, z = (*variances, *[0.0] * unused)
        self._growth = tuple(drift * limit for limit in self._limits)
        self._covariance = (c, 0.0, 0.0, 0.0, x, 0.0, 0.0, y, 0.0, z)

    def predict(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> float:
        """The probability of 1."""
        constant, of_x, of_y, of_z = self.weights
        score = constant + of_x * x + of_y * y + of_z * z
        return 1 / (1 + exp(-score)) if score > -LARGEST_SCORE else exp(score)

    def age(self, share: float) -> None:
        """Let the variance of every weight grow by a share of its prior variance, at most to the prior variance."""
        cc, cx, cy, cz, xx, xy, xz, yy, yz, zz = self._covariance
        c, x, y, z = (
            max(now, min(most, now + share * most)) for now, most in zip((cc, xx, yy, zz), self._limits, strict=True)
        )
        self._covariance = (c, cx, cy, cz, x, xy, xz, y, yz, z)

    def learn(self, outcome: float, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> None:
        """Update the weights by an outcome: 0 or 1, or the probability of 1 if it is known."""
        if not self._limits[3]:
            self._learn_without_third(outcome, x, y)
            return
        cc, cx, cy, cz, xx, xy, xz, yy, yz, zz = self._covariance
        constant, of_x, of_y, of_z = self.weights
        most_c, most_x, most_y, most_z = self._limits
        more_c, more_x, more_y, more_z = self._growth
        if cc < most_c:
            cc += more_c
        if xx < most_x:
            xx += more_x
        if yy < most_y:
            yy += more_y
        if zz < most_z:
            zz += more_z
        # P f
        c = cc + cx * x + cy * y + cz * z
        d = cx + xx * x + xy * y + xz * z
        e = cy + xy * x + yy * y + yz * z
        f = cz + xz * x + yz * y + zz * z
        predicted = self.predict(x, y, z)
        variance = max(FLAT, predicted * (1 - predicted))
        scale = 1 + variance * (c + d * x + e * y + f * z)
        step, shrink = (outcome - predicted) / scale, variance / scale
        self.weights = constant + step * c, of_x + step * d, of_y + step * e, of_z + step * f
        by_c, by_d, by_e = shrink * c, shrink * d, shrink * e
        self._covariance = (
            *(cc - by_c * c, cx - by_c * d, cy - by_c * e, cz - by_c * f),
            *(xx - by_d * d, xy - by_d * e, xz - by_d * f),
            *(yy - by_e * e, yz - by_e * f),
            zz - shrink * f * f,
        )

    def _learn_without_third(self, outcome: float, x: float, y: float) -> None:
        """The same without the sums that a third feature adds to, in half the time."""
        cc, cx, cy, _, xx, xy, _, yy, _, _ = self._covariance
        constant, of_x, of_y, _ = self.weights
        most_c, most_x, most_y, _ = self._limits
        more_c, more_x, more_y, _ = self._growth
        if cc < most_c:
            cc += more_c
        if xx < most_x:
            xx += more_x
        if yy < most_y:
            yy += more_y
        c = cc + cx * x + cy * y
        d = cx + xx * x + xy * y
        e = cy + xy * x + yy * y
        score = constant + of_x * x + of_y * y
        predicted = 1 / (1 + exp(-score)) if score > -LARGEST_SCORE else exp(score)
        variance = predicted * (1 - predicted)
        if variance < FLAT:
            variance = FLAT
        scale = 1 + variance * (c + d * x + e * y)
        step, shrink = (outcome - predicted) / scale, variance / scale
        self.weights = constant + step * c, of_x + step * d, of_y + step * e, 0.0
        by_c, by_d = shrink * c, shrink * d
        self._covariance = (
            cc - by_c * c,
            cx - by_c * d,
            cy - by_c * e,
            0.0,
            xx - by_d * d,
            xy - by_d * e,
            0.0,
            yy - shrink * e * e,
            0.0,
            0.0,
        )
