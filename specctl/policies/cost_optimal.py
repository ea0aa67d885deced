"""Stop where the expected tokens per second are highest; everything is learned during the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.policies.draft_account import DraftAccount, DraftAllowance, trust_after
from specctl.policies.drafting import TextRead
from specctl.policies.estimators import (
    UNKNOWN,
    AgreementCurve,
    DraftSums,
    OnlineLogistic,
    RunningLine,
    TokenRates,
    WidthCurve,
    estimators,
    expected_accepted,
    features,
    foreseen,
    log_odds,
)
from specctl.policies.round_times import COST_MEMORY, FEW, SPEED_MEMORY, RoundTimes
from specctl.records import DraftStep, Round, StopReason

CROWDED = 8
"""After this many consecutive rounds with new texts, times are learned from the continuing texts."""
RATE_PRIOR = 2.0  # Observations at which the acceptance rate after a given token weighs as much as the overall rate
AHEAD = 8  # The most further tokens of a draft that are considered at once
AGING = 5e-3
"""Growth of the variance of the estimate for first tokens in a round without a draft, as a share of the prior's."""


@dataclass(slots=True, kw_only=True)
class CostOptimal(Rule):
    """Stop when one more draft token is expected to cost more time than it saves.

    Let rho be the highest achievable tokens/s. By renewal reward theory, the rule that achieves it maximises E[emitted]
    - rho E[time] of a round. Let S_k be the probability that all k draft tokens are accepted, a_i the acceptance
    probability of token i, t_d the time of a draft step and t_v(k) the time to verify k tokens. One more token is worth
    drafting while S_k E[a_k+1 | signals so far] > rho (t_d + t_v(k+1) - t_v(k)). This one-step look-ahead is optimal if
    the left side falls with k and t_v is a line. S_k is the product of the a_i, each estimated from the draft's top
    probability and entropy at its position. E[a_k+1] is estimated from the entropy at position k and from how often the
    tokens that follow token k were accepted.

    On real machines passes of some widths are as fast as narrower ones, so t_v is learned for each width. Drafting goes
    on if any number of further tokens, up to 8, is worth its time; the later ones count as likely to be accepted as the
    next one. Where t_v is a line, this is the one-step rule.

    If not even the first token pays, the round drafts nothing, except for a few probes. It also drafts nothing if
    drafts save less than their fixed cost, such as the pass of a draft head that writes a whole block at once. Whatever
    the expectation, drafts are paid from a `DraftAccount`. Over T passes they lose at most max(1.9, 0.01 T + 0.9)
    passes beyond their earlier savings. Losses come from probes, including the time in which the draft reads the text
    that it missed. So a run is at least 0.99 times as fast as the target alone, with these exceptions: 1.9 passes at
    the start, in which a draft proves its worth; time beyond expectation of the first two drafts and of the first
    readings of missed text; and the draft's reading of a prompt, where drafts are wanted when the text begins, or later
    where much has been saved before.

    Acceptance is learned from the tokens up to the first rejected one: from `Round.chances` when sampling, else from
    the verdict itself. Tokens after a rejection teach nothing. In block verification, too, a_i is the probability that
    token i is accepted if all before it are, so that S_k is their product. t_d, t_v and rho are learned from the
    measured times of rounds. A round's weight fades within some dozens of rounds, so the estimates follow a growing
    context. Once some dozens of drafts have been timed, and while they have saved much, only one round of eight is
    learned from. Only ratios of times matter, so a slowdown that drafts and verification share, such as from other
    programs, is divided out first. Until the first times are known, ``cost_ratio`` is used: the time of a draft step
    divided by the time of a target pass.

    With ``use_head``, S_k also uses a trained head's prediction for each token but the newest, whose prediction is not
    known yet. With ``use_agreement``, whether a lookup would copy each token corrects its a_i (`AgreementCurve`).

    With ``use_foresight``, no distribution is read. A draft that predicts each token's acceptance before the token is
    written, as a lookup and a DSpark head do, estimates E[a_k+1] by that prediction and the same rates. S_k is then the
    product of these estimates, with the first token's by how often first tokens were accepted. A lookup predicts the
    first token's acceptance too (`expect`). It learns without drafting, so there are no probes, and it looks at every
    round.

    The text follows the target's distribution, as with every policy. But stopping depends on measured times, so when
    sampling, the same seed may produce a different text.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy", "top_prob"})
    max_draft: Annotated[int, Ge(1)] = 40
    cost_ratio: Annotated[float, Gt(0)] = 0.125
    carry_over: bool = True
    use_head: bool = False
    use_foresight: bool = False
    use_agreement: bool = False
    size = 1.0  # its weight as a request to `Decisions`
    __hash__ = object.__hash__  # a batch keeps sets of its texts
    batch: "CostOptimalBatch" = field(init=False, repr=False)  # what the texts of a batch share
    drafted: int = field(init=False, repr=False, compare=False, default=0)  # tokens of the draft so far
    # the probability that the next token is accepted and all before it are; and that it is if all before it are
    gain: float = field(init=False, repr=False, compare=False, default=0.0)
    following: float = field(init=False, repr=False, compare=False, default=1.0)
    unread: int = field(init=False, repr=False, default=0)  # tokens of the text that the next draft has to read first
    _ask: "Callable[[CostOptimal], int] | None" = field(init=False, repr=False, default=None)  # None for a text alone
    _accepted: OnlineLogistic = field(init=False, repr=False)
    _accepted_as_predicted: OnlineLogistic = field(init=False, repr=False)
    _next: OnlineLogistic = field(init=False, repr=False)
    _first: OnlineLogistic = field(init=False, repr=False)
    _rates: TokenRates = field(init=False, repr=False)
    _agreeing: AgreementCurve = field(init=False, repr=False)
    _copies: "CopyTimes" = field(init=False, repr=False)  # of a lookup that drafts for a text alone
    # log-odds that the first token of the coming round is accepted, where the draft predicts it; else None
    _expected: float | None = field(init=False, repr=False, default=None)
    _last_token: int | None = field(init=False, repr=False, default=None)
    _limit: int | None = field(init=False, repr=False, default=None)  # None until the next round is decided about
    _read: TextRead = field(init=False, repr=False)
    _seen: int = field(init=False, repr=False, default=0)  # rounds of the text so far
    _passed: list[Round] = field(init=False, repr=False)  # rounds passed over, and not yet booked
    _to_pass: int = field(init=False, repr=False, default=0)  # how many more rounds with drafts to pass over
    _survival_before: float = field(init=False, repr=False, compare=False, default=1.0)
    _survival: float = field(init=False, repr=False, compare=False, default=1.0)
    _last_features: tuple[float, float] = field(init=False, repr=False, compare=False, default=(0.0, 0.0))
    _first_accepted: float = field(init=False, repr=False, compare=False, default=1.0)

    def __post_init__(self) -> None:
        if self.use_head + self.use_foresight + self.use_agreement > 1:
            raise ValueError("use_head, use_foresight and use_agreement exclude each other")
        self._restart()

    def _restart(self) -> None:
        self._accepted, self._accepted_as_predicted, self._next, self._first = estimators(self.use_foresight)
        self._rates, self._agreeing = TokenRates(RATE_PRIOR), AgreementCurve()
        self.batch, self._passed, self._copies = CostOptimalBatch(self), [], CopyTimes()
        self._begin_text()
        self._decide()

    def _begin_text(self) -> None:
        # A draft that is wanted now reads the prompt. How much others lack is known after a round.
        self._last_token, self._read, self._seen = None, TextRead(), 0
        self.drafted, self.gain, self.unread = 0, 0.0, 0

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
        """The acceptance probability at which one more draft token just pays; for a lookup, the first token."""
        if self.probes or self._ask is not None:
            return self.batch.times.price
        none, one, *_ = self._copies.upto(2)
        return max(0.0, one - none)

    def joint(self) -> "CostOptimalBatch | None":
        return self.batch if self.carry_over else None

    def forget(self) -> None:
        """Forget the text, and the limit if it was requested: the next text's prompt comes first, and then `reset`."""
        self._limit = None
        self.batch.leave(self)
        self._begin_text()

    def reset(self) -> None:
        if not self.carry_over:
            self._restart()
            return
        if self._ask is not None:  # a limit requested with the prompt is valid for the first round
            self._begin_text()
            return
        self._take_down()
        self._begin_text()
        self.batch.allowance.asleep = 0  # so that a text's first round is looked at
        if self._limit:
            self._decide()

    def draft_limit(self) -> int:
        if self._limit is None and self._ask is not None:
            self.drafted, self.gain = 0, self.first_gain()
            self._limit = self._ask(self)
        return self._limit or 0

    def expect(self, chance: float) -> None:
        self._expected = log_odds(chance)
        if self._ask is None and not chance:  # there is nothing to draft
            self._limit = 0
        elif self._ask is None:
            first = self.first_gain()
            self._limit = self.max_draft if self.goes_on(0, first, first) else 0

    def _decide(self) -> None:
        """Decide on the next round of a text alone."""
        batch, first = self.batch, self.first_gain()
        self._limit = batch.limit(first > batch.times.price, first, self.unread)
        self._to_pass = batch.allowance.every - 1 - batch.allowance.passed

    def should_stop(self, step: DraftStep) -> bool:
        self.look(step)
        drafted, gain = step.index, self._survival * self.following
        if self._ask is None:
            spent = self.batch.times.spent if self.probes else ()
            if drafted + 1 < len(spent) and spent[drafted] + gain > spent[drafted + 1]:
                return False  # usually the next token alone decides
            return not self.goes_on(drafted, gain, self.following)
        if drafted >= self.draft_limit():
            return False
        self.drafted, self.gain = drafted, gain
        return not self._ask(self)

    def look(self, step: DraftStep) -> None:
        """Estimate the probability that all tokens so far are accepted, and that of the next one if they are."""
        index = step.index
        if self.use_foresight:
            # The probability that this token and all before it are accepted, from the predictions made before each.
            survival = self._survival * self.following if index > 1 else self._first_accepted
            outlook = foreseen(step)
        else:
            # The same from the distribution at each position.
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
        self.following = self._next.predict(outlook, self._rates.surplus(step.token))

    def goes_on(self, drafted: int, gain: float, following: float) -> bool:
        """Whether some number of further draft tokens is expected to save more time than it costs.

        Args:
            drafted: tokens of the draft so far.
            gain: the probability that the next token and all before it are accepted.
            following: the probability that a later token is, if all before it are.
        """
        end = drafted + 1 + AHEAD
        if end > self.max_draft + 2:
            end = self.max_draft + 2
        spent = self.batch.times.upto(end) if self.probes or self._ask is not None else self._copies.upto(end)
        gains = spent[drafted] + gain
        if gains > spent[drafted + 1]:
            return True
        for time in spent[drafted + 2 : end]:
            gain *= following
            gains += gain
            if gains > time:
                return True
        return False

    @property
    def probes(self) -> bool:
        """Whether only drafts show whether drafts pay."""
        return self._expected is None

    def first_gain(self) -> float:
        """The probability that the next draft's first token is accepted."""
        surplus = self._rates.surplus(self._last_token)
        first = self._first.predict(surplus) if self._expected is None else self._next.predict(self._expected, surplus)
        self._first_accepted = first
        return first

    def observe(self, round_: Round) -> None:
        alone, batch = self._ask is None, self.batch
        if alone and not self.probes:
            if round_.steps:
                self._learn_verdicts(round_)
            self._copies.learn(round_, self._read_on(round_)[0])
            return
        if self._to_pass and round_.steps:
            self._to_pass -= 1
            self._passed.append(round_)
            return
        if alone:
            if batch.allowance.asleep and not round_.steps:
                batch.allowance.doze()
                return
            if self._limit and not round_.steps and round_.stop is StopReason.BUDGET:
                self._read_on(round_)  # there was no room, which says nothing about drafts
                return
            if self._passed:
                self._take_down()
        seen, self._seen = self._seen, self._seen + 1
        if round_.steps:
            if batch.allowance.idle:
                self._first.age(AGING * batch.wake())
            if not batch.passes_over:
                self._learn_verdicts(round_)
        emitted, unread = self._read_on(round_)
        if self.probes:
            self.unread = self._read.missing(round_.context + emitted)
        else:
            unread = 0
        ended = Ended(round_, emitted, unread, seen)
        if alone:
            batch.learn((ended,))
            self._decide()
        else:
            self._limit = None
            batch.tell(self, ended)

    def _take_down(self) -> None:
        """Book the savings of the rounds passed over, all at once, so that the code runs from warm caches."""
        batch = self.batch
        for round_ in self._passed:
            steps = len(round_.steps)
            batch.allowance.pass_over(steps, steps, expected_accepted(round_))
            batch.times.pass_over(drafted=True)
            self._read_on(round_)
        self._seen += len(self._passed)
        self._passed.clear()

    def _read_on(self, round_: Round) -> tuple[int, int]:
        """Update the positions of text and draft.

        Returns:
            The number of tokens added to the text, and how many of its tokens the draft had to read.
        """
        emitted = round_.accepted + (round_.extra is not None)
        unread = self._read.round(round_.context, bool(round_.steps), emitted)
        if emitted:
            self._last_token = round_.emitted[-1] if round_.extra is None else round_.extra
        return emitted, unread

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
            if position == 1 and self._expected is not None:
                self._next.learn(outcome, self._expected, surplus)
            elif position == 1:
                self._first.learn(outcome, surplus)
            else:
                self._next.learn(outcome, outlook_before, surplus)
            token_before, outlook_before = step.token, outlook

    def rests(self) -> int:
        if self._ask is None:
            return 0 if self._limit else self.batch.allowance.asleep
        rounds = self.batch.rest.begin(self)
        if rounds:
            self._limit = 0  # so that it does not ask
        return rounds

    def rested(self, rounds: int) -> None:
        if self._ask is None:
            self.batch.allowance.doze(rounds)
            return
        self._limit = None
        self._last_token, self.unread = None, self.unread + rounds  # each round added one token
        self.batch.rest.end(self, rounds)


