"""The choice between a lookup and a draft model in each round, by expected tokens and time, both learned during the
run.
"""

from dataclasses import dataclass, field

from specctl.policies.estimators import RunningLine, WidthTimes
from specctl.policies.round_times import COST_MEMORY, SPEED_MEMORY
from specctl.records import Round

LONGEST_RATED = 24  # Matches of at least this length share one acceptance rate
RATE_PRIOR = 4.0  # Number of observations at which a length's own rate weighs as much as its prior expectation


class MatchRates:
    """The acceptance rate of a copied token, by the length L of the match before it, drafted tokens included.

    Args:
        around: the rates over all texts: one text's rates are shrunk towards them, and they learn from the same
            outcomes. Without them the prior is L / (L + 2).
    """

    __slots__ = ("_accepted", "_around", "_rates", "_verified")

    def __init__(self, around: "MatchRates | None" = None) -> None:
        self._around = around
        self._accepted = [0.0] * (LONGEST_RATED + 1)
        self._verified = [0] * (LONGEST_RATED + 1)
        # Cached, since they are read more often than they change.
        self._rates: list[float] = [n / (n + 2) for n in range(LONGEST_RATED + 1)]
        if around is not None:
            self._rates = [*around._rates]

    def rate(self, length: int) -> float:
        """The expected acceptance probability of the token after a match of ``length`` tokens."""
        return self._rates[length if length < LONGEST_RATED else LONGEST_RATED]

    def learn(self, length: int, outcome: float) -> None:
        """Add an outcome: 0 or 1, or the probability of 1."""
        length = min(length, LONGEST_RATED)
        around = self._around
        if around is not None:
            around.learn(length, outcome)
        guess = length / (length + 2) if around is None else around._rates[length]
        self._accepted[length] += outcome
        self._verified[length] += 1
        self._rates[length] = (self._accepted[length] + RATE_PRIOR * guess) / (self._verified[length] + RATE_PRIOR)


LONGEST_COPY = 40  # The most tokens that are copied in a round
PATIENT = 4  # The length of a copy is searched until the expectation has fallen for this many tokens
# A copy with a lower acceptance probability of its first token is not considered: that would cost more than it gains.
DOUBTFUL = 0.1
TIMED = 4  # One in this many rounds without a copy is timed: passes change slowly, and learning takes time too
CAUTION = 0.85
"""The factor on a copy's expected value: lengths that look good by chance deliver less."""
PRICE, SPREAD = 0.1, 3
"""The cost of a further token of a pass, in tokens, until passes with widths that differ by SPREAD have been timed."""
BOUNDS = 1, 2, 3, 5, 9
"""The smallest match length of each class for which the model's drafts are learned; below the first there is no match.
"""
CLASSES = [sum(length >= bound for bound in BOUNDS) for length in range(max(BOUNDS))]
CLASS_PRIOR = 6.0  # Number of rounds at which a class's own mean weighs as much as that of all classes
CLASS_MEMORY, FORGOTTEN = 0.95, 0.98
"""Factors on the weight of a class's rounds: for each further round of the class in which the model drafts, and in
which the lookup does, so that a model that failed there is tried again.
"""
FIRST_RATE, FIRST_TOKENS = 0.7, 4.0
"""The prior acceptance rate of the model's tokens, and its weight in tokens."""


@dataclass(slots=True)
class ModelRounds:
    """Fading sums over the rounds in which the model drafted: accepted tokens, time, and verified tokens."""

    rounds: float = 0.0
    accepted: float = 0.0
    seconds: float = 0.0
    kept: float = 0.0
    verified: float = 0.0

    def add(self, memory: float, accepted: int, seconds: float) -> None:
        """Add a round; the earlier sums are multiplied by ``memory``."""
        self.rounds = memory * self.rounds + 1
        self.accepted = memory * self.accepted + accepted
        self.seconds = memory * self.seconds + seconds

    def judge(self, memory: float, kept: int, verified: int) -> None:
        """Add the model's tokens of a round that verification reached."""
        self.kept = memory * self.kept + kept
        self.verified = memory * self.verified + verified

    def forget(self, memory: float) -> None:
        """Reduce the weight of the rounds so far."""
        self.rounds *= memory
        self.accepted *= memory
        self.seconds *= memory


