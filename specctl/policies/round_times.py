"""The times of a round's phases, learned from measured rounds, and the resulting cost of a draft token."""

from dataclasses import dataclass, field

from specctl.policies.estimators import RunningLine, Slowdown, WidthTimes

COST_MEMORY, SPEED_MEMORY = 0.95, 0.985
"""Factors on the weight of earlier rounds, in the costs and in the speed, when a round ends."""
DRAFT_ANCHOR = 1.0
"""`RunningLine.anchor` of draft times: until lengths have varied, each token is assumed to cost the same."""
PRIOR_ROUNDS = 4.0
PRIOR_DRAFTED, PRIOR_EMITTED = 2, 1.8
"""The speed before the first measurement counts as PRIOR_ROUNDS rounds, each with these numbers of tokens."""
AT_MOST, WIDER, MOST_WIDER = 0.15, 0.5, 2.0
"""The largest cost of reading many tokens at once, as a share of as many draft steps; and of each further token of a
pass, as a share of a pass over one, where that reads several texts and where it reads one. Kernels that are faster for
a single token may take longer for each further one than for the first.
"""
CONFIRMED, PLAUSIBLE_STEP = 2, 4.0
"""Until this many drafts have been timed, a step is assumed to take at most this many times its share by `cost_ratio`.
"""
COLDEST = 8.0  # Cold caches after a target-only pass lengthen a draft by at most this factor
FIRST = 4.0
"""`RunningLine.restarts` of times that are rarely observed at first, so that a wrong one would last long."""
TRIED = 4  # Until drafts of this many tokens have been timed, each further token costs at most `cost_ratio`
AT_ONCE = 6  # Lengths that are computed beyond those requested, since a longer draft requests them next
RISING = 1.02  # The least time of a pass is assumed to rise by this factor between two measurements
USUAL, SURE = 2.0, 6.0
"""The width of passes that are compared over time, and how many of any width must have been timed lately."""
# A draft reads up to this many tokens in its first step in the time of one; the time for more is learned separately.
FEW = 4