UNMEASURED = 4.0  # Rounds of one token each that the speed begins with


@dataclass(slots=True)
class CopyTimes:
    """What copied tokens cost a text alone: its tokens/s, and the times of passes by width.

    A lookup takes no time to draft, so its drafts need no account: their loss is known from the first wider pass on.
    """

    _passes: WidthCurve = field(default_factory=WidthCurve)
    _emitted: float = 0.0
    _seconds: float = 0.0
    _spent: list[float] = field(default_factory=list)
    _speed: float = 0.0  # tokens/s, where `_spent` is not empty

    def learn(self, round_: Round, emitted: int) -> None:
        """Learn from a round; a text's first one also reads the prompt."""
        if round_.index and round_.verify_seconds > 0:
            self._passes.learn(len(round_.steps), round_.verify_seconds)
            self._emitted = SPEED_MEMORY * self._emitted + emitted
            self._seconds = SPEED_MEMORY * self._seconds + round_.total_seconds
            self._spent.clear()

    def upto(self, count: int) -> list[float]:
        """The time of a round with k draft tokens, in tokens at the speed of the last rounds, for k from 0 on; at least
        ``count`` entries.
        """
        spent = self._spent
        if (start := len(spent)) < count:
            if self._passes.known:
                times = self._passes.upto(count, start)
                if not start:
                    self._speed = (self._emitted + UNMEASURED) / (self._seconds + UNMEASURED * times[0])
                spent += [self._speed * seconds for seconds in times]
            else:
                spent += [1 + UNKNOWN * width for width in range(start, count)]
        return spent


