"""Estimators that learn from one observation at a time and slowly forget old ones. Pure Python on a few floats."""

from dataclasses import dataclass, field

from specctl.policies.logistic import log_odds
from specctl.records import Round

RIDGE = 0.05
"""Added to the variance of k, so that the slope is close to 0 while k hardly varies."""
RATE_SPEED = 0.005
"""Weight of one observation in the acceptance rate over all tokens."""
PLAUSIBLE, TOLERANCE, SCALE_RATE = 3.0, 0.1, 0.1
"""Errors are clipped to PLAUSIBLE typical errors plus a TOLERANCE times the expected value; SCALE_RATE is the weight of
one observation in the typical error."""
ENOUGH, NEGLIGIBLE = 20, 0.01
"""Drafts after which it is asked whether the beginning of a draft pays, and the tokens that it must cost."""
SURPLUS_MEMORY, LARGEST_SURPLUS = 0.98, 0.3
"""Factor on the weight of earlier observations of a width, and the largest surplus of one, as a share of the line."""
SURPLUS_PRIOR, SURPLUS_NOISE = 4.0, 0.05
"""A surplus is believed by half after this many observations, and this many more for each square of the typical error
over SURPLUS_NOISE of the expected time."""
SLOWDOWN_RATE, LARGEST_SLOWDOWN = 0.3, 4.0
"""Weight of one observation in the logarithm of the slowdown; an observation counts at most as this factor."""


@dataclass(slots=True)
class RunningLine:
    """Seconds as base + slope k, by least squares that forgets old observations and clips outliers.

    Attributes:
        memory: factor on the weight of every old observation when a new one arrives.
        anchor: observations of 0 seconds at k = 0 that are added to the real ones; with some, a line whose k hardly
            varies goes through the origin, without them it is flat.
        tolerance: the share of the expected value up to which an error is plausible whatever the typical error.
    """

    memory: float
    anchor: float = 0.0
    tolerance: float = TOLERANCE
    _count: float = 0.0
    _k: float = 0.0
    _kk: float = 0.0
    _t: float = 0.0
    _kt: float = 0.0
    _scale: float = 0.0
    _fit: tuple[float, float] | None = None  # asked for several times a round

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def error(self) -> float:
        """The typical error of an observation in seconds."""
        return self._scale

    def at(self, k: int) -> float:
        """Seconds at ``k``."""
        base, slope = self.fit()
        return base + slope * k

    def fit(self) -> tuple[float, float]:
        """The base, seconds at k = 0, and the slope, additional seconds when k grows by 1; both at least 0."""
        if self._fit is None:
            self._fit = self._fitted()
        return self._fit

    def _fitted(self) -> tuple[float, float]:
        count = self._count + self.anchor
        mean = self._k / count
        varied, together = self._kk / count - mean * mean, self._kt / count - mean * self._t / count
        slope = max(0.0, together / (varied + (0.0 if self.anchor else RIDGE)))
        if self.anchor:  # a base below 0 would make a slope too steep
            slope = min(slope, self._t / self._k)
        return max(0.0, (self._t - slope * self._k) / count), slope

    def learn(self, k: int, seconds: float) -> None:
        """Add an observation; ``k`` must be at least 1 for a line with an anchor."""
        if self.known:
            expected = self.at(k)
            most = PLAUSIBLE * self._scale + self.tolerance * expected
            error = seconds - expected
            seconds = expected + max(-most, min(most, error))
            # The scale learns from errors clipped less, so that the line follows a lasting change within a few rounds.
            self._scale += SCALE_RATE * (min(2 * most, abs(error)) - self._scale)
        self._count = self.memory * self._count + 1
        self._k = self.memory * self._k + k
        self._kk = self.memory * self._kk + k * k
        self._t = self.memory * self._t + seconds
        self._kt = self.memory * self._kt + k * seconds
        self._fit = None


