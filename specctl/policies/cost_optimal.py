"""Stop where tokens per second are highest: no threshold to choose, everything learned while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.policies.online import OnlineLogistic, RunningLine, TokenRates, log_odds
from specctl.records import DraftStep, Round

ACCEPTED = (0.9, 0.9, -0.2), (0.5, 0.1, 0.1)
"""Prior mean and variance of what log-odds of the top probability and sqrt(entropy) say of a token's own acceptance."""
JUDGED = (0.2, 0.4, -0.1, 0.6), (0.5, 0.1, 0.1, 0.1)
"""The same of log-odds of the top probability, sqrt(entropy) and log-odds of what a head says, once it has read it."""
NEXT = (0.9, -0.2, 0.4), (0.25, 0.03, 0.05)
"""The same of sqrt(entropy) and the token's own record for the acceptance of the token after it."""
FIRST = (0.9, 0.5), (0.5, 0.1)
"""The same of the record of the last token written for the acceptance of a round's first token."""
DRIFT = 5e-4
"""Of the estimators' weights, for each token judged."""
RECORD = 2.0
"""Judged followers after which a token's own record counts as much as everyone's."""
COST_MEMORY, SPEED_MEMORY = 0.95, 0.985
"""What a round weighs in the costs and in the speed once the next one is over."""
PRIOR_ROUNDS = 4.0
PRIOR_DRAFTED, PRIOR_EMITTED = 2, 1.8
"""The speed that is believed before there is one: some rounds that draft so much and emit so much."""
PROBING = 0.01
"""Share of its speed that it may give to drafting where drafting does not seem to pay."""


