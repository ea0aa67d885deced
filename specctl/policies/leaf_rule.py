"""How many other tokens are verified beside each token of a draft: its leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from specctl.errors import UsageError
from specctl.policies.logistic import OnlineLogistic, log_odds
from specctl.policies.online import RunningLine, WidthTimes
from specctl.records import Round

Leaves = int | Literal["confidence", "cost"]
"""A number for every place; by the draft's confidence there; or as many as are expected to pay."""
BY_NAME: tuple[Literal["confidence", "cost"], ...] = ("confidence", "cost")
BY_CONFIDENCE = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
"""CaPE's table (Du et al. 2024, arXiv 2402.02082): up to each confidence, so many leaves."""
COST_MOST = 7
"""The most leaves at a place that are weighed by their cost."""
WIDENING = 4
"""How many tokens a pass may be wider than every pass whose time is known."""
MEMORY, TIME_MEMORY = 0.95, 0.995
"""Factors on the weight of earlier rounds when a round ends, in the speed and in the times by width. These are
remembered longer: while all passes are equally wide, nothing is learned of what width costs."""
REJECTED, MET = (-0.9, -0.9), (-0.3, 0.8)
"""Prior weights, of a constant and of log-odds: that a token is rejected, from its probability; that the token in its
place is a given leaf, from the leaf's share of the probability of all tokens but the rejected one."""
VARIANCES, DRIFT = (0.5, 0.1), 1e-3
JUMP = 1.0
"""By how much the first pass of a new width may differ from what was expected of it, as a share of that."""
LEAST_SHARE = 0.03
"""Leaves with a smaller share are neither verified for their gain nor learned from."""


class Place(NamedTuple):
    """A token of a draft, and what might stand in its place.

    Attributes:
        prob: of the token in the draft's law: the law it was drawn from, in greedy decoding the softmax.
        others: ids of the likeliest other tokens with their probabilities there, falling and above 0.
    """

    prob: float
    others: Sequence[tuple[int, float]]


class LeafRule(Protocol):
    """Decides how many leaves each place of a draft gets. Works on plain numbers.

    Attributes:
        most: the most at one place.
    """

    @property
    def most(self) -> int: ...

    def widths(self, places: Sequence[Place], room: int) -> list[int]:
        """For each place how many of its likeliest other tokens are leaves, at most ``room`` in all."""

    def observe(self, round_: Round) -> None:
        """Learn from the verified round."""


@dataclass(frozen=True, slots=True)
class ConstantLeaves:
    """The same number at every place."""

    most: int

    def widths(self, places: Sequence[Place], room: int) -> list[int]:
        return _fitted([min(self.most, len(place.others)) for place in places], room)

    def observe(self, round_: Round) -> None:
        """It learns nothing."""


@dataclass(frozen=True, slots=True)
class ConfidenceLeaves:
    """The more, the less sure the draft is of its token: CaPE's table, `BY_CONFIDENCE`."""

    most: int = BY_CONFIDENCE[0][1]

    def widths(self, places: Sequence[Place], room: int) -> list[int]:
        wanted = [next((count for least, count in BY_CONFIDENCE if place.prob <= least), 1) for place in places]
        return _fitted([min(count, len(place.others)) for count, place in zip(wanted, places, strict=True)], room)

    def observe(self, round_: Round) -> None:
        """It learns nothing."""


