"""What the phases of a round take, learned from the times of rounds, and what a token of a draft costs by that."""

from dataclasses import dataclass, field

from specctl.policies.online import RunningLine, Slowdown, WidthTimes
from specctl.records import Round

COST_MEMORY, SPEED_MEMORY = 0.95, 0.985
"""Factors on the weight of earlier rounds, in the costs and in the speed, when a round ends."""
DRAFT_ANCHOR = 1.0
"""`RunningLine.anchor` of draft times: until lengths have varied, each token is taken to cost the same."""
PRIOR_ROUNDS = 4.0
PRIOR_DRAFTED, PRIOR_EMITTED = 2, 1.8
"""The speed before the first measurement counts as PRIOR_ROUNDS rounds, each with these numbers of tokens."""
AT_MOST, MOST_WIDER = 0.15, 0.5
"""What reading many tokens at once takes at most, as a share of as many draft steps; and what each token more of a pass
takes at most, as a share of a pass over one."""
CONFIRMED, PLAUSIBLE_STEP = 2, 4.0
"""Until so many drafts were timed, a step is taken to last at most so many times what `cost_ratio` says."""
FIRST = 4.0
"""`RunningLine.restarts` of times that are seldom observed at first, so that a wrong one would stay for long."""
TRIED = 4
"""Until drafts of so many tokens were timed, each further one is taken to cost no more than `cost_ratio` says."""
AT_ONCE = 8
"""Lengths that are computed beyond those asked for, since a longer draft asks next."""
FEW = 4
"""Tokens that a draft reads in its first step for the time of one; what it takes to read more is learned apart."""


