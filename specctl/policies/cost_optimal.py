"""Stop where the expected tokens per second are highest; everything is learned during the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.policies.draft_account import DraftAccount, DraftAllowance, trust_after
from specctl.policies.drafting import TextRead
from specctl.policies.estimators import (
    AgreementCurve,
    DraftSums,
    OnlineLogistic,
    RunningLine,
    TokenRates,
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
    product of these estimates, with the first token's by how often first tokens were accepted.

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
    _seen: int = field(init=False, repr=False)  # rounds of the text so far
    _passed: list[Round] = field(init=False, repr=False)  # rounds passed over, and not yet booked
    _to_pass: int = field(init=False, repr=False)  # how many more rounds with drafts to pass over
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
        # A draft that is wanted when a text begins has read the prompt. How much other drafts lack is known after a
        # round.
        self._last_token, self._read, self._seen = None, TextRead(), 0
        self._allowance.asleep = 0  # so that a text's first round is looked at
        if self._limit:
            self._decide(0)

    def draft_limit(self) -> int:
        return self._limit

    def should_stop(self, step: DraftStep) -> bool:
        self.look(step)
        drafted, gain, spent = step.index, self._survival * self._following, self._times.spent
        if drafted + 1 < len(spent) and spent[drafted] + gain > spent[drafted + 1]:
            return False  # usually the next token alone decides
        return not self._goes_on(drafted, gain, self._following)

    def look(self, step: DraftStep) -> None:
        """Estimate the probability that all tokens so far are accepted, and that of the next one if they are."""
        index = step.index
        if self.use_foresight:
            # The probability that this token and all before it are accepted, from the predictions made before each.
            survival = self._survival * self._following if index > 1 else self._first_accepted
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
        self._following = self._next.predict(outlook, self._rates.surplus(step.token))

    def _goes_on(self, drafted: int, gain: float, following: float) -> bool:
        """Whether some number of further draft tokens is expected to save more time than it costs.

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

    def joint(self) -> "JointCostOptimal | None":
        return JointCostOptimal(self) if self.carry_over else None

    def observe(self, round_: Round) -> None:
        if self._to_pass and round_.steps:
            self._to_pass -= 1
            self._passed.append(round_)
        elif self._allowance.asleep and not round_.steps:
            self._allowance.doze()
        elif self._limit and not round_.steps and round_.stop is StopReason.BUDGET:
            self._read_on(round_)  # there was no room, which says nothing about drafts
        else:
            self._take_down()
            self._decide(self._learn(round_))

    def _take_down(self) -> None:
        """Book the savings of the rounds passed over, all at once, so that the code runs from warm caches."""
        for round_ in self._passed:
            self._allowance.pass_over(len(round_.steps), len(round_.steps), expected_accepted(round_))
            self._times.pass_over(drafted=True)
            self._read_on(round_)
        self._seen += len(self._passed)
        self._passed.clear()

    def _learn(self, round_: Round) -> int:
        """Learn from a round. Returns how many tokens of the text the next draft has to read first."""
        allowance = self._allowance
        seen, self._seen = self._seen, self._seen + 1
        first = not seen and not round_.index  # in a chain, a copy may have come earlier
        if not round_.steps:
            allowance.idle += 1
        elif allowance.idle:
            self.wake()
        emitted, unread = self.learn_text(round_)
        # A text's first round also reads the prompt, and a target-only pass right after it runs from cold caches.
        if round_.verify_seconds and not first and (round_.steps or seen > 1):
            self._times.learn(round_, emitted, unread)
            if round_.steps:
                self._drafts.learn(round_)
        else:
            self._times.pass_over(bool(round_.steps))
        allowance.book(len(round_.steps), len(round_.steps), expected_accepted(round_), unread)
        return self._read.missing(round_.context + emitted)

    def rests(self) -> int:
        return 0 if self._limit else self._allowance.asleep

    def rested(self, rounds: int) -> None:
        self._allowance.doze(rounds)

    def wake(self) -> None:
        """Note the first draft after a long pause."""
        idle, self._allowance.idle = self._allowance.idle, 0
        self._first.age(AGING * idle)
        self._times.doubt(trust_after(idle))

    def learn_text(self, round_: Round) -> tuple[int, int]:
        """Learn from acceptance. Returns the number of tokens added to the text, and how many of its tokens the draft
        had to read.
        """
        if round_.steps:
            self._learn_verdicts(round_)
        return self._read_on(round_)

    def _read_on(self, round_: Round) -> tuple[int, int]:
        """Update the positions of text and draft; returns the same as `learn_text`."""
        emitted = round_.accepted + (round_.extra is not None)
        unread = self._read.round(round_.context, bool(round_.steps), emitted)
        if emitted:
            self._last_token = round_.emitted[-1] if round_.extra is None else round_.extra
        return emitted, unread

    def _decide(self, unread: int) -> None:
        """Decide on the next round, in which the draft has to read ``unread`` tokens of the text first."""
        times, first = self._times, self.first_gain()
        pays = first > times.price and self._drafts.pays(first, times.price, times.entry)
        self._limit = min(self.max_draft, self._allowance.longest(pays, unread))
        self._to_pass = self._allowance.every - 1 - self._allowance.passed

    def first_gain(self) -> float:
        """The probability that the next draft's first token is accepted."""
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


