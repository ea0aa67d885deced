"""Estimators that learn from one observation at a time and slowly forget. Pure Python on a handful of floats."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

FLAT = 1e-4
"""Least variance of an outcome, so that a certain prediction can still be unlearned; probabilities are kept as far from
0 and 1 before they become log-odds."""
RIDGE = 0.05
"""Variance of k below which a slope over it is mostly taken for 0."""
RATE_SPEED = 0.005
"""How fast the rate over all tokens moves."""
PLAUSIBLE, TOLERANCE, SCALE_RATE = 3.0, 0.1, 0.1
"""An error counts up to so many typical errors plus a tenth of what was expected; how fast the typical error moves."""


def log_odds(chance: float) -> float:
    chance = min(1 - FLAT, max(FLAT, chance))
    return log(chance / (1 - chance))


@dataclass(slots=True)
class OnlineLogistic:
    """Logistic regression whose weights drift: an extended Kalman filter, one online Newton step per observation.

    With p = sigma(w x) and v = p (1 - p), an outcome y moves w by P x (y - p) / (1 + v x P x), and the covariance P
    shrinks by v P x (P x)' / (1 + v x P x). Before that each weight's variance grows by ``drift`` times the prior's, up
    to the prior itself: what was learned long ago counts less.

    Attributes:
        weights: of the features, in their order; the prior's mean at first.
        variances: of the prior, one for each weight.
        drift: share of the prior's variance that comes back with each observation.
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
        """``outcome`` is 0 or 1, or the probability of 1 where that is known."""
        for place, (row, variance) in enumerate(zip(self._covariance, self.variances, strict=True)):
            if row[place] < variance:
                row[place] += self.drift * variance
        spread = [sum(c * value for c, value in zip(row, features, strict=True)) for row in self._covariance]
        chance = self.predict(features)
        certainty = max(FLAT, chance * (1 - chance))
        whole = 1 + certainty * sum(s * value for s, value in zip(spread, features, strict=True))
        step, shrink = (outcome - chance) / whole, certainty / whole
        for place, (row, here) in enumerate(zip(self._covariance, spread, strict=True)):
            self.weights[place] += step * here
            for other, there in enumerate(spread):
                row[other] -= shrink * here * there


@dataclass(slots=True)
class RunningLine:
    """Seconds as base + slope k by least squares with forgetting, outliers drawn in to what is plausible.

    Attributes:
        memory: weight of an observation once the next one is there.
        anchored: whether the line goes through the origin.
    """

    memory: float
    anchored: bool = False
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
        """Seconds for one more k, not below 0."""
        if self.anchored:
            return self._t / self._k
        mean = self._k / self._count
        varied, together = self._kk / self._count - mean * mean, self._kt / self._count - mean * self._t / self._count
        return max(0.0, together / (varied + RIDGE))

    @property
    def base(self) -> float:
        """Seconds at k = 0, not below 0."""
        return 0.0 if self.anchored else max(0.0, (self._t - self.slope * self._k) / self._count)

    def learn(self, k: int, seconds: float) -> None:
        """``k`` is at least 1 for an anchored line."""
        if self.known:
            expected = self.base + self.slope * k
            most = PLAUSIBLE * self._scale + TOLERANCE * expected
            error = seconds - expected
            seconds = expected + max(-most, min(most, error))
            # The scale sees more of it, so that a lasting change is believed within a few rounds.
            self._scale += SCALE_RATE * (min(2 * most, abs(error)) - self._scale)
        self._count = self.memory * self._count + 1
        self._k = self.memory * self._k + k
        self._kk = self.memory * self._kk + k * k
        self._t = self.memory * self._t + seconds
        self._kt = self.memory * self._kt + k * seconds


@dataclass(slots=True)
class TokenRates:
    """How often what follows a token was kept, against how often anything was; unseen tokens say nothing.

    Attributes:
        prior: how many observations of its own a token needs to count as much as all the others.
    """

    prior: float
    _rate: float = 0.7
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)

    def surplus(self, token: int | None) -> float:
        """Log-odds of the token's shrunken rate over those of the whole."""
        if token is None or token not in self._seen:
            return 0.0
        kept, judged = self._seen[token]
        return log_odds((kept + self.prior * self._rate) / (judged + self.prior)) - log_odds(self._rate)

    def learn(self, token: int | None, outcome: float) -> None:
        self._rate += RATE_SPEED * (outcome - self._rate)
        if token is not None:
            kept, judged = self._seen.get(token, (0.0, 0))
            self._seen[token] = kept + outcome, judged + 1