@dataclass(slots=True, kw_only=True)
class CostOptimal(Rule):
    """Stop when one more drafted token is expected to cost more time than it saves.

    Rounds renew each other, so tokens/s is highest for the rule that maximises E[emitted] - rho E[time] of a round, rho
    the highest tokens/s itself (renewal reward). With S_k the probability that all k drafted tokens are accepted, one
    more is worth drafting while S_k E[a_k+1 | what is seen] > rho (t_d + t_v(k+1) - t_v(k)): a one-step look-ahead,
    optimal as far as the left side falls with k. S_k is the product of each token's a_i, estimated from the draft's top
    probability and entropy there; E[a_k+1] is estimated from the entropy and from how often what follows this very
    token was accepted. A round in which not even the first token pays drafts nothing, but for a few probes.

    Estimates are learned from the verdicts (from min(1, p/q) where there is chance in them), the tokens behind a
    rejection left out because nobody judged them. t_d, t_v and rho are learned from the rounds' own times, in which a
    round weighs little some dozens of rounds later: a context that grows and a machine that slows down are followed.
    ``cost_ratio``, a draft step over a target pass, serves until the first times are there.

    With ``use_head`` a trained head's word on a token joins in, one step after that token was drawn.

    The text's law is the target's, as with every policy. But where a draft stops depends on the clock, so when sampling
    the same seed need not give the same text twice.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy", "top_prob"})
    max_draft: Annotated[int, Ge(1)] = 40
    cost_ratio: Annotated[float, Gt(0)] = 0.125
    carry_over: bool = True
    use_head: bool = False
    _accepted: OnlineLogistic = field(init=False, repr=False)
    _judged: OnlineLogistic = field(init=False, repr=False)
    _next: OnlineLogistic = field(init=False, repr=False)
    _first: OnlineLogistic = field(init=False, repr=False)
    _record: TokenRates = field(init=False, repr=False)
    _draft: RunningLine = field(init=False, repr=False)
    _verify: RunningLine = field(init=False, repr=False)
    _emitted: float = field(init=False, repr=False)
    _seconds: float = field(init=False, repr=False)
    _prior: float = field(init=False, repr=False)
    _price: float = field(init=False, repr=False)
    _credit: float = field(init=False, repr=False)
    _last: int | None = field(init=False, repr=False)
    _warm: bool = field(init=False, repr=False)
    _opens: bool = field(init=False, repr=False)
    _before: float = field(init=False, repr=False, compare=False, default=1.0)
    _survival: float = field(init=False, repr=False, compare=False, default=1.0)
    _newest: tuple[float, float] = field(init=False, repr=False, compare=False, default=(0.0, 0.0))

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._accepted, self._judged, self._next, self._first = (
            OnlineLogistic(list(mean), variances, DRIFT) for mean, variances in (ACCEPTED, JUDGED, NEXT, FIRST)
        )
        self._record = TokenRates(RECORD)
        self._draft, self._verify = RunningLine(COST_MEMORY, anchored=True), RunningLine(COST_MEMORY)
        self._emitted = self._seconds = self._credit = 0.0
        self._prior = PRIOR_ROUNDS
        self._last, self._opens, self._warm = None, True, False
        self._set_price()

    @classmethod
    def signals_of(cls, values: Mapping[str, Any]) -> frozenset[Signal]:
        return cls.reads | {"accept_prob"} if values.get("use_head") else cls.reads

    @property
    def signals(self) -> frozenset[Signal]:
        return self.signals_of({"use_head": self.use_head})

    @property
    def current_threshold(self) -> float:
        """The probability of acceptance at which one more drafted token just pays."""
        return self._price

    def reset(self) -> None:
        if not self.carry_over:
            self._restart()
        self._last = None

    def draft_limit(self) -> int:
        return self.max_draft if self._opens else 0

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._before = 1.0
        elif self.use_head:
            self._before *= self._judged.predict((1.0, *self._newest, log_odds(read(step.accept_prob))))
        else:
            self._before = self._survival
        self._newest = _features(step)
        self._survival = self._before * self._accepted.predict((1.0, *self._newest))
        following = self._next.predict((1.0, self._newest[1], self._record.surplus(step.token)))
        return self._survival * following <= self._price

    def observe(self, round_: Round) -> None:
        self._learn_verdicts(round_)
        if round_.emitted:
            self._last = round_.emitted[-1]
        if self._warm and round_.verify_seconds:
            self._learn_times(round_)
        self._warm = True  # a run's first round is slower than any other: kernels are built, memory is fetched
        self._credit = min(self._credit + PROBING, self._price)
        self._opens = self._first.predict((1.0, self._record.surplus(self._last))) > self._price
        if not self._opens and self._credit >= self._price:
            self._credit = 0.0
            self._opens = True

    def _learn_verdicts(self, round_: Round) -> None:
        judged = round_.accepted + (not round_.fully_accepted)
        chances = round_.chances or [float(place < round_.accepted) for place in range(judged)]
        before, doubt_before = self._last, 0.0
        for place, (step, chance) in enumerate(zip(round_.steps, chances, strict=False), start=1):
            confidence, doubt = _features(step)
            self._accepted.learn((1.0, confidence, doubt), chance)
            if self.use_head and place < round_.drafted:
                said = log_odds(read(round_.steps[place].accept_prob))
                self._judged.learn((1.0, confidence, doubt, said), chance)
            surplus = self._record.surplus(before)
            if step.index == 1:
                self._first.learn((1.0, surplus), chance)
            else:
                self._next.learn((1.0, doubt_before, surplus), chance)
            self._record.learn(before, chance)
            before, doubt_before = step.token, doubt

    def _learn_times(self, round_: Round) -> None:
        if round_.drafted:
            self._draft.learn(round_.drafted, round_.draft_seconds)
        self._verify.learn(round_.drafted, round_.verify_seconds)
        self._emitted = SPEED_MEMORY * self._emitted + len(round_.emitted)
        self._seconds = SPEED_MEMORY * self._seconds + round_.draft_seconds + round_.verify_seconds
        self._prior *= SPEED_MEMORY
        self._set_price()

    def _set_price(self) -> None:
        base = self._verify.base if self._verify.known else 1.0
        step = self._draft.slope if self._draft.known else self.cost_ratio * base
        if self._verify.known:
            step += self._verify.slope
        seconds = self._seconds + self._prior * (base + PRIOR_DRAFTED * step)
        self._price = step * (self._emitted + self._prior * PRIOR_EMITTED) / seconds


def _features(step: DraftStep) -> tuple[float, float]:
    """Log-odds of the top probability, and sqrt(entropy)."""
    return log_odds(read(step.top_prob)), sqrt(max(0.0, read(step.entropy)))