@dataclass(slots=True)
class WidthTimes:
    """Seconds of a pass over k draft tokens: a `RunningLine`, and by how much single widths differ from it.

    Matrix products of some widths, such as multiples of 4, can be faster than those of narrower ones.

    Attributes:
        line: through all widths.
    """

    line: RunningLine
    _surplus: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, k: int, seconds: float) -> None:
        """Add an observation."""
        self.line.learn(k, seconds)
        expected = self.line.at(k)
        most = LARGEST_SURPLUS * expected
        total, weight = self._surplus.get(k, (0.0, 0.0))
        surplus = max(-most, min(most, seconds - expected))
        self._surplus[k] = SURPLUS_MEMORY * total + surplus, SURPLUS_MEMORY * weight + 1

    def upto(self, count: int) -> list[float]:
        """Seconds for each k from 0 to below ``count``."""
        base, slope = self.line.fit()
        seconds = [base + slope * k for k in range(count)]
        for k, (total, weight) in self._surplus.items():
            if k < count and seconds[k] > 0:
                doubt = SURPLUS_PRIOR + (self.line.error / (SURPLUS_NOISE * seconds[k])) ** 2
                seconds[k] += total / (weight + doubt)
        return seconds


@dataclass(slots=True)
class Slowdown:
    """How many times longer than expected two things take alike, as when other programs want the processor.

    Times divided by it are comparable from round to round, although the machine's speed changes between them.
    """

    value: float = 1.0

    def learn(self, one: float, other: float) -> None:
        """Add the two times of a round, each over the time that was expected of a machine as fast as usual.

        What both have in common is the median of them and 1: nothing if only one is slower, or one is faster.
        """
        common = min(LARGEST_SLOWDOWN, max(1 / LARGEST_SLOWDOWN, sorted((one, other, 1.0))[1]))
        self.value *= (common / self.value) ** SLOWDOWN_RATE


@dataclass(slots=True)
class DraftSums:
    """The rounds that drafted, in sums that fade: their draft tokens, the accepted ones, the accepted first ones.

    Attributes:
        memory: factor on every sum when a round ends.
    """

    memory: float
    rounds: int = 0
    drafted: float = 0.0
    accepted: float = 0.0
    first: float = 0.0

    def learn(self, round_: Round) -> None:
        self.rounds += 1
        self.drafted = self.memory * self.drafted + round_.drafted
        self.accepted = self.memory * self.accepted + round_.accepted
        self.first = self.memory * self.first + (round_.accepted > 0)

    def pays(self, first: float, price: float, entry: float) -> bool:
        """Whether a draft whose first token is accepted with probability ``first`` is expected to earn its beginning.

        Args:
            first: the probability.
            price: tokens lost by the time of one more draft token.
            entry: tokens lost by the time of beginning.
        """
        if self.rounds < ENOUGH or entry < NEGLIGIBLE:
            return True
        return first * (self.accepted - price * self.drafted) >= entry * self.first


@dataclass(slots=True)
class TokenRates:
    """Acceptance rates of draft tokens by the token before them, compared with the rate over all tokens.

    Attributes:
        prior: number of observations after which a token's own rate weighs as much as the rate over all tokens.
    """

    prior: float
    _rate: float = 0.7
    _level: float = log_odds(0.7)  # of the rate
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)

    def surplus(self, token: int | None) -> float:
        """Log-odds of the token's rate, shrunk towards the overall rate, minus log-odds of the overall rate.

        0 for None and for a token without observations.
        """
        if token is None or token not in self._seen:
            return 0.0
        accepted, verified = self._seen[token]
        return log_odds((accepted + self.prior * self._rate) / (verified + self.prior)) - self._level

    def learn(self, token: int | None, outcome: float) -> None:
        """Add the outcome (0 or 1, or the probability of 1) of the draft token that follows ``token``."""
        self._rate += RATE_SPEED * (outcome - self._rate)
        self._level = log_odds(self._rate)
        if token is not None:
            accepted, verified = self._seen.get(token, (0.0, 0))
            self._seen[token] = accepted + outcome, verified + 1