@dataclass(slots=True)
class SourceChoice:
    """Chooses in each round between a lookup's copy and a model's draft, and the number of tokens to copy.

    With rho the tokens/s of the run, a draft is worth its expected number of accepted tokens minus rho times its cost.
    The cost is the time of drafting and the additional time of the wider verifying pass (renewal reward, see
    `cost_optimal`). A copy takes no drafting time. Its tokens' acceptance is estimated by the length of the match
    before them (`MatchRates`). This is learned from every token of the text, whatever was drafted, since the lookup's
    copy at each position is known. The worth of a model's draft is the average over its drafts after matches of about
    that length, shrunk towards the overall average.

    A copy may also follow a model's draft. It is then accepted only if all of the model's tokens are. The rate of that
    is learned by the length of the match in which the model's tokens end.
    """

    _run: MatchRates = field(default_factory=MatchRates)
    _text: MatchRates = field(init=False)
    _passes: WidthTimes = field(default_factory=lambda: WidthTimes(RunningLine(COST_MEMORY)))
    _all: ModelRounds = field(default_factory=ModelRounds)
    _classes: list[ModelRounds] = field(default_factory=lambda: [ModelRounds() for _ in range(len(BOUNDS) + 1)])
    _emitted: float = 0.0
    _seconds: float = 0.0
    _widths: tuple[int, int] = (1 << 30, 0)  # the smallest and the largest timed width

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new text begins."""
        self._text = MatchRates(self._run)

    def learn(self, length: int, hit: bool) -> None:
        """Learn whether the lookup's prediction, after a match of this length, was the text's next token."""
        self._text.learn(length, float(hit))

    def instead(self, length: int, most: int, *, model: bool) -> int:
        """How many tokens to copy instead of the model's draft; 0 for the model's draft.

        Args:
            length: the length of the match, 0 without one.
            most: the most tokens to copy.
            model: whether the model would draft.
        """
        if not length or self._text.rate(length) < DOUBTFUL:
            return 0
        count, gain = self._copy(length, 1.0, 0, most)
        return count if count and gain > (self._worth_of_model(length) if model else 0.0) else 0

    def behind(self, drafted: int, length: int, most: int) -> int:
        """How many tokens to copy after a model's draft.

        Args:
            drafted: the number of the model's tokens.
            length: the length of the match that they end in, 0 without one.
            most: the most tokens to copy.
        """
        if not length or self._text.rate(length) < DOUBTFUL:
            return 0
        every, some = self._all, self._classes[_class(length)]
        rate = (every.kept + FIRST_TOKENS * FIRST_RATE) / (every.verified + FIRST_TOKENS)
        rate = (some.kept + CLASS_PRIOR * rate) / (some.verified + CLASS_PRIOR)
        return self._copy(length, rate**drafted, drafted, most)[0]

    def widening(self, drafted: int, copied: int) -> float:
        """The seconds by which this many copied tokens after drafted ones lengthen the pass."""
        if not self._timed:
            return 0.0
        return max(0.0, self._passes.at(drafted + copied) - self._passes.at(drafted))

    def observe(self, round_: Round, before: int, after: int) -> None:
        """Learn from a round.

        Args:
            round_: verified.
            before: length of the match before the round, 0 without one.
            after: length of the match in which the model's tokens ended.
        """
        if not round_.index or not round_.verify_seconds:
            return  # a text's first round also reads the prompt
        drafted = round_.drafted - round_.copied
        if round_.copied or not round_.index % TIMED or not self._timed:
            self._widths = min(self._widths[0], round_.drafted), max(self._widths[1], round_.drafted)
            self._passes.learn(round_.drafted, round_.verify_seconds)
        self._emitted = SPEED_MEMORY * self._emitted + round_.accepted + (round_.extra is not None)
        self._seconds = SPEED_MEMORY * self._seconds + round_.total_seconds
        here = self._classes[_class(before)]
        if not drafted:
            here.forget(FORGOTTEN)
            return
        seconds = round_.draft_seconds + self.widening(0, len(round_.steps))
        kept = min(drafted, round_.accepted)
        self._all.add(SPEED_MEMORY, round_.accepted, seconds)
        here.add(CLASS_MEMORY, round_.accepted, seconds)
        for one in (self._all, self._classes[_class(after)]):
            one.judge(SPEED_MEMORY, kept, kept + (kept < drafted))

    @property
    def _timed(self) -> bool:
        """Whether the time of wider passes is known."""
        return self._widths[1] - self._widths[0] >= SPREAD

    @property
    def _speed(self) -> float:
        """Tokens per second in the last rounds."""
        return self._emitted / self._seconds if self._seconds else 0.0

    def _worth_of_model(self, length: int) -> float:
        """The expected tokens from a model's draft after a match of this length, minus those lost by its time."""
        every, some = self._all, self._classes[_class(length)]
        if not every.rounds:
            return float("inf")
        rounds = some.rounds + CLASS_PRIOR
        accepted = (some.accepted + CLASS_PRIOR * every.accepted / every.rounds) / rounds
        seconds = (some.seconds + CLASS_PRIOR * every.seconds / every.rounds) / rounds
        return accepted - self._speed * seconds

    def _copy(self, length: int, survival: float, drafted: int, most: int) -> tuple[int, float]:
        """The best number of tokens to copy, and its worth: the expected tokens minus those lost by their time.

        Args:
            length: the length of the match.
            survival: the probability that all tokens before them are accepted.
            drafted: the number of tokens before the copy.
            most: the most tokens to copy.
        """
        most, rates, speed = min(most, LONGEST_COPY), self._text, self._speed
        passes = self._passes if self._timed else None
        begun = 0.0 if passes is None else passes.at(drafted)
        best, count, gain = 0.0, 0, 0.0
        for place in range(1, most + 1):
            survival *= rates.rate(length + place - 1)
            gain += CAUTION * survival
            lost = PRICE * place if passes is None else speed * (passes.at(drafted + place) - begun)
            if gain - lost > best:
                best, count = gain - lost, place
            elif place - count >= PATIENT:
                break
        return count, best


def _class(length: int) -> int:
    """The number of a match length's class."""
    return CLASSES[length] if length < len(CLASSES) else len(BOUNDS)