class JointCostOptimal:
    """Decides for which set S of texts drafting goes on.

    The set maximises

        sum of g_i over S - rho (d(|S|) + v(N + |S|) - v(N)),

    and drafting ends when no set has a positive value. g_i is the probability that the next token of text i and all
    before it are accepted, rho the batch's tokens/s, d(n) the time of a draft pass over n texts, and v(N) that of a
    verification of N tokens. A set's cost depends only on its size, so the best set of each size has the texts with the
    largest gains. With one text this is the rule of `CostOptimal`, which learns from each round at once.

    Acceptance is learned from all texts. Times of rounds are learned as by `CostOptimal`, for all texts together: a
    step is a draft pass over all texts, and a token to verify means one token of each text. d(n) is then a line. Its
    slope is learned from how times change with the number of texts that still draft. Rounds of few and of many texts
    take different times, so each class of batch sizes, up to a power of 2, has its own estimates.

    Args:
        policy: a new policy; it holds everything learned.
    """

    def __init__(self, policy: "CostOptimal") -> None:
        self.shared = policy
        self.ended: list[Ended] = []
        self._round: set[CostOptimalText] = set()  # texts with a token in the coming verification
        self._drafted = 0
        self._late = False  # whether a draft of this round began after others
        self.rest = JointRest(policy._allowance)
        self._due: set[CostOptimalText] = set()  # texts whose round has not ended
        self._begun = 0  # consecutive rounds in which texts began
        self.passes_over = False  # whether nothing is learned from this round
        self._pass = RunningLine(COST_MEMORY)  # seconds of a draft pass, by its number of texts
        self._most = 1  # largest number of texts in a round so far
        self._times = {0: policy._times}  # estimates by batch size class

    def text(self, ask: "Callable[[CostOptimalText], int]") -> "CostOptimalText":
        """The policy of one more text.

        Args:
            ask: called with the text's policy; waits for `run`, and returns its answer for this policy.
        """
        return CostOptimalText(self, ask)

    def run(self, texts: "Sequence[CostOptimalText]", /) -> list[int]:
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
        limit = self.shared._limit
        self.rest.offer(() if limit or not self.shared._allowance.asleep else texts)
        return [limit if text in chosen else 0 for text in texts]

    def tell(self, text: "CostOptimalText", ended: "Ended") -> None:
        """Report the end of a text's round. Nothing is learned from a text without a decision, while others rested."""
        if text in self._due:
            self._due.remove(text)
            self.ended.append(ended)

    def _begin(self, texts: "Sequence[CostOptimalText]") -> "set[CostOptimalText]":
        """The texts that draft in a new round."""
        shared, ended, self.ended, late = self.shared, self.ended, [], self._late
        self._round, self._drafted = {*texts}, sum(text.drafted for text in texts)
        self._late = self._drafted > 0
        if ended:
            if shared._allowance.asleep and not any(each.begins or each.round.steps for each in ended):
                shared._allowance.doze()
                return set()
            self._play(len(ended))
            if self.passes_over and any(each.round.steps for each in ended):
                self._pass_over([each.round for each in ended])
            else:
                self._learn(ended, late=late)
        self._play(len(texts))
        self.passes_over = shared._allowance.passed < shared._allowance.every - 1
        if len(texts) == 1:
            shared._last_token = texts[0].own._last_token
            shared._decide(texts[0].unread)
            return set(texts)
        chosen, times = self._worth(texts), shared._times
        first = sum(text.gain for text in chosen) / len(chosen) if chosen else 0.0
        pays = bool(chosen) and shared._drafts.pays(first, times.price, times.entry)
        unread = sum(text.unread for text in texts) // len(texts)
        shared._limit = min(shared.max_draft, shared._allowance.longest(pays, unread))
        return chosen if pays else set(texts)

    def _play(self, count: int) -> None:
        """Decide by, and learn, the times of rounds with this many texts.

        Until a class has timed rounds of its own, it starts from the nearest class's times.
        """
        shared, class_, known = self.shared, (count - 1).bit_length(), self._times
        self._most = max(self._most, count)
        if class_ not in known:
            several = [each for each in known if each]
            near = min(several, key=lambda each: abs(each - class_), default=None)
            known[class_] = RoundTimes(shared.cost_ratio) if near is None else deepcopy(known[near])
            known[class_].read_several()
        shared._times = shared._allowance.times = known[class_]
        shared._allowance.part = count / self._most

    def _worth(self, texts: "Sequence[CostOptimalText]") -> "set[CostOptimalText]":
        """The texts for which drafting goes on."""
        shared, count = self.shared, len(self._round)
        if count == 1:
            (text,) = texts
            return {text} if shared._goes_on(text.drafted, text.gain, text.own._following) else set()
        ordered = sorted(texts, key=lambda text: -text.gain)
        further, drafted, gains, best, size = shared._times.further, self._drafted / count, 0.0, 0.0, 0
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
        return self._pass.at(texts) / (self._pass.at(count) or 1.0)

    def _learn(self, ended: "Sequence[Ended]", *, late: bool) -> None:
        """Learn from a round of the batch: from the mean over its texts, but from the total times.

        Where a draft began after others, the number of texts in each pass is not known.
        """
        shared, texts, rounds = self.shared, len(ended), [each.round for each in ended]
        total, passes = sum(len(round_.steps) for round_ in rounds), max(len(round_.steps) for round_ in rounds)
        unread = sum(each.unread for each in ended) // texts
        if passes and texts > 1 and unread <= FEW and not late:
            self._pass.learn(total / passes, sum(each.draft_seconds for each in rounds) / passes)
        steps = self._steps(rounds)
        shared._allowance.idle += not total
        if not self._learn_times(ended, steps, unread):
            shared._times.pass_over(total > 0)
        shared._allowance.book(steps, total / texts, sum(map(expected_accepted, rounds)) / texts, unread)

    def _pass_over(self, rounds: "Sequence[Round]") -> None:
        """Only book the savings of a round with drafts."""
        shared, texts = self.shared, len(rounds)
        width = sum(len(round_.steps) for round_ in rounds) / texts
        shared._allowance.pass_over(self._steps(rounds), width, sum(map(expected_accepted, rounds)) / texts)
        shared._times.pass_over(drafted=True)

    def _steps(self, rounds: "Sequence[Round]") -> float:
        """The time of a round's draft passes, in passes over all its texts."""
        lengths = [len(round_.steps) for round_ in rounds]
        if len(lengths) == 1:
            return lengths[0]
        taking_part = (sum(length >= place for length in lengths) for place in range(1, max(lengths) + 1))
        return sum(self._share(each, len(lengths)) for each in taking_part)

    def _learn_times(self, ended: "Sequence[Ended]", steps: float, unread: int) -> bool:
        """Learn a round's times from its number of draft steps; returns whether that was possible.

        A text's first round also reads the prompt, and all other texts wait for it. So such rounds are skipped while
        there are others. Where texts begin all the time, times are learned from the shares of the continuing texts.
        Shares are proportional to tokens, so they are too small where a pass reads a prompt's many tokens almost for
        free.
        """
        on = [each for each in ended if not each.begins]
        self._begun = 0 if len(on) == len(ended) else self._begun + 1
        if not on or 0 < self._begun <= CROWDED:
            return False
        shared, count, rounds = self.shared, len(on), [each.round for each in on]
        width = sum(len(round_.steps) for round_ in rounds) / count
        drafting, verifying = (
            len(ended) / count * sum(phase)
            for phase in zip(*((each.draft_seconds, each.verify_seconds) for each in rounds), strict=True)
        )
        if not verifying or (steps and not width):  # only new texts have drafted
            return False
        shared._times.learn_phases(steps, width, drafting, verifying, sum(each.emitted for each in on) / count, unread)
        for round_ in rounds:
            if round_.steps:
                shared._drafts.learn(round_)
        return True