class Ended(NamedTuple):
    """A finished round of one text."""

    round: Round  # the round
    emitted: int  # number of tokens that it added
    unread: int  # number of tokens of the text that its draft had to read first
    seen: int  # rounds of its text before it


@dataclass
class CostOptimalBatch:
    """What the texts of a batch share: the times of rounds, the account, and the decision which of them draft on.

    Drafting goes on for the set S of texts that maximises

        sum of g_i over S - rho (d(|S|) + v(N + |S|) - v(N)),

    and ends when no set has a positive value. g_i is the probability that the next token of text i and all before it
    are accepted, rho the batch's tokens/s, d(n) the time of a draft pass over n texts, and v(N) that of a verification
    of N tokens. A set's cost depends only on its size, so the best set of each size has the texts with the largest
    gains. With one text this is the rule of `CostOptimal`. A text alone is learned from, and its next round decided
    about, when its round ends; several texts, when the next round begins.

    Times are learned for all texts together: a step is a draft pass over all texts, and a token to verify means one
    token of each text. d(n) is then a line. Its slope is learned from how times change with the number of texts that
    still draft. Rounds of few and of many texts take different times, so each class of batch sizes, up to a power of 2,
    has its own estimates.

    Args:
        policy: a new policy of this batch.
    """

    policy: InitVar[CostOptimal]
    times: RoundTimes = field(init=False)  # of rounds with as many texts as the current one
    allowance: DraftAllowance = field(init=False)
    rest: "JointRest" = field(init=False, compare=False)
    ended: list[Ended] = field(init=False, compare=False, default_factory=list)
    passes_over: bool = field(init=False, default=False)  # whether nothing is learned from this round
    _drafts: DraftSums = field(init=False, default_factory=lambda: DraftSums(SPEED_MEMORY))
    _limit: int = field(init=False, default=0)  # the longest draft of this round
    # texts with a token in the coming verification
    _round: set[CostOptimal] = field(init=False, compare=False, default_factory=set)
    _drafted: int = field(init=False, compare=False, default=0)
    _late: bool = field(init=False, compare=False, default=False)  # whether a draft of this round began after others
    # texts whose round has not ended
    _due: set[CostOptimal] = field(init=False, compare=False, default_factory=set)
    _begun: int = field(init=False, default=0)  # consecutive rounds in which texts began
    # seconds of a draft pass, by its number of texts
    _pass: RunningLine = field(init=False, default_factory=lambda: RunningLine(COST_MEMORY))
    _count: int = field(init=False, default=1)  # number of texts of the current round
    _most: int = field(init=False, default=1)  # the largest such number so far
    _by_size: dict[int, RoundTimes] = field(init=False)  # estimates by batch size class

    def __post_init__(self, policy: CostOptimal) -> None:
        self._policy = policy  # which refers to its batch, so it is not a field
        self.times = RoundTimes(policy.cost_ratio)
        self.allowance = DraftAllowance(self.times, DraftAccount())
        self.rest, self._by_size = JointRest(self.allowance), {0: self.times}

    def text(self, ask: "Callable[[CostOptimal], int]") -> CostOptimal:
        """The policy of one more text, with a state of its own and shared estimates.

        Args:
            ask: called with the text's policy; waits for `run`, and returns its answer for this policy.
        """
        text = copy(self._policy)
        text._ask, text._passed = ask, []
        text.forget()
        return text

    def run(self, texts: "Sequence[CostOptimal]", /) -> list[int]:
        """For each text that asks, the most tokens that it may still draft; 0 for none."""
        if self.rest:  # a text that begins meanwhile waits for the others
            return [0] * len(texts)
        starts = {text for text in texts if not text.drafted}
        if starts and (self.ended or starts >= self._round):
            chosen = self._begin(texts)
        else:  # a text that begins while others draft or wait for their verification joins their round
            self._round.update(texts)
            self._late |= bool(starts)
            chosen = self._worth(texts)
        self._due |= starts
        self._drafted += len(chosen)
        self.rest.offer(() if self._limit or not self.allowance.asleep else texts)
        return [self._limit if text in chosen else 0 for text in texts]

    def tell(self, text: CostOptimal, ended: Ended) -> None:
        """Report the end of a text's round. Nothing is learned from a text without a decision, while others rested."""
        if text in self._due:
            self._due.remove(text)
            self.ended.append(ended)

    def leave(self, text: CostOptimal) -> None:
        """Another text starts in this text's place."""
        self._due.discard(text)
        self.rest.leave(text)

    def limit(self, worth: bool, first: float, unread: int, *, probes: bool = True) -> int:
        """The longest draft in the next round.

        Args:
            worth: whether the first token is, at its price.
            first: the probability that its first token is accepted; of several texts the mean.
            unread: tokens of the text that the draft has to read first; of several texts the mean.
            probes: whether a draft that is not expected to pay may be tried.
        """
        times, allowance = self.times, self.allowance
        pays = worth and self._drafts.pays(first, times.price, times.entry)
        self._limit = min(self._policy.max_draft, allowance.longest(pays, unread)) if pays or probes else 0
        if not probes:
            allowance.asleep = 0  # each round is looked at
        return self._limit

    def _begin(self, texts: "Sequence[CostOptimal]") -> set[CostOptimal]:
        """The texts that draft in a new round."""
        allowance, ended, self.ended, late = self.allowance, self.ended, [], self._late
        self._round, self._drafted = {*texts}, sum(text.drafted for text in texts)
        self._late = self._drafted > 0
        if ended:
            drafted = any(each.round.steps for each in ended)
            if allowance.asleep and not drafted and all(each.seen for each in ended):
                allowance.doze()
                return set()
            if self.passes_over and drafted:
                self._play(len(ended))
                self._pass_over([each.round for each in ended])
            else:
                self.learn(ended, late=late)
        self._play(len(texts))
        self.passes_over = allowance.passed < allowance.every - 1
        unread = sum(text.unread for text in texts) // len(texts)
        if len(texts) == 1:
            (text,) = texts
            self.limit(text.gain > self.times.price, text.gain, unread, probes=text.probes)
            return {text}
        chosen = self._worth(texts)
        first = sum(text.gain for text in chosen) / len(chosen) if chosen else 0.0
        self.limit(bool(chosen), first, unread, probes=texts[0].probes)
        return {*texts} if allowance.probing else chosen

    def _play(self, count: int) -> None:
        """Decide by, and learn, the times of rounds with this many texts.

        Until a class has timed rounds of its own, it starts from the nearest class's times.
        """
        class_, known = (count - 1).bit_length(), self._by_size
        self._count, self._most = count, max(self._most, count)
        if class_ not in known:
            several = [each for each in known if each]
            near = min(several, key=lambda each: abs(each - class_), default=None)
            known[class_] = RoundTimes(self._policy.cost_ratio) if near is None else deepcopy(known[near])
            known[class_].read_several()
        self.times = self.allowance.times = known[class_]
        self.allowance.part = count / self._most

    def _worth(self, texts: "Sequence[CostOptimal]") -> set[CostOptimal]:
        """The texts for which drafting goes on."""
        count = len(self._round)
        if count == 1:
            (text,) = texts
            return {text} if text.goes_on(text.drafted, text.gain, text.following) else set()
        ordered = sorted(texts, key=lambda text: -text.gain)
        further, drafted, gains, best, size = self.times.further, self._drafted / count, 0.0, 0.0, 0
        for number, text in enumerate(ordered, start=1):
            gains += text.gain
            value = gains - count * further(drafted, number / count, self._share(number, count))
            if value > best:
                best, size = value, number
        return set(ordered[:size])

    def _share(self, texts: int, count: int) -> float:
        """The time of a draft pass over some texts, as a share of one over all texts."""
        if texts == count or not self._pass.known:
            return 1.0
        whole = self._pass.at(count)
        return self._pass.at(texts) / whole if whole else 1.0  # a coarse clock may have measured 0 for a lookup

    def wake(self) -> int:
        """Note the first draft after a pause; returns for how many rounds there was none."""
        idle, self.allowance.idle = self.allowance.idle, 0
        self.times.doubt(trust_after(idle))
        return idle

    def learn(self, ended: "Sequence[Ended]", *, late: bool = False) -> None:
        """Learn from a round of the batch: from the mean over its texts, but from the total times.

        A text's first round also reads the prompt, and all other texts wait for it. So the times of such rounds are
        skipped while there are others. Where texts begin all the time, times are learned from the shares of the
        continuing texts. Shares are proportional to tokens, so they are too small where a pass reads a prompt's many
        tokens almost for free. A target-only pass of a text alone right after its prompt's runs from cold caches.

        Args:
            ended: the texts' rounds.
            late: whether a draft began after others, so that the number of texts in each pass is not known.
        """
        texts, allowance = len(ended), self.allowance
        if texts != self._count:
            self._play(texts)
        total, unread, accepted, on, drafted, emitted, drafting, verifying = 0, 0, 0.0, 0, 0, 0, 0.0, 0.0
        for round_, added, missed, seen in ended:
            steps = len(round_.steps)
            total += steps
            unread += missed
            accepted += expected_accepted(round_)
            if seen or round_.index:  # in a chain, a copy may have come earlier
                on += 1
                drafted += steps
                emitted += added
                drafting += round_.draft_seconds
                verifying += round_.verify_seconds
        unread //= texts
        passes: float = total
        if total and texts > 1:
            rounds = [each.round for each in ended]
            if unread <= FEW and not late:
                longest = max(len(round_.steps) for round_ in rounds)
                self._pass.learn(total / longest, sum(round_.draft_seconds for round_ in rounds) / longest)
            passes = self._steps(rounds)
        if not total:
            allowance.idle += 1
        self._begun = 0 if on == texts else self._begun + 1
        timed = verifying > 0 and not 0 < self._begun <= CROWDED
        # Where only new texts have drafted, nothing is known of a draft's time.
        if timed and (drafted or not total) and (total or texts > 1 or ended[0].seen > 1):
            scale = texts / on
            self.times.learn(passes, drafted / on, scale * drafting, scale * verifying, emitted / on, unread)
            for each in ended:
                if each.round.steps and (each.seen or each.round.index):
                    self._drafts.learn(each.round)
        else:
            self.times.pass_over(total > 0)
        allowance.book(passes, total / texts, accepted / texts, unread)

    def _pass_over(self, rounds: "Sequence[Round]") -> None:
        """Only book the savings of a round with drafts."""
        width = sum(len(round_.steps) for round_ in rounds) / len(rounds)
        self.allowance.pass_over(self._steps(rounds), width, sum(map(expected_accepted, rounds)) / len(rounds))
        self.times.pass_over(drafted=True)

    def _steps(self, rounds: "Sequence[Round]") -> float:
        """The time of a round's draft passes, in passes over all its texts."""
        lengths = [len(round_.steps) for round_ in rounds]
        taking_part = (sum(length >= place for length in lengths) for place in range(1, max(lengths) + 1))
        return sum(self._share(each, len(lengths)) for each in taking_part)


