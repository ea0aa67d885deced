"""Stop where tokens per second are expected to be highest; everything is learned during the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.policies.draft_account import DraftAccount, DraftAllowance, trust_after
from specctl.policies.drafting import TextRead
from specctl.policies.estimators import (
    AgreementCurve,
    DraftSums,
    OnlineLogistic,
    TokenRates,
    estimators,
    features,
    foreseen,
    kept,
    log_odds,
)
from specctl.policies.joint_cost_optimal import JointCostOptimal
from specctl.policies.round_times import SPEED_MEMORY, RoundTimes
from specctl.records import DraftStep, Round, StopReason

RATE_PRIOR = 2.0
"""Observations after which the acceptance rate after a token weighs as much as the overall rate."""
AHEAD = 8
"""The most further tokens of a draft that are weighed at once."""
AGING = 5e-3
"""Growth of the variance of the estimate for first tokens in a round without a draft, as a share of the prior's."""


@dataclass(slots=True, kw_only=True)
class CostOptimal(Rule):
    """Stop when one more draft token is expected to cost more time than it saves.

    Let rho be the highest reachable tokens/s. By renewal reward, the rule that reaches it maximises
    E[emitted] - rho E[time] of a round. Let S_k be the probability that all k draft tokens are accepted, a_i the
    acceptance probability of token i, t_d the time of a draft step and t_v(k) the time to verify k tokens. One more
    token is worth drafting while S_k E[a_k+1 | signals so far] > rho (t_d + t_v(k+1) - t_v(k)). This one-step
    look-ahead is optimal if the left side falls with k and t_v is a line. S_k is the product of the a_i, each estimated
    from the draft's top probability and entropy at its position. E[a_k+1] is estimated from the entropy at position k
    and from how often the tokens that follow token k were accepted.

    On real machines passes of some widths are as fast as narrower ones, so t_v is learned for each width, and drafting
    goes on if any number of further tokens, up to 8, is worth its time, the later ones as likely to be accepted as the
    next. Where t_v is a line, that is the one-step rule.

    If not even the first token pays, the round drafts nothing, except for a few probes. Nor does it if drafts save less
    than their beginning costs: what a draft takes whatever its length, as with a draft head that writes a whole block
    in one pass. Whatever is expected of them, drafts are paid from a `DraftAccount`, so that over T passes they lose at
    most max(1.9, 0.01 T + 0.9) passes beyond what they saved before: probes, and with each what it takes the draft to
    read the text that it missed. So a run is at least 0.99 as fast as the target alone, but for 1.9 passes at its
    beginning, in which a draft shows what it is worth; for what the first two drafts, and the first readings of a
    missed text, take more than was expected; and for prompts: where drafts are wanted when a text begins, what the
    draft takes to read its prompt is not counted, nor, with much saved before, what it takes to read one later.

    Acceptance is learned from the tokens up to the first rejected one: when sampling from `Round.chances`, else from
    the verdict itself. Tokens after a rejection teach nothing. In block verification, too, a_i is the probability that
    token i is kept if all before it are, so that S_k is their product. t_d, t_v and rho are learned from the measured
    times of the rounds; a round's weight fades within some dozens of them, so the estimates follow a growing context.
    Once some dozens of drafts were timed, and while they have saved much, only one round of eight is learned from.
    Only ratios of times matter, so what slows drafts and verification alike for a while, such as other programs, is
    divided out first. ``cost_ratio``, the time of a draft step divided by the time of a target pass, is used until the
    first times are known.

    With ``use_head``, S_k also uses a trained head's prediction for each token but the newest, whose prediction is not
    known yet. With ``use_agreement``, whether a lookup would copy each token corrects its a_i (`AgreementCurve`).

    With ``use_foresight``, no distribution is read. A draft that predicts each token's acceptance before the token is
    written, as a lookup and a DSpark head do, tells E[a_k+1] by that prediction and the same rates. S_k is then the
    product of these estimates, with the first token's by how often first tokens were accepted.

    The text has the target's distribution, as with every policy. But stopping depends on measured times, so when
    sampling, the same seed may produce another text.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy", "top_prob"})
    max_draft: Annotated[int, Ge(1)] = 40
    cost_ratio: Annotated[float, Gt(0)] = 0.125
    carry_over: bool = True
    use_head: bool = False
    use_foresight: bool = False
    use_agreement: bool = False
    _accepted: OnlineLogistic = field(init=False, repr=False)
    _accepted_as_predicted: OnlineLogistic = field(init=False, repr=False)
    _next: OnlineLogistic = field(init=False, repr=False)
    _first: OnlineLogistic = field(init=False, repr=False)
    _rates: TokenRates = field(init=False, repr=False)
    _agreeing: AgreementCurve = field(init=False, repr=False)
    _times: RoundTimes = field(init=False, repr=False)
    _allowance: DraftAllowance = field(init=False, repr=False)
    _drafts: DraftSums = field(init=False, repr=False)
    _last_token: int | None = field(init=False, repr=False)
    _limit: int = field(init=False, repr=False)
    _read: TextRead = field(init=False, repr=False)
    _seen: int = field(init=False, repr=False)  # rounds of the text
    _passed: list[Round] = field(init=False, repr=False)  # passed over, and not yet taken down
    _to_pass: int = field(init=False, repr=False)  # how many more with drafts are passed over
    _survival_before: float = field(init=False, repr=False, compare=False, default=1.0)
    _survival: float = field(init=False, repr=False, compare=False, default=1.0)
    _last_features: tuple[float, float] = field(init=False, repr=False, compare=False, default=(0.0, 0.0))
    _first_accepted: float = field(init=False, repr=False, compare=False, default=1.0)
    _following: float = field(init=False, repr=False, compare=False, default=1.0)

    def __post_init__(self) -> None:
        if self.use_head + self.use_foresight + self.use_agreement > 1:
            raise ValueError("use_head, use_foresight and use_agreement exclude each other")
        self._restart()

    def _restart(self) -> None:
        self._accepted, self._accepted_as_predicted, self._next, self._first = estimators(self.use_foresight)
        self._rates, self._agreeing = TokenRates(RATE_PRIOR), AgreementCurve()
        self._times = RoundTimes(self.cost_ratio)
        self._allowance = DraftAllowance(self._times, DraftAccount())
        self._drafts = DraftSums(SPEED_MEMORY)
        self._last_token, self._seen, self._read, self._passed, self._to_pass = None, 0, TextRead(), [], 0
        self._decide(0)

    @classmethod
    def signals_of(cls, values: Mapping[str, Any]) -> frozenset[Signal]:
        if values.get("use_foresight"):
            return frozenset({"next_accept_prob"})
        more: dict[str, Signal] = {"use_head": "accept_prob", "use_agreement": "agreement"}
        return cls.reads | {signal for name, signal in more.items() if values.get(name)}

    @property
    def signals(self) -> frozenset[Signal]:
        return self.signals_of({name: getattr(self, name) for name in ("use_head", "use_foresight", "use_agreement")})

    @property
    def current_threshold(self) -> float:
        """The acceptance probability at which one more draft token just pays."""
        return self._times.price

    def reset(self) -> None:
        if not self.carry_over:
            self._restart()
            return
        self._take_down()
        # A draft that is wanted when a text begins has read the prompt; what another one lacks is known after a round.
        self._last_token, self._read, self._seen = None, TextRead(), 0
        self._allowance.asleep = 0  # a text's first round is looked at
        if self._limit:
            self._decide(0)

    def draft_limit(self) -> int:
        return self._limit

    def should_stop(self, step: DraftStep) -> bool:
        self.look(step)
        drafted, gain, spent = step.index, self._survival * self._following, self._times.spent
        if drafted + 1 < len(spent) and spent[drafted] + gain > spent[drafted + 1]:
            return False  # the next token alone tells, as it mostly does
        return not self._goes_on(drafted, gain, self._following)

    def look(self, step: DraftStep) -> None:
        """Estimate how likely the tokens so far are accepted, and the next one if they are."""
        index = step.index
        if self.use_foresight:
            # The probability that this token and all before it are accepted, by what was predicted before each.
            survival = self._survival * self._following if index > 1 else self._first_accepted
            outlook = foreseen(step)
        else:
            # The same by the distribution at each position.
            confidence, outlook = features(step)
            before = self._survival if index > 1 else 1.0
            if self.use_head:
                if index > 1:
                    # A step's accept_prob is about the token before it.
                    predicted_log_odds = log_odds(read(step.accept_prob))
                    before = self._survival_before * self._accepted_as_predicted.predict(
                        *self._last_features, predicted_log_odds
                    )
                self._survival_before, self._last_features = before, (confidence, outlook)
            accepted = self._accepted.predict(confidence, outlook)
            survival = before * (self._agreeing.corrected(accepted, step) if self.use_agreement else accepted)
        self._survival = survival
        self._following = self._next.predict(outlook, self._rates.surplus(step.token))

    def _goes_on(self, drafted: int, gain: float, following: float) -> bool:
        """Whether some number of further draft tokens is expected to save more time than it takes.

        Args:
            drafted: tokens of the draft so far.
            gain: the probability that the next token and all before it are accepted.
            following: the probability that a later token is, if all before it are.
        """
        end = drafted + 1 + AHEAD
        if end > self.max_draft + 2:
            end = self.max_draft + 2
        spent = self._times.upto(end)
        gains = spent[drafted] + gain
        if gains > spent[drafted + 1]:
            return True
        for time in spent[drafted + 2 : end]:
            gain *= following
            gains += gain
            if gains > time:
                return True
        return False

    def joint(self) -> JointCostOptimal | None:
        return JointCostOptimal(self) if self.carry_over else None

    def observe(self, round_: Round) -> None:
        if self._to_pass and round_.steps:
            self._to_pass -= 1
            self._passed.append(round_)
        elif self._allowance.asleep and not round_.steps:
            self._allowance.doze()
        elif self._limit and not round_.steps and round_.stop is StopReason.BUDGET:
            self._read_on(round_)  # there was no room: that says nothing about drafts
        else:
            self._take_down()
            self._decide(self._learn(round_))

    def _take_down(self) -> None:
        """Book what rounds saved that were passed over; all at once, since the code is in the cache then."""
        for round_ in self._passed:
            self._allowance.pass_over(len(round_.steps), len(round_.steps), kept(round_))
            self._times.pass_over(drafted=True)
            self._read_on(round_)
        self._seen += len(self._passed)
        self._passed.clear()

    def _learn(self, round_: Round) -> int:
        """Learn from a round; how many tokens of the text the next draft has to read first."""
        allowance = self._allowance
        seen, self._seen = self._seen, self._seen + 1
        first = not seen and not round_.index  # in a chain a copy may have come before it
        if not round_.steps:
            allowance.idle += 1
        elif allowance.idle:
            self.wake()
        emitted, unread = self.learn_text(round_)
        # A text's first round reads the prompt too, and a pass of the target alone behind it runs from cold caches.
        if round_.verify_seconds and not first and (round_.steps or seen > 1):
            self._times.learn(round_, emitted, unread)
            if round_.steps:
                self._drafts.learn(round_)
        else:
            self._times.pass_over(bool(round_.steps))
        allowance.book(len(round_.steps), len(round_.steps), kept(round_), unread)
        return self._read.missing(round_.context + emitted)

    def rests(self) -> int:
        return 0 if self._limit else self._allowance.asleep

    def rested(self, rounds: int) -> None:
        self._allowance.doze(rounds)

    def wake(self) -> None:
        """A draft was made, the first one for long."""
        idle, self._allowance.idle = self._allowance.idle, 0
        self._first.age(AGING * idle)
        self._times.doubt(trust_after(idle))

    def learn_text(self, round_: Round) -> tuple[int, int]:
        """Learn what was accepted; how many tokens were added to the text, and how many of it the draft had to read."""
        if round_.steps:
            self._learn_verdicts(round_)
        return self._read_on(round_)

    def _read_on(self, round_: Round) -> tuple[int, int]:
        """Take down how far the text and the draft are; as `learn_text`."""
        emitted = round_.accepted + (round_.extra is not None)
        unread = self._read.round(round_.context, bool(round_.steps), emitted)
        if emitted:
            self._last_token = round_.emitted[-1] if round_.extra is None else round_.extra
        return emitted, unread

    def _decide(self, unread: int) -> None:
        """Decide on the next round, before which the draft has to read so many tokens of the text."""
        times, first = self._times, self.first_gain()
        pays = first > times.price and self._drafts.pays(first, times.price, times.entry)
        self._limit = min(self.max_draft, self._allowance.longest(pays, unread))
        self._to_pass = self._allowance.every - 1 - self._allowance.passed

    def first_gain(self) -> float:
        """The probability that the first token of the next draft is accepted."""
        self._first_accepted = first = self._first.predict(self._rates.surplus(self._last_token))
        return first

    def _learn_verdicts(self, round_: Round) -> None:
        steps, accepted = round_.steps, round_.accepted
        outcomes = round_.chances or [1.0] * accepted + [0.0] * (not round_.fully_accepted)
        token_before, outlook_before, rates = self._last_token, 0.0, self._rates
        for position, (step, outcome) in enumerate(zip(steps, outcomes, strict=False), start=1):
            if self.use_foresight:
                outlook = foreseen(step)
            else:
                confidence, outlook = features(step)
                if self.use_agreement:
                    self._agreeing.learn(outcome, self._accepted.predict(confidence, outlook), step)
                self._accepted.learn(outcome, confidence, outlook)
                if self.use_head and position < len(steps):
                    # A step's accept_prob is about the token before it.
                    predicted_log_odds = log_odds(read(steps[position].accept_prob))
                    self._accepted_as_predicted.learn(outcome, confidence, outlook, predicted_log_odds)
            surplus = rates.learn(token_before, outcome)
            if position == 1:
                self._first.learn(outcome, surplus)
            else:
                self._next.learn(outcome, outlook_before, surplus)
            token_before, outlook_before = step.token, outlook