@dataclass(slots=True)
class CostLeaves:
    """As many as are expected to save more time than they take.

    A leaf saves a token if all tokens before its place are accepted, the token in its place is rejected, and the
    target's own token there is the leaf. The three probabilities are learned from verified rounds. With rho the tokens
    per second so far and t_v(k) the time of a pass over k tokens, the n leaves of the largest gains pay best for the n
    at which sum(gains) - rho (t_v(K + n) - t_v(K)) is largest. As rho is what a round brings on average, this is the
    renewal-reward argument of `CostOptimal`, for the width of a pass instead of its depth.

    t_v is learned from the measured times; widths that were never tried are approached in steps of `WIDENING`.
    """

    most: int = COST_MOST
    _rejected: OnlineLogistic = field(default_factory=lambda: OnlineLogistic(REJECTED, VARIANCES, DRIFT))
    _met: OnlineLogistic = field(default_factory=lambda: OnlineLogistic(MET, VARIANCES, DRIFT))
    _times: WidthTimes = field(default_factory=lambda: WidthTimes(RunningLine(TIME_MEMORY, tolerance=JUMP)))
    _tokens: float = 0.0
    _seconds: float = 0.0
    _widest: int = 0
    _places: Sequence[Place] = ()

    def widths(self, places: Sequence[Place], room: int) -> list[int]:
        self._places = places
        drafted = len(places)
        room = min(room, max(self._widest, drafted) + WIDENING - drafted)
        gains = sorted(self._gains(places), reverse=True)[:room]
        counts = [0] * drafted
        for _, place in gains[: self._paying([gain for gain, _ in gains], drafted)]:
            counts[place] += 1
        return counts

    def _gains(self, places: Sequence[Place]) -> list[tuple[float, int]]:
        """What each leaf is expected to save, in tokens, and its place; at each place falling.

        Left out are leaves that would not save a quarter of what a wider pass takes by the line through all widths.
        """
        least = self._speed * self._times.line.slope / 4 if self._times.line.known else 0.0
        found = []
        reached = 1.0
        for number, place in enumerate(places):
            rejected = self._rejected.predict(log_odds(place.prob))
            if (chance := reached * rejected) > least:
                found += [(chance * self._met.predict(log_odds(share)), number) for share in _shares(place)]
            reached *= 1 - rejected
        return found

    def _paying(self, gains: Sequence[float], drafted: int) -> int:
        """How many of the leaves pay best, given their falling gains."""
        if not self._times.line.known:
            return len(gains)
        seconds = self._times.upto(drafted + len(gains) + 1)[drafted:]
        best, paying, total = 0.0, 0, 0.0
        for count, gain in enumerate(gains, start=1):
            total += gain
            if (surplus := total - self._speed * (seconds[count] - seconds[0])) > best:
                best, paying = surplus, count
        return paying

    @property
    def _speed(self) -> float:
        """Tokens per second so far."""
        return self._tokens / self._seconds

    def observe(self, round_: Round) -> None:
        self._learn_verdicts(round_)
        if round_.index and round_.verify_seconds:  # a text's first round reads the prompt too
            self._times.learn(round_.nodes, round_.verify_seconds)
            self._tokens = MEMORY * self._tokens + len(round_.emitted)
            self._seconds = MEMORY * self._seconds + round_.draft_seconds + round_.verify_seconds
            self._widest = max(self._widest, round_.nodes)

    def _learn_verdicts(self, round_: Round) -> None:
        places, self._places = self._places[: round_.accepted + 1], ()
        for place, rejected in zip(places, _rejections(round_), strict=False):
            self._rejected.learn(rejected, log_odds(place.prob))
        own = round_.extra if round_.leaf is None else round_.leaf
        if round_.accepted < len(places):
            place = places[round_.accepted]
            for (token, _), share in zip(place.others, _shares(place), strict=False):
                self._met.learn(float(token == own), log_odds(share))


def parse_leaves(text: str) -> Leaves:
    """The value of the setting that a flag has.

    Raises:
        UsageError: it is none.
    """
    if text.isdecimal() and int(text):
        return int(text)
    for known in BY_NAME:
        if text == known:
            return known
    raise UsageError(
        f"--leaves {text} is neither a number above 0 nor confidence nor cost", "for example --leaves cost"
    )


def leaf_rule(leaves: Leaves) -> LeafRule:
    """A new rule for a value of the setting."""
    if leaves == "confidence":
        return ConfidenceLeaves()
    return CostLeaves() if leaves == "cost" else ConstantLeaves(int(leaves))


def _rejections(round_: Round) -> list[float]:
    """For each token that was verified, the probability that it is rejected, or in greedy decoding whether it was."""
    if round_.chances is not None:
        return [1 - chance for chance in round_.chances]
    return [0.0] * round_.accepted + [1.0] * (not round_.fully_accepted)


def _shares(place: Place) -> list[float]:
    """Each other token's share of the probability of all but the drafted token, while it is worth looking at."""
    left = max(1 - place.prob, 1e-9)
    return [share for _, prob in place.others if (share := min(1.0, prob / left)) >= LEAST_SHARE]


def _fitted(counts: Sequence[int], room: int) -> list[int]:
    """The counts with the last ones lowered until there is room for all."""
    fitted = []
    for count in counts:
        fitted.append(min(count, room))
        room -= fitted[-1]
    return fitted