class JointRest:
    """Rounds in which no text drafts or asks; all texts start and end such a rest together.

    Args:
        allowance: knows the number of these rounds, and counts each once.
    """

    def __init__(self, allowance: DraftAllowance) -> None:
        self._allowance = allowance
        self._may: set[CostOptimal] = set()
        self._resting: set[CostOptimal] = set()
        self._told = 0  # rounds of the rest

    def __bool__(self) -> bool:
        """Whether any text rests."""
        return bool(self._resting)

    def offer(self, texts: "Iterable[CostOptimal]") -> None:
        """After the round that begins, only these texts may rest: those with a decision."""
        self._may = {*texts}

    def begin(self, text: "CostOptimal") -> int:
        """How many rounds a text rests from now on; 0 where it may not."""
        if text not in self._may:
            return 0
        self._may.remove(text)
        if not self._resting:
            self._told = 0
        self._resting.add(text)
        return self._allowance.asleep

    def end(self, text: "CostOptimal", rounds: int) -> None:
        """This many rounds of a text's rest are over: the whole rest, as for the others, or fewer if its text has
        ended.
        """
        if text not in self._resting:
            return
        self._resting.remove(text)
        if rounds > self._told:
            self._allowance.doze(rounds - self._told)
            self._told = rounds
        if not self._allowance.asleep:
            self._resting.clear()

    def leave(self, text: "CostOptimal") -> None:
        """Another text starts in this text's place."""
        self._may.discard(text)
        self._resting.discard(text)
