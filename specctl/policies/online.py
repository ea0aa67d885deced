"""Estimators that learn from one observation at a time and slowly forget old ones. Pure Python on a few floats."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

FLAT = 1e-4
"""Smallest variance of an outcome, so that even a certain prediction can still change. Probabilities are also kept this
far from 0 and 1 before they become log-odds."""
RIDGE = 0.05
"""Added to the variance of k, so that the slope is close to 0 while k hardly varies."""
RATE_SPEED = 0.005
"""Weight of one observation in the acceptance rate over all tokens."""
PLAUSIBLE, TOLERANCE, SCALE_RATE = 3.0, 0.1, 0.1
"""Errors are clipped to PLAUSIBLE typical errors plus TOLERANCE times the expected value; SCALE_RATE is the weight of
one observation in the typical error."""


def log_odds(probability: float) -> float:
    probability = min(1 - FLAT, max(FLAT, probability))
    return log(probability / (1 - probability))


@dataclass(slots=True)
class OnlineLogistic:
    """Logistic regression whose weights drift: an extended Kalman filter, one online Newton step per observation.

    With p = sigma(w x) and v = p (1 - p), an outcome y moves w by P x (y - p) / (1 + v x P x), and the covariance P
    shrinks by v P x (P x)' / (1 + v x P x). Before each update the variance of every weight grows by ``drift`` times
    its prior variance, at most to the prior variance, so that old observations count less.

    Attributes:
        weights: one for each feature; at first the means of the prior.
        variances: variances of the prior, one for each weight.
        drift: share of the prior variance that each observation adds to the variance of a weight.
    """

    weights: list[float]
    variances: Sequence[float]
    drift: float
    _covariance: list[list[float]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = range(len(self.weights))
        self._covariance = [[self.variances[row] if row == column else 0.0 for column in size] for row in size]

    def predict(self, features: Sequence[float]) -> float:
        score = sum(weight * value for weight, value in zip(self.weights, features, strict=True))
        return 1 / (1 + exp(-max(-30.0, min(30.0, score))))

    def learn(self, features: Sequence[float], outcome: float) -> None:
        """Update the weights by an outcome: 0 or 1, or the probability of 1 if it is known."""
        for index, (row, prior) in enumerate(zip(self._covariance, self.variances, strict=True)):
            if row[index] < prior:
                row[index] += self.drift * prior
        direction = [sum(c * value for c, value in zip(row, features, strict=True)) for row in self._covariance]  # P x
        predicted = self.predict(features)
        variance = max(FLAT, predicted * (1 - predicted))
        scale = 1 + variance * sum(d * value for d, value in zip(direction, features, strict=True))
        step, shrink = (outcome - predicted) / scale, variance / scale
        for index, (row, part) in enumerate(zip(self._covariance, direction, strict=True)):
            self.weights[index] += step * part
            for column, other in enumerate(direction):
                row[column] -= shrink * part * other


@dataclass(slots=True)
class RunningLine:
    """Seconds as base + slope k, by least squares that forgets old observations and clips outliers.

    Attributes:
        memory: factor on the weight of every old observation when a new one arrives.
        anchor: observations of 0 seconds at k = 0 that are added to the real ones; with some, a line whose k hardly
            varies goes through the origin, without them it is flat.
    """

    memory: float
    anchor: float = 0.0
    _count: float = 0.0
    _k: float = 0.0
    _kk: float = 0.0
    _t: float = 0.0
    _kt: float = 0.0
    _scale: float = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def slope(self) -> float:
        """Additional seconds when k grows by 1, at least 0."""
        count = self._count + self.anchor
        mean = self._k / count
        varied, together = self._kk / count - mean * mean, self._kt / count - mean * self._t / count
        slope = max(0.0, together / (varied + (0.0 if self.anchor else RIDGE)))
        # A base below 0 would make a slope too steep.
        return min(slope, self._t / self._k) if self.anchor else slope

    @property
    def base(self) -> float:
        """Seconds at k = 0, at least 0."""
        return max(0.0, (self._t - self.slope * self._k) / (self._count + self.anchor))

    def learn(self, k: int, seconds: float) -> None:
        """Add an observation; ``k`` must be at least 1 for a line with an anchor."""
        if self.known:
            expected = self.base + self.slope * k
            most = PLAUSIBLE * self._scale + TOLERANCE * expected
            error = seconds - expected
            seconds = expected + max(-most, min(most, error))
            # The scale learns from errors clipped less, so that the line follows a lasting change within a few rounds.
            self._scale += SCALE_RATE * (min(2 * most, abs(error)) - self._scale)
        self._count = self.memory * self._count + 1
        self._k = self.memory * self._k + k
        self._kk = self.memory * self._kk + k * k
        self._t = self.memory * self._t + seconds
        self._kt = self.memory * self._kt + k * seconds


@dataclass(slots=True)
class TokenRates:
    """Acceptance rates of draft tokens by the token before them, compared with the rate over all tokens.

    Attributes:
        prior: number of observations after which a token's own rate weighs as much as the rate over all tokens.
    """

    prior: float
    _rate: float = 0.7
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)

    def surplus(self, token: int | None) -> float:
        """Log-odds of the token's rate, shrunk towards the overall rate, minus log-odds of the overall rate.

        0 for None and for a token without observations.
        """
        if token is None or token not in self._seen:
            return 0.0
        accepted, verified = self._seen[token]
        return log_odds((accepted + self.prior * self._rate) / (verified + self.prior)) - log_odds(self._rate)

    def learn(self, token: int | None, outcome: float) -> None:
        """Add the outcome (0 or 1, or the probability of 1) of the draft token that follows ``token``."""
        self._rate += RATE_SPEED * (outcome - self._rate)
        if token is not None:
            accepted, verified = self._seen.get(token, (0.0, 0))
            self._seen[token] = accepted + outcome, verified + 1