@dataclass(slots=True)
class RoundTimes:
    """The times of drafting, of verifying and of the target alone, and the cost of a draft that follows from them.

    The time of a draft is a line through its length, and the time of a verification is known for each width. The time
    of a target-only pass is learned separately, from rounds without a draft that follow other rounds without one: right
    after a draft, the target's weights have left the processor's cache. While no drafts are made, their cost stays
    known but is trusted less and less (`doubt`). While drafts are made, the time of a target-only pass is assumed to
    change by the same factor as that of passes after drafts. A draft that was not wanted for a while first has to read
    the missed text. If that is more than `FEW` tokens, the additional time is a line through their number. The first
    draft after a round without one is also cold, so it says nothing about later steps, unless it took implausibly long.

    A slowdown that drafts and verification share, such as from other programs, is divided out.

    Args:
        cost_ratio: the time of a draft step divided by that of a pass, until the first times are known.
    """

    cost_ratio: float
    spent: list[float] = field(init=False, default_factory=list)  # results of `upto` since the last round
    timed: int = field(init=False, default=0)  # number of timed drafts
    # the largest cost of each further token of a pass, as a share of a pass, until passes of two widths have been
    # timed; 0 where a pass reads one text, since such a pass waits for weights, not for tokens
    widening: float = field(init=False, default=0.0)
    several: bool = field(init=False, default=False)  # whether a pass reads several texts
    # Seconds of a pass after a draft, at the time when a target-only pass was last measured.
    _beside: float = field(init=False, default=0.0)
    # the time of one more draft token, in tokens at the speed of the last rounds
    price: float = field(init=False)
    entry: float = field(init=False)  # the fixed time of a draft, in tokens
    # lost_entry, lost_step: the time of a fully rejected draft in target-only passes: its fixed part, and the part for
    # each token
    lost_entry: float = field(init=False)
    lost_step: float = field(init=False)
    _step: float = field(init=False)
    _speed: float = field(init=False)
    _begin: float = field(init=False)  # the time of a round without its draft, in tokens
    _one_pass: float = field(init=False, default=1.0)  # seconds of a target-only pass
    _draft: RunningLine = field(
        init=False, default_factory=lambda: RunningLine(COST_MEMORY, anchor=DRAFT_ANCHOR, restarts=FIRST)
    )
    _verify: WidthTimes = field(
        init=False, default_factory=lambda: WidthTimes(RunningLine(COST_MEMORY, restarts=FIRST, extends=True))
    )
    _alone: RunningLine = field(init=False, default_factory=lambda: RunningLine(COST_MEMORY, restarts=FIRST))
    _catching_up: RunningLine = field(
        init=False, default_factory=lambda: RunningLine(COST_MEMORY, anchor=DRAFT_ANCHOR, restarts=FIRST)
    )
    _slowdown: Slowdown = field(init=False, default_factory=Slowdown)
    _emitted: float = field(init=False, default=0.0)
    _seconds: float = field(init=False, default=0.0)
    _prior: float = field(init=False, default=PRIOR_ROUNDS)
    _longest: float = field(init=False, default=0)
    _least: dict[int, float] = field(init=False, default_factory=dict)  # least seconds of a pass, by its width
    _drafted_before: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._set_prices()

    def upto(self, count: int) -> list[float]:
        """The time of a round with k draft tokens, in tokens, for k from 0 on; at least ``count`` entries.

        Computed on first use after a round.
        """
        spent = self.spent
        if (start := len(spent)) < count:
            count += AT_ONCE
            begin, price, speed = self._begin, self.price, self._speed
            spent += [begin + price * k for k in range(start, count)]
            for width, surplus in self._verify.surplus.items():
                if start <= width < count:
                    spent[width] += speed * surplus
        return spent

    def catching_up(self, unread: int) -> float:
        """The time in which a draft reads ``unread`` tokens before its first step, in target-only passes."""
        if unread <= FEW:
            return 0.0
        seconds = self._catching_up.at(unread) if self._catching_up.known else self._step
        return seconds / self._one_pass

    def pass_over(self, drafted: bool) -> None:
        """Count a round that is not learned from, with or without a draft."""
        self._drafted_before = drafted

    def doubt(self, factor: float) -> None:
        """Scale down the weight of everything learned about drafts, since it is old."""
        self._draft.fade(factor)
        self._verify.line.fade(factor)

    def further(self, drafted: float, more: float, steps: float) -> float:
        """The time of this many steps, and of verifying ``more`` tokens besides ``drafted``, in tokens."""
        verify = self._verify
        return self._speed * (self._step * steps + verify.between(drafted + more) - verify.between(drafted))

    def lost(self, drafted: float, width: float) -> float:
        """By how many target-only passes a round with a draft exceeds one pass, without catching up.

        Args:
            drafted: its number of tokens.
            width: the number of verified tokens; for a tree its depth.
        """
        alone = self._one_pass
        if not self._draft.known:
            return (self._step * drafted + self._wider(width, alone)) / alone
        seconds = self._draft.at(drafted)
        if self.timed < CONFIRMED:
            seconds = min(seconds, self._most_a_step * drafted)
        return (seconds + self._wider(width, alone)) / alone

    @property
    def _most_a_step(self) -> float:
        """The upper bound on the seconds of a draft step, while its measurements may be distorted."""
        return PLAUSIBLE_STEP * self.cost_ratio * self._one_pass

    def read_several(self) -> None:
        """Note that a pass reads several texts from now on, so its time may grow with their tokens."""
        if not self.several:
            self.several, self.widening = True, WIDER
            self._set_prices()

    def _wider(self, width: float, alone: float) -> float:
        """By how many seconds a pass over a draft exceeds a target-only pass."""
        if self.widening:
            return self.widening * width * alone
        verify, nearest = self._verify, round(width)
        line, surplus = verify.line, verify.surplus.get
        longer = line.slope * width + surplus(nearest, 0.0)
        if self._alone.known:
            longer += line.base - alone
            observed = self._least.get(nearest, 0.0) - alone
            if observed > longer:
                longer = observed
        else:
            longer -= surplus(0, 0.0)
        most = self._most_wider * width * alone
        return longer if 0 <= longer <= most else most if longer > most else 0.0

    @property
    def _most_wider(self) -> float:
        """The largest cost of each further token of a pass, as a share of a pass over one."""
        return WIDER if self.several else MOST_WIDER

    @property
    def longest(self) -> int:
        """The number of tokens of the longest timed draft."""
        return int(self._longest)

    @property
    def knows_target(self) -> bool:
        """Whether a target-only pass has been timed."""
        return self._alone.known

    def learn(
        self, drafted: float, width: float, drafting: float, verifying: float, emitted: float, unread: int
    ) -> None:
        """Learn from a timed round; for several texts, numbers of tokens are means over the texts.

        Args:
            drafted: the number of draft tokens.
            width: the number of verified tokens; for a tree its depth.
            drafting: seconds.
            verifying: seconds, more than 0.
            emitted: the number of tokens that it added to the text.
            unread: the number of tokens of the text that its draft had to read first.
        """
        behind = unread > FEW
        draft, verify = self._draft, self._verify
        slowdown = self._slowdown
        if drafted and drafting and not behind and draft.known:
            steps, pass_ = draft.at(drafted), verify.line.at(width)
            if steps and pass_:  # a coarse clock may have measured 0 for all drafts so far
                slowdown.learn(drafting / steps, verifying / pass_)
        drafting, verifying = drafting / slowdown.value, verifying / slowdown.value
        if drafted or self._drafted_before:
            verify.learn(width, verifying)
        nearest = round(width)
        least = RISING * self._least.get(nearest, verifying)
        self._least[nearest] = verifying if verifying < least else least
        if behind:
            steps = self._expected(drafted)
            # Reading tokens in one pass takes a fraction of the time of as many draft steps.
            most = AT_MOST * unread * steps / drafted
            self._catching_up.learn(unread, max(0.0, min(most, drafting - steps)))
            drafting = steps
        elif drafted and (self._drafted_before or drafting > COLDEST * self._expected(drafted)):
            draft.learn(drafted, drafting)
            if drafted > self._longest:
                self._longest = drafted
            self.timed += 1
        elif not drafted and not self._drafted_before:
            self._alone.learn(0, verifying)
            self._beside = 0.0
        if len(self._least) > 1:
            self.widening = 0.0
        self._one_pass = self._alone.base if self._alone.known else min(self._least.values())
        if self._alone.known and verify.line.weight >= SURE:
            # The machine and a growing text affect target-only passes as they affect passes after drafts.
            now = verify.line.at(USUAL)
            self._beside = self._beside or now
            self._one_pass *= now / self._beside
        self._drafted_before = drafted > 0
        self._emitted = SPEED_MEMORY * self._emitted + emitted
        self._seconds = SPEED_MEMORY * self._seconds + drafting + verifying
        self._prior *= SPEED_MEMORY
        self._set_prices()

    def _expected(self, drafted: float) -> float:
        """The expected seconds of a draft, after at least one timed pass."""
        return self._draft.at(drafted) if self._draft.known else self.cost_ratio * self._verify.line.at(0) * drafted

    def _set_prices(self) -> None:
        line, draft, alone = self._verify.line, self._draft, self._one_pass
        base, slope = (line.base, line.slope) if line.known else (alone, 0.0)
        entry, step = (draft.base, draft.slope) if draft.known else (0.0, self.cost_ratio * base)
        real = step
        seconds = self._seconds + self._prior * (base + PRIOR_DRAFTED * (step + slope))
        if self._longest < TRIED and step > self.cost_ratio * base:
            step = self.cost_ratio * base  # the fixed part may be the long one
        self._step, self._speed = step, (self._emitted + self._prior * PRIOR_EMITTED) / seconds
        self.spent.clear()
        # A pass over one draft token may exceed a target-only pass by more than the difference between wider drafts.
        most = max(slope, self.widening * alone)
        wider = max(0.0, self._wider(1, alone) - most)
        self.price, self.entry = (step + slope) * self._speed, (entry + wider) * self._speed
        self._begin = base * self._speed
        if self.timed < CONFIRMED:
            entry, real = 0.0, min(real, self._most_a_step)
        self.lost_entry, self.lost_step = (entry + wider) / alone, (real + min(most, self._most_wider * alone)) / alone