@dataclass(slots=True)
class RoundTimes:
    """The times of drafting, verifying, and of the target alone; and what follows from them for a draft.

    The time of a draft is a line through its length, and the time of a verification is known for each width. A pass of
    the target alone is learned from rounds without a draft behind others without one: behind a draft, its weights
    have left the processor's cache. A draft that first has to read more than `FEW` tokens of the text, since it was not
    wanted for a while, takes longer than its steps: that surplus is a line through the number of tokens.

    What slows drafts and verification alike for a while, such as other programs, is divided out.

    Args:
        cost_ratio: the time of a draft step divided by that of a pass, until the first times are known.

    Attributes:
        price: tokens that are lost by the time of one more token of a draft, at the speed of the last rounds.
        entry: tokens that are lost by what a draft takes whatever its length.
        lost_entry, lost_step: the time of a draft of which no token is accepted, in passes of the target alone:
            whatever its length, and for each token.
    """

    cost_ratio: float
    price: float = field(init=False)
    entry: float = field(init=False)
    lost_entry: float = field(init=False)
    lost_step: float = field(init=False)
    _step: float = field(init=False)
    _speed: float = field(init=False)
    _base: float = field(init=False, default=1.0)  # of a pass, while none was timed
    _draft: RunningLine = field(
        init=False, default_factory=lambda: RunningLine(COST_MEMORY, anchor=DRAFT_ANCHOR, restarts=FIRST)
    )
    _verify: WidthTimes = field(
        init=False, default_factory=lambda: WidthTimes(RunningLine(COST_MEMORY, restarts=FIRST))
    )
    _alone: RunningLine = field(init=False, default_factory=lambda: RunningLine(COST_MEMORY, restarts=FIRST))
    _any: RunningLine = field(init=False, default_factory=lambda: RunningLine(COST_MEMORY, restarts=FIRST))
    _catching_up: RunningLine = field(
        init=False, default_factory=lambda: RunningLine(COST_MEMORY, anchor=DRAFT_ANCHOR, restarts=FIRST)
    )
    _slowdown: Slowdown = field(init=False, default_factory=Slowdown)
    _emitted: float = field(init=False, default=0.0)
    _seconds: float = field(init=False, default=0.0)
    _prior: float = field(init=False, default=PRIOR_ROUNDS)
    _longest: int = field(init=False, default=0)
    _timed: int = field(init=False, default=0)
    _drafted_before: bool = field(init=False, default=True)
    _spent: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._set_prices()

    def upto(self, count: int) -> list[float]:
        """Tokens that are lost by the time of a round that drafts k tokens, for k from 0 on, ``count`` of them or more.

        They are computed when they are first asked for after a round.
        """
        spent = self._spent
        if len(spent) < count:
            count += AT_ONCE
            step, speed, start = self._step, self._speed, len(spent)
            if self._verify.line.known:
                passes = self._verify.upto(count)
                spent += [speed * (step * k + passes[k]) for k in range(start, count)]
            else:
                spent += [speed * (step * k + self._base) for k in range(start, count)]
        return spent

    def catching_up(self, unread: int) -> float:
        """Passes of the target alone that a draft takes to read ``unread`` tokens before its first step."""
        if unread <= FEW:
            return 0.0
        seconds = self._catching_up.at(unread) if self._catching_up.known else self._step
        return seconds / self._one_pass

    def lost(self, round_: Round) -> float:
        """By how many passes of the target alone a round with a draft was longer than one, but for catching up."""
        alone, drafted = self._one_pass, round_.drafted
        if not self._draft.known:
            return self._step * drafted / alone
        seconds = self._draft.at(drafted)
        if self._timed < CONFIRMED:
            seconds = min(seconds, self._most_a_step * drafted)
        return (seconds + self._wider(_width(round_), alone)) / alone

    @property
    def _most_a_step(self) -> float:
        """Seconds that a draft step is taken to last at most, while that may have been measured in a bad moment."""
        return PLAUSIBLE_STEP * self.cost_ratio * self._one_pass

    def _wider(self, width: int, alone: float) -> float:
        """By how many seconds a pass over a draft is longer than one of the target alone."""
        longer = self._verify.at(width) - self._verify.at(0)
        return max(0.0, min(longer, MOST_WIDER * width * alone))

    @property
    def knows_target(self) -> bool:
        """Whether a pass of the target alone was timed."""
        return self._alone.known

    @property
    def _one_pass(self) -> float:
        """Seconds of a pass of the target alone."""
        if self._alone.known:
            return self._alone.fit()[0]
        return self._any.fit()[0] if self._any.known else self._base

    def learn(self, round_: Round, emitted: int, unread: int) -> None:
        """Learn from a round that was timed.

        Args:
            round_: of which at least the verification took time.
            emitted: how many tokens it added to the text.
            unread: tokens of the text that its draft had to catch up with.
        """
        drafting, verifying, width = round_.draft_seconds, round_.verify_seconds, _width(round_)
        behind = unread > FEW
        if round_.drafted and drafting and not behind and self._draft.known:
            expected = self._draft.at(round_.drafted), self._verify.line.at(width)
            if all(expected):  # a coarse clock may have told 0 of all drafts so far
                self._slowdown.learn(drafting / expected[0], verifying / expected[1])
        slowdown = self._slowdown.value
        drafting, verifying = drafting / slowdown, verifying / slowdown
        self._verify.learn(width, verifying)
        if behind:
            base = self._verify.at(0)
            steps = self._draft.at(round_.drafted) if self._draft.known else self.cost_ratio * base * round_.drafted
            # Reading tokens at once takes a part of what as many draft steps take.
            most = AT_MOST * unread * steps / round_.drafted
            self._catching_up.learn(unread, max(0.0, min(most, drafting - steps)))
            drafting = steps
        elif round_.drafted:
            self._draft.learn(round_.drafted, drafting)
            self._longest = max(self._longest, round_.drafted)
            self._timed += 1
        elif not self._drafted_before:
            self._alone.learn(0, verifying)
        if not self._alone.known:
            self._any.learn(0, verifying)
        self._drafted_before = bool(round_.drafted)
        self._emitted = SPEED_MEMORY * self._emitted + emitted
        self._seconds = SPEED_MEMORY * self._seconds + drafting + verifying
        self._prior *= SPEED_MEMORY
        self._set_prices()

    def _set_prices(self) -> None:
        base, slope = self._verify.line.fit() if self._verify.line.known else (self._base, 0.0)
        entry, step = self._draft.fit() if self._draft.known else (0.0, self.cost_ratio * base)
        real = step
        seconds = self._seconds + self._prior * (base + PRIOR_DRAFTED * (step + slope))
        if self._longest < TRIED:
            step = min(step, self.cost_ratio * base)  # it may be the beginning that takes long
        self._step, self._speed = step, (self._emitted + self._prior * PRIOR_EMITTED) / seconds
        self._spent.clear()
        alone = self._one_pass
        # A pass over a draft of one token may be longer than one of the target alone by more than wider drafts differ.
        wider = max(0.0, self._wider(1, alone) - slope) if self._verify.line.known else 0.0
        self.price, self.entry = (step + slope) * self._speed, (entry + wider) * self._speed
        lost_entry, lost_step = (
            (entry + wider, real) if self._timed >= CONFIRMED else (wider, min(real, self._most_a_step))
        )
        self.lost_entry, self.lost_step = lost_entry / alone, (lost_step + min(slope, MOST_WIDER * alone)) / alone


def _width(round_: Round) -> int:
    """By what the time of a verification is learned: how many tokens were verified, or of a tree its depth.

    A tree has as many tokens as its depth and its size allow, so that one more level takes what deeper trees took.
    """
    return round_.drafted if round_.tree else round_.nodes
