"""What the phases of a round take, learned from the times of rounds, and what a token of a draft costs by that."""

from dataclasses import dataclass, field

from specctl.policies.estimators import RunningLine, Slowdown, WidthTimes
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
"""Until this many drafts were timed, a step is taken to last at most this many times what `cost_ratio` says."""
COLDEST = 8.0  # How many times as long a draft after a pass of the target alone takes at most for its cold caches
FIRST = 4.0
"""`RunningLine.restarts` of times that are seldom observed at first, so that a wrong one would stay for long."""
TRIED = 4  # Until drafts of this many tokens were timed, each further one costs at most what `cost_ratio` says
AT_ONCE = 6  # Lengths that are computed beyond those asked for, since a longer draft asks next
RISING = 1.02  # By how much the least time of a pass is taken to have risen when the next one is timed
USUAL, SURE = 2.0, 6.0
"""The width of passes that are compared over time, and how many of any width must have been timed lately."""
FEW = 4  # Tokens that a draft reads in its first step for the time of one; what it takes to read more is learned apart


@dataclass(slots=True)
class RoundTimes:
    """The times of drafting, verifying, and of the target alone; and what follows from them for a draft.

    The time of a draft is a line through its length, and the time of a verification is known for each width. A pass of
    the target alone is another matter, learned from rounds without a draft after others without one: after a draft,
    its weights have left the processor's cache. So while no draft is made, what one would cost stays known, though it
    is believed less and less (`doubt`); and while drafts are made, a pass of the target alone is taken to have become
    longer or shorter as those after drafts have. A draft that first has to read more than `FEW` tokens of the text,
    since it was not wanted for a while, takes longer than its steps: that surplus is a line through the number of
    tokens. The first draft after a round without one is cold, too, and shows nothing of the next ones' steps, unless it
    took implausibly long.

    What slows drafts and verification alike for a while, such as other programs, is divided out.

    Args:
        cost_ratio: the time of a draft step divided by that of a pass, until the first times are known.
    """

    cost_ratio: float
    spent: list[float] = field(init=False, default_factory=list)  # what `upto` has computed since the last round
    timed: int = field(init=False, default=0)  # how many drafts were timed
    # what each token more of a pass may take at most, as a share of a pass, until passes of two widths were timed; 0
    # where a pass reads one text, for it waits for weights, not for tokens
    widening: float = field(init=False, default=0.0)
    several: bool = field(init=False, default=False)  # whether a pass reads several texts
    _beside: float = field(init=False, default=0.0)  # seconds of a pass after a draft, back when one alone was
    # tokens that are lost by the time of one more token of a draft, at the speed of the last rounds
    price: float = field(init=False)
    entry: float = field(init=False)  # tokens that are lost by what a draft takes whatever its length
    # lost_entry, lost_step: the time of a draft of which no token is accepted, in passes of the target alone: whatever
    # its length, and for each token
    lost_entry: float = field(init=False)
    lost_step: float = field(init=False)
    _step: float = field(init=False)
    _speed: float = field(init=False)
    _begin: float = field(init=False)  # tokens lost by the time of a round before any of a draft
    _one_pass: float = field(init=False, default=1.0)  # seconds of a pass of the target alone
    _draft: RunningLine = field(
        init=False, default_factory=lambda: RunningLine(COST_MEMORY, anchor=DRAFT_ANCHOR, restarts=FIRST)
    )
    _verify: WidthTimes = field(
        init=False, default_factory=lambda: WidthTimes(RunningLine(COST_MEMORY, restarts=FIRST))
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
    _least: dict[int, float] = field(init=False, default_factory=dict)  # seconds of a pass, by its width
    _drafted_before: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._set_prices()

    def upto(self, count: int) -> list[float]:
        """Tokens that are lost by the time of a round that drafts k tokens, for k from 0 on, ``count`` of them or more.

        They are computed when they are first asked for after a round.
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
        """Passes of the target alone that a draft takes to read ``unread`` tokens before its first step."""
        if unread <= FEW:
            return 0.0
        seconds = self._catching_up.at(unread) if self._catching_up.known else self._step
        return seconds / self._one_pass

    def pass_over(self, drafted: bool) -> None:
        """A round went by that is not learned from, with a draft or without one."""
        self._drafted_before = drafted

    def doubt(self, factor: float) -> None:
        """Multiply the weight of all that was learned of drafts, since it was long ago."""
        self._draft.fade(factor)
        self._verify.line.fade(factor)

    def further(self, drafted: float, more: float, steps: float) -> float:
        """Tokens that are lost by the time of this many steps, and of verifying ``more`` tokens besides ``drafted``."""
        verify = self._verify
        return self._speed * (self._step * steps + verify.between(drafted + more) - verify.between(drafted))

    def lost(self, drafted: float, width: float) -> float:
        """By how many passes of the target alone a round with a draft was longer than one, but for catching up.

        Args:
            drafted: its tokens.
            width: how many tokens were verified, or of a tree its depth.
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
        """Seconds that a draft step is taken to last at most, while that may have been measured in a bad moment."""
        return PLAUSIBLE_STEP * self.cost_ratio * self._one_pass

    def read_several(self) -> None:
        """From now on a pass reads several texts, and may take as long as their tokens do."""
        if not self.several:
            self.several, self.widening = True, MOST_WIDER
            self._set_prices()

    def _wider(self, width: float, alone: float) -> float:
        """By how many seconds a pass over a draft is longer than one of the target alone."""
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
        most = MOST_WIDER * width * alone
        return longer if 0 <= longer <= most else most if longer > most else 0.0

    @property
    def knows_target(self) -> bool:
        """Whether a pass of the target alone was timed."""
        return self._alone.known

    def learn(self, round_: Round, emitted: int, unread: int) -> None:
        """Learn from a round that was timed.

        Args:
            round_: of which at least the verification took time.
            emitted: how many tokens it added to the text.
            unread: tokens of the text that its draft had to catch up with.
        """
        drafted = len(round_.steps)
        self.learn_phases(drafted, drafted, round_.draft_seconds, round_.verify_seconds, emitted, unread)

    def learn_phases(
        self, drafted: float, width: float, drafting: float, verifying: float, emitted: float, unread: int
    ) -> None:
        """`learn` from numbers, of several texts in the mean over them but for times.

        Args:
            drafted: tokens of the draft.
            width: how many tokens were verified, or of a tree its depth.
            drafting, verifying: seconds.
            emitted, unread: see `learn`.
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
            # Reading tokens at once takes a part of what as many draft steps take.
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
            # What the machine or a growing text does to passes after drafts, it does to those of the target alone.
            now = verify.line.at(USUAL)
            self._beside = self._beside or now
            self._one_pass *= now / self._beside
        self._drafted_before = drafted > 0
        self._emitted = SPEED_MEMORY * self._emitted + emitted
        self._seconds = SPEED_MEMORY * self._seconds + drafting + verifying
        self._prior *= SPEED_MEMORY
        self._set_prices()

    def _expected(self, drafted: float) -> float:
        """Seconds of a draft; a pass must have been timed."""
        return self._draft.at(drafted) if self._draft.known else self.cost_ratio * self._verify.line.at(0) * drafted

    def _set_prices(self) -> None:
        line, draft, alone = self._verify.line, self._draft, self._one_pass
        base, slope = (line.base, line.slope) if line.known else (alone, 0.0)
        entry, step = (draft.base, draft.slope) if draft.known else (0.0, self.cost_ratio * base)
        real = step
        seconds = self._seconds + self._prior * (base + PRIOR_DRAFTED * (step + slope))
        if self._longest < TRIED and step > self.cost_ratio * base:
            step = self.cost_ratio * base  # it may be the beginning that takes long
        self._step, self._speed = step, (self._emitted + self._prior * PRIOR_EMITTED) / seconds
        self.spent.clear()
        # A pass over a draft of one token may be longer than one of the target alone by more than wider drafts differ.
        most = max(slope, self.widening * alone)
        wider = max(0.0, self._wider(1, alone) - most)
        self.price, self.entry = (step + slope) * self._speed, (entry + wider) * self._speed
        self._begin = base * self._speed
        if self.timed < CONFIRMED:
            entry, real = 0.0, min(real, self._most_a_step)
        self.lost_entry, self.lost_step = (entry + wider) / alone, (real + min(most, MOST_WIDER * alone)) / alone