class JointRest:
    """Rounds in which no text drafts or asks; all texts start and end such a rest together.

    Args:
        allowance: knows the number of these rounds, and counts each once.
    """

    def __init__(self, allowance: DraftAllowance) -> None:
        self._allowance = allowance
        self._may: set[CostOptimalText] = set()
        self._resting: set[CostOptimalText] = set()
        self._told = 0  # rounds of the rest

    def __bool__(self) -> bool:
        """Whether any text rests."""
        return bool(self._resting)

    def offer(self, texts: "Iterable[CostOptimalText]") -> None:
        """After the round that begins, only these texts may rest: those with a decision."""
        self._may = {*texts}

    def begin(self, text: "CostOptimalText") -> int:
        """How many rounds a text rests from now on; 0 where it may not."""
        if text not in self._may:
            return 0
        self._may.remove(text)
        if not self._resting:
            self._told = 0
        self._resting.add(text)
        return self._allowance.asleep

    def end(self, text: "CostOptimalText", rounds: int) -> None:
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

    def leave(self, text: "CostOptimalText") -> None:
        """Another text starts in this text's place."""
        self._may.discard(text)
        self._resting.discard(text)


class Ended(NamedTuple):
    """A finished round of one text."""

    round: Round  # the round
    emitted: int  # number of tokens that it added
    unread: int  # number of tokens of the text that its draft had to read first
    begins: bool  # whether it was its text's first round


