"""Estimators that learn from one observation at a time and slowly forget old ones. Pure Python on a few floats."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from math import exp, log, sqrt
from typing import NamedTuple

from specctl.policies.base import read
from specctl.records import DraftStep, Round

FLAT = 1e-4
"""Smallest variance of an outcome, so that even a certain prediction can still change. Probabilities are also kept this
far from 0 and 1 before they become log-odds."""
LARGEST = log((1 - FLAT) / FLAT)
LARGEST_SCORE = 30.0
"""Below minus this score the probability is exp(score), which cannot overflow."""
FEATURES = 3  # The most features of an `OnlineLogistic`, besides the constant


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

    It learns several times per round, so Python's own time matters. The sums are written out, which takes a quarter of
    the time of loops. An unused feature is 0 and adds 0.

    Args:
        means: of the weights' prior: the constant first, then each feature.
        variances: variances of the prior, one for each weight.
        drift: the share of its prior variance that each observation adds to a weight's variance.

    Raises:
        ValueError: there are more than three features.
    """

    means: InitVar[Sequence[float]]
    variances: InitVar[Sequence[float]]
    drift: InitVar[float]
    weights: tuple[float, ...] = field(init=False)
    _limits: tuple[float, ...] = field(init=False, repr=False)
    _growth: tuple[float, ...] = field(init=False, repr=False)
    _covariance: tuple[float, ...] = field(init=False, repr=False)  # the upper triangle, row by row

    def __post_init__(self, means: Sequence[float], variances: Sequence[float], drift: float) -> None:
        unused = 1 + FEATURES - len(means)
        if unused < 0:
            raise ValueError(f"{len(means) - 1} features; at most {FEATURES} are possible")
        self.weights = (*means, *[0.0] * unused)
        self._limits = c, x, y, z = (*variances, *[0.0] * unused)
        self._growth = tuple(drift * limit for limit in self._limits)
        self._covariance = (c, 0.0, 0.0, 0.0, x, 0.0, 0.0, y, 0.0, z)

    def predict(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> float:
        """The probability of outcome 1."""
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
        """Update the weights by an outcome: 0, 1, or the probability of 1 if that is known."""
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
        """`learn` without the third feature's terms, in half the time."""
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


RIDGE = 0.05  # Added to the variance of k, so that the slope stays near 0 while k hardly varies
RATE_SPEED = 0.005  # Weight of one observation in the acceptance rate over all tokens
PLAUSIBLE, TOLERANCE, SCALE_RATE = 3.0, 0.1, 0.1
"""Errors are clipped to PLAUSIBLE typical errors plus a TOLERANCE times the expected value; SCALE_RATE is the weight of
one observation in the typical error."""
FAR_BELOW = 0.7  # With `restarts`, an observation below this share of the expected value restarts a line
ENOUGH, NEGLIGIBLE = 20, 0.01
"""The number of drafts before the fixed cost of a draft is considered, and the least fixed cost, in tokens."""
SURPLUS_MEMORY, LARGEST_SURPLUS = 0.98, 0.3
"""Factor on the weight of earlier observations of a width, and the largest surplus of one, as a share of the line."""
SURPLUS_PRIOR, SURPLUS_NOISE = 4.0, 0.05
"""A surplus is shrunk by half after this many observations, plus this many for each square of the typical error over
SURPLUS_NOISE of the expected time.
"""
NOT_SEEN = 0.0, 0.0
SLOWDOWN_RATE, LARGEST_SLOWDOWN = 0.3, 4.0
"""Weight of one observation in the logarithm of the slowdown; an observation counts at most as this factor."""


@dataclass(slots=True)
class RunningLine:
    """Seconds as base + slope k, by least squares with forgetting and clipped outliers."""

    memory: float  # factor on the weight of all old observations for each new one
    # number of added observations of 0 seconds at k = 0. With some, a line with hardly varying k passes through the
    # origin; without them it is flat
    anchor: float = 0.0
    # while the weight of earlier observations is below this, an observation far below the line restarts it: other
    # programs can only add time, so the earlier observations were too long
    restarts: float = 0.0
    # whether observations beyond the largest k so far are always taken, since the slope there is not known
    extends: bool = False
    base: float = field(init=False, default=0.0)  # seconds at k = 0, at least 0
    slope: float = field(init=False, default=0.0)  # additional seconds when k grows by 1, at least 0
    _count: float = 0.0
    _k: float = 0.0
    _kk: float = 0.0
    _t: float = 0.0
    _kt: float = 0.0
    _scale: float = 0.0
    _largest: float = 0.0

    @property
    def known(self) -> bool:
        return self._count > 0

    @property
    def weight(self) -> float:
        """The effective number of observations, with older ones counted in part."""
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
            elif not self.extends or k <= self._largest:
                most = PLAUSIBLE * self._scale + TOLERANCE * expected
                error = seconds - expected
                size = error if error > 0 else -error
                if size > most:
                    seconds = expected + (most if error > 0 else -most)
                # Errors for the scale are clipped less, so that the line follows a lasting change within a few rounds.
                self._scale += SCALE_RATE * ((size if size < 2 * most else 2 * most) - self._scale)
        if k > self._largest:
            self._largest = k
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
            if self.anchor and slope > sum_t / sum_k:  # a negative base would make the slope too steep
                slope = sum_t / sum_k
        base = (sum_t - slope * sum_k) / count
        self.base, self.slope = base if base > 0 else 0.0, slope


@dataclass(slots=True)
class WidthTimes:
    """Seconds of a pass over k draft tokens: a `RunningLine`, and the deviations of single widths from it.

    Matrix products of some widths, such as multiples of 4, can be faster than those of narrower ones.
    """

    line: RunningLine  # through all widths
    # seconds by which single widths exceed the line, shrunk by their evidence, at the time the width was last seen
    surplus: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def learn(self, k: float, seconds: float) -> None:
        """Add an observation; one between two widths also informs the nearest width."""
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
        """Seconds for ``k``, after at least one observation."""
        return self.line.base + self.line.slope * k + self.surplus.get(k, 0.0)

    def between(self, k: float) -> float:
        """Seconds for a ``k`` between two widths."""
        low = int(k)
        below, above = self.surplus.get(low, 0.0), self.surplus.get(low + 1, 0.0)
        return self.line.base + self.line.slope * k + below + (k - low) * (above - below)


UNKNOWN = 0.25
"""The assumed time of each further token of a pass far beyond the widest one known, as a share of the narrowest."""
FASTEST, SLOWEST = 0.5, 2.0  # A pass counts at most as this much faster or slower than expected
LEVEL_RATE, LEAST_RATE = 0.15, 0.05
"""The weight of a pass in the level of all widths, and its least weight in the time of its own width."""


@dataclass(slots=True)
class WidthCurve:
    """Seconds of a pass over k draft tokens, for drafts that cost nothing but wider passes.

    Passes over k tokens may take as long as over fewer, or much longer, so no line is assumed. Between known widths
    times are interpolated. Beyond the widest one W they rise up to 2 W + 1 as between the last two, and then by
    `UNKNOWN` of the narrowest for each token, since a draft far beyond it could lose many passes. All widths share a
    level, which follows the machine and a growing text, so that a width that was measured long ago stays comparable.
    """

    _known: dict[int, tuple[float, int]] = field(default_factory=dict)  # seconds at level 1, and number of passes
    _level: float = 1.0

    @property
    def known(self) -> bool:
        """Whether a pass was timed."""
        return bool(self._known)

    def learn(self, width: int, seconds: float) -> None:
        """Add a pass over ``width`` draft tokens; ``seconds`` above 0."""
        usual, count = self._known.get(width, (seconds / self._level, 0))
        ratio = min(SLOWEST, max(FASTEST, seconds / (usual * self._level)))
        self._level *= ratio**LEVEL_RATE
        self._known[width] = usual * ratio ** max(LEAST_RATE, 1 / (count + 1)), count + 1

    def upto(self, count: int, start: int = 0) -> list[float]:
        """Seconds of the widths below ``count``, from ``start`` on; after a timed pass."""
        widths = sorted(self._known)
        return [self._level * self._at(width, widths) for width in range(start, count)]

    def _at(self, width: int, widths: list[int]) -> float:
        """Seconds at level 1."""
        known, place = self._known, bisect(widths, width)
        if place and widths[place - 1] == width:
            return known[width][0]
        if place == 0:
            return known[widths[0]][0]  # a narrower pass takes no longer
        low = widths[place - 1]
        below = known[low][0]
        if place < len(widths):
            high = widths[place]
            return below + (known[high][0] - below) * (width - low) / (high - low)
        before = widths[-2] if len(widths) > 1 else low
        near = min(width, 2 * low + 1) - low if before < low else 0
        rise = max(0.0, (below - known[before][0]) / (low - before)) if near else 0.0
        return below + rise * near + UNKNOWN * known[widths[0]][0] * (width - low - near)


@dataclass(slots=True)
class Slowdown:
    """The factor by which two times both exceed expectation, as when other programs use the processor.

    Times divided by it are comparable across rounds although the machine's speed changes.
    """

    value: float = 1.0

    def learn(self, one: float, other: float) -> None:
        """Add the two times of a round, each divided by the time expected at usual speed.

        The common factor is the median of the two and 1. It is 1 if only one is slower, or if they deviate in opposite
        directions.
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
    """Fading sums over the rounds with drafts: draft tokens, accepted ones, and accepted first ones."""

    memory: float  # factor on every sum when a round ends
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
        """Whether a draft is expected to earn its fixed cost if its first token is accepted with probability ``first``.

        Args:
            first: the probability.
            price: the time of one more draft token, in tokens.
            entry: the fixed time of a draft, in tokens.
        """
        if self.rounds < ENOUGH or entry < NEGLIGIBLE:
            return True
        return first * (self.accepted - price * self.drafted) >= entry * self.first


@dataclass(slots=True)
class TokenRates:
    """Acceptance rates of draft tokens given the token before them, relative to the overall rate."""

    prior: float  # number of observations at which a token's own rate weighs as much as the overall rate
    _rate: float = 0.7
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    _surplus: dict[int | None, float] = field(default_factory=dict)

    def surplus(self, token: int | None) -> float:
        """Log-odds of the token's rate, shrunk towards the overall rate, minus log-odds of the overall rate.

        Computed when the token was last seen; 0 for None and for a token without observations.
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


class Prior(NamedTuple):
    """Mean and variance of each weight of a logistic estimator: the constant first, then its features in order."""

    mean: tuple[float, ...]
    variance: tuple[float, ...]


ACCEPTED = Prior((0.9, 0.9, -0.2), (0.5, 0.1, 0.1))
"""Acceptance of a token, from log-odds of the top probability and sqrt(entropy)."""
ACCEPTED_BY_HEAD = Prior((0.2, 0.4, -0.1, 0.6), (0.5, 0.1, 0.1, 0.1))
"""Acceptance of a token, from log-odds of the top probability, sqrt(entropy) and log-odds of the head's prediction."""
NEXT = Prior((0.9, -0.2, 0.4), (0.25, 0.03, 0.05))
"""Acceptance of the next token, from sqrt(entropy) and `TokenRates.surplus` of the current token."""
NEXT_FORESEEN = Prior((0.0, 1.0, 0.2), (0.25, 0.1, 0.05))
"""The same, from log-odds of the draft's own prediction for the next token in place of sqrt(entropy)."""
FIRST = Prior((0.9, 0.5), (0.5, 0.1))
"""Acceptance of a round's first token, from `TokenRates.surplus` of the last emitted token."""
AGREEING = Prior((0.0, 1.0, 0.0), (0.02, 0.01, 0.5))
"""Acceptance of a token with a match, from log-odds of what is expected otherwise and `DraftStep.agreement`."""
DRIFT = 5e-4  # Drift of the estimators' weights with each verified token, see `OnlineLogistic`


def estimators(foresight: bool) -> list[OnlineLogistic]:
    """The estimators of an acceptance: of a token, of one with a head, of the next token with and without foresight,
    and of a round's first.
    """
    priors = ACCEPTED, ACCEPTED_BY_HEAD, NEXT_FORESEEN if foresight else NEXT, FIRST
    return [OnlineLogistic(prior.mean, prior.variance, DRIFT) for prior in priors]


def expected_accepted(round_: Round) -> float:
    """The expected number of accepted tokens, over the verdict's distribution where that is known."""
    return round_.accepted if round_.chances is None else sum(round_.chances)


def foreseen(step: DraftStep) -> float:
    """Log-odds of the draft's own prediction for the next token."""
    return log_odds(read(step.next_accept_prob))


def features(step: DraftStep) -> tuple[float, float]:
    """Log-odds of the top probability, and sqrt(entropy)."""
    entropy, top = step.entropy, step.top_prob
    if entropy is None or top is None:
        entropy, top = read(entropy), read(top)
    return log_odds(top), sqrt(entropy) if entropy > 0 else 0.0 * entropy


MEMORY = 0.99  # Factor on the lead for each verified token with a match
MARGIN = 2.0
"""Nats by which its predictions must have been better: a lead by chance is rarely as large, a real one soon is."""


@dataclass(slots=True)
class AgreementCurve:
    """Corrects an acceptance probability by `DraftStep.agreement`, while the correction has predicted verdicts better.

    A logistic curve reads the log-odds of the probability and the agreement. It learns from every verified token that
    has a match. Each time, the log losses of the original and of the corrected probability, both from before the
    verdict, are compared. Their difference is added to a fading sum, the lead. While the lead is not above `MARGIN`,
    nothing is corrected. A token without a match is never corrected, and teaches nothing.
    """

    _curve: OnlineLogistic = field(default_factory=lambda: OnlineLogistic(AGREEING.mean, AGREEING.variance, DRIFT))
    _lead: float = 0.0

    def corrected(self, probability: float, step: DraftStep) -> float:
        """The probability that a token is accepted, corrected from the one expected without its agreement."""
        agreement = read(step.agreement)
        if not agreement or self._lead <= MARGIN:
            return probability
        return self._curve.predict(log_odds(probability), agreement)

    def learn(self, outcome: float, probability: float, step: DraftStep) -> None:
        """Add a token's outcome: 0, 1, or the probability of 1. The other arguments are those of `corrected`."""
        if not (agreement := read(step.agreement)):
            return
        odds = log_odds(probability)
        better = _loss(outcome, probability) - _loss(outcome, self._curve.predict(odds, agreement))
        self._lead = MEMORY * self._lead + better
        self._curve.learn(outcome, odds, agreement)


def _loss(outcome: float, probability: float) -> float:
    """Log loss in nats."""
    probability = min(max(probability, FLAT), 1 - FLAT)
    return -(outcome * log(probability) + (1 - outcome) * log(1 - probability))
