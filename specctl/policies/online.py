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
FAR_BELOW = 0.7
"""Share of the expected value below which an observation makes a line that `restarts` do so."""
ENOUGH, NEGLIGIBLE = 20, 0.01
"""Drafts after which it is asked whether the beginning of a draft pays, and the tokens that it must cost."""
SURPLUS_MEMORY, LARGEST_SURPLUS = 0.98, 0.3
"""Factor on the weight of earlier observations of a width, and the largest surplus of one, as a share of the line."""
SURPLUS_PRIOR, SURPLUS_NOISE = 4.0, 0.05
"""A surplus is believed by half after this many observations, and this many more for each square of the typical error
over SURPLUS_NOISE of the expected time."""
NOT_SEEN = 0.0, 0.0
SLOWDOWN_RATE, LARGEST_SLOWDOWN = 0.3, 4.0
"""Weight of one observation in the logarithm of the slowdown; an observation counts at most as this factor."""


@dataclass(slots=True)
class RunningLine:
    """Seconds as base + slope k, by least squares that forgets old observations and clips outliers.

    Attributes:
        memory: factor on the weight of every old observation when a new one arrives.
        base: seconds at k = 0, at least 0.
        slope: additional seconds when k grows by 1, at least 0.
        anchor: observations of 0 seconds at k = 0 that are added to the real ones; with some, a line whose k hardly
            varies goes through the origin, without them it is flat.
        tolerance: the share of the expected value up to which an error is plausible whatever the typical error.
        restarts: while the earlier observations weigh less than this, it is learned anew from one that is far below:
            other programs may take time away and never give any, so that those before it took too long.
    """

    memory: float
    anchor: float = 0.0
    tolerance: float = TOLERANCE
    restarts: float = 0.0
    base: float = field(init=False, default=0.0)
    slope: float = field(init=False, default=0.0)
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
    def weight(self) -> float:
        """How many observations it rests on, the older ones counted as parts."""
        return self._count

    @property
    def error(self) -> float:
        """The typical error of an observation in seconds."""
        return self._scale

    def at(self, k: float) -> float:
        """Seconds at ``k``."""
        return self.base + self.slope * k

    def fade(self, factor: float) -> None:
        """Multiply the weight of every observation."""
        self._count *= factor
        self._k *= factor
        self._kk *= factor
        self._t *= factor
        self._kt *= factor

    def learn(self, k: float, seconds: float) -> None:
        """Add an observation; ``k`` must be above 0 for a line with an anchor."""
        count = self._count
        if count:
            expected = self.base + self.slope * k
            if count < self.restarts and seconds < FAR_BELOW * expected:
                count = self._k = self._kk = self._t = self._kt = self._scale = 0.0
            else:
                most = PLAUSIBLE * self._scale + self.tolerance * expected
                error = seconds - expected
                size = error if error > 0 else -error
                if size > most:
                    seconds = expected + (most if error > 0 else -most)
                # The scale learns from errors clipped less: the line follows a lasting change within a few rounds.
                self._scale += SCALE_RATE * ((size if size < 2 * most else 2 * most) - self._scale)
        memory = self.memory
        self._count = count = memory * count + 1
        self._k = sum_k = memory * self._k + k
        self._kk = sum_kk = memory * self._kk + k * k
        self._t = sum_t = memory * self._t + seconds
        self._kt = sum_kt = memory * self._kt + k * seconds
        count += self.anchor
        mean = sum_k / count
        together = sum_kt / count - mean * sum_t / count
        slope = 0.0
        if together > 0:
            slope = together / (sum_kk / count - mean * mean + (0.0 if self.anchor else RIDGE))
            if self.anchor and slope > sum_t / sum_k:  # a base below 0 would make a slope too steep
                slope = sum_t / sum_k
        base = (sum_t - slope * sum_k) / count
        self.base, self.slope = base if base > 0 else 0.0, slope


@dataclass(slots=True)
class WidthTimes:
    """Seconds of a pass over k draft tokens: a `RunningLine`, and by how much single widths differ from it.

    Matrix products of some widths, such as multiples of 4, can be faster than those of narrower ones.

    Attributes:
        line: through all widths.
        surplus: seconds that single widths take longer than the line says, as far as that is believed: as it was when
            the width was last seen.
    """

    line: RunningLine
    surplus: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, k: float, seconds: float) -> None:
        """Add an observation; between two widths it tells of the nearest, too."""
        line = self.line
        line.learn(k, seconds)
        expected = line.base + line.slope * k
        k = round(k)
        surplus, most = seconds - expected, LARGEST_SURPLUS * expected
        if surplus > most:
            surplus = most
        elif surplus < -most:
            surplus = -most
        total, weight = self._seen.get(k, NOT_SEEN)
        self._seen[k] = total, weight = SURPLUS_MEMORY * total + surplus, SURPLUS_MEMORY * weight + 1
        if expected > 0:
            error = line.error / (SURPLUS_NOISE * expected)
            self.surplus[k] = total / (weight + SURPLUS_PRIOR + error * error)

    def at(self, k: int) -> float:
        """Seconds for ``k``; an observation must have been added."""
        return self.line.base + self.line.slope * k + self.surplus.get(k, 0.0)

    def upto(self, count: int) -> list[float]:
        """Seconds for each k from 0 on, ``count`` of them."""
        times = [self.line.base + self.line.slope * k for k in range(count)]
        for k, surplus in self.surplus.items():
            if k < count:
                times[k] += surplus
        return times

    def between(self, k: float) -> float:
        """Seconds for ``k`` that lies between two widths."""
        low = int(k)
        below, above = self.surplus.get(low, 0.0), self.surplus.get(low + 1, 0.0)
        return self.line.base + self.line.slope * k + below + (k - low) * (above - below)


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
        if one > other:
            one, other = other, one
        common = 1.0 if one < 1 < other else other if other <= 1 else one
        if common > LARGEST_SLOWDOWN:
            common = LARGEST_SLOWDOWN
        elif common < 1 / LARGEST_SLOWDOWN:
            common = 1 / LARGEST_SLOWDOWN
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
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    _surplus: dict[int | None, float] = field(default_factory=dict)

    def surplus(self, token: int | None) -> float:
        """Log-odds of the token's rate, shrunk towards the overall rate, minus log-odds of the overall rate.

        As it was when the token was last seen; 0 for None and for a token without observations.
        """
        return self._surplus.get(token, 0.0)

    def learn(self, token: int | None, outcome: float) -> float:
        """Add the outcome (0 or 1, or the probability of 1) of the draft token that follows ``token``.

        Returns:
            The token's `surplus` before.
        """
        self._rate = rate = self._rate + RATE_SPEED * (outcome - self._rate)
        if token is None:
            return 0.0
        before = self._surplus.get(token, 0.0)
        accepted, verified = self._seen.get(token, NOT_SEEN)
        accepted, verified = accepted + outcome, verified + 1
        self._seen[token] = accepted, verified
        self._surplus[token] = log_odds((accepted + self.prior * rate) / (verified + self.prior)) - log_odds(rate)
        return before