class CostOptimalText:
    """The `StoppingPolicy` of one text of a batch.

    Attributes:
        joint: the object that decides for all texts.
        own: a policy with the text's own state and shared estimates.
        drafted: tokens of the draft so far.
        gain: the probability that the next token and all before it are accepted.
        unread: tokens of the text that the next draft has to read first.
    """

    keep_trigger = True
    drafts = True
    size = 1.0

    def __init__(self, joint: JointCostOptimal, ask: "Callable[[CostOptimalText], int]") -> None:
        self.own = copy(joint.shared)
        self.joint, self._ask = joint, ask
        self._begins = True
        self.forget()

    @property
    def signals(self) -> frozenset[Signal]:
        return self.own.signals

    @property
    def current_threshold(self) -> float | None:
        return self.joint.shared.current_threshold

    def forget(self) -> None:
        """Forget the text, and the limit if it was requested: the next text's prompt comes first, and then `reset`."""
        self._limit: int | None = None
        self.joint._due.discard(self)
        self.joint.rest.leave(self)
        self.reset()

    def reset(self) -> None:
        # A limit requested with the prompt is valid for the first round.
        self.own._last_token, self.own._read, self._begins = None, TextRead(), True
        self.drafted, self.gain, self.unread = 0, 0.0, 0

    def draft_limit(self) -> int:
        if self._limit is None:
            self.drafted, self.gain = 0, self.own.first_gain()
            self._limit = self._ask(self)
        return self._limit

    def should_stop(self, step: DraftStep) -> bool:
        own = self.own
        own.look(step)
        if step.index >= self.draft_limit():
            return False
        self.drafted, self.gain = step.index, own._survival * own._following
        return not self._ask(self)

    def observe(self, round_: Round) -> None:
        own, joint = self.own, self.joint
        if round_.steps and joint.shared._allowance.idle:
            joint.shared.wake()
        emitted, unread = own._read_on(round_) if joint.passes_over else own.learn_text(round_)
        joint.tell(self, Ended(round_, emitted, unread, self._begins))
        self.unread, self._limit, self._begins = own._read.missing(round_.context + emitted), None, False

    def rests(self) -> int:
        rounds = self.joint.rest.begin(self)
        if rounds:
            self._limit = 0  # so that it does not ask
        return rounds

    def rested(self, rounds: int) -> None:
        self._limit = None
        self.own._last_token, self.unread = None, self.unread + rounds  # each round added one token
        self.joint.rest.end(self, rounds)
