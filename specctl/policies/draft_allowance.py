"""How long the next draft may be, by what drafts saved so far and what one takes."""

from dataclasses import dataclass, field

from specctl.policies.draft_account import DraftAccount
from specctl.policies.round_times import RoundTimes

DOUBTED = 100
"""Rounds without a draft in which belief in the price of one halves: it may have been measured in a bad moment."""
LULL, LONGEST_LULL, LULL_OF_SEVERAL = 8, 64, 2
"""After more than LULL rounds without a draft, LULL_OF_SEVERAL of several texts, only each LULL-th is looked at, and
later one of a quarter of them, at most LONGEST_LULL: those between cost nothing."""
UNSEEN, RESTING, SMALL, GAIN_RATE = 300, 2, 0.2, 0.02
"""After UNSEEN rounds with drafts that save less than SMALL of a pass each, RESTING rounds go without, so that the time
of the target alone stays known, and after a first draft that brings nothing, or of several texts; the weight of one
draft in what they save.
"""
UNSEEN_AT_FIRST, SMALL_OF_SEVERAL = 16, 0.25
"""Of several texts: the first time after so many rounds, then after twice as many, up to UNSEEN; and SMALL. What a pass
over them takes follows from the lengths of all, and a draft that saves as little as it may be wrong by is soon found
out."""
SETTLED, EVERY = 64, 8
"""Once SETTLED drafts were timed, and while drafts have saved much, one round of EVERY is learned from: what follows a
pass of the target runs from cold caches, and takes three times as long as elsewhere."""
FIRST_LENGTH, FIRST_DRAFTS = 2, 2
"""Tokens of a run's first FIRST_DRAFTS drafts at most: one of four that is rejected takes most of what a run may lose,
and what the draft is worth is not found out any more."""
UNLIKELY = 0.5
"""A first draft that is expected to bring fewer tokens brought nothing."""


def trust_after(idle: int) -> float:
    """How much the price of a draft is believed after so many rounds without one, from 1 down to 0."""
    return float(0.5 ** (idle / DOUBTED))


@dataclass(slots=True)
class DraftAllowance:
    """Books what drafts save in a `DraftAccount`, by the prices of `RoundTimes`, and limits the next one.

    Attributes:
        times: what rounds take.
        account: pays for drafts.
        probing: whether the next draft is not expected to pay.
        idle: rounds without a draft so far, since the last one.
        asleep: how many rounds from now on need not be looked at if they go without a draft, too.
        part: of the texts for which the account is kept, how many a round has.
        passed: rounds with drafts that were passed over since the last one that was booked.
    """

    times: RoundTimes
    account: DraftAccount
    probing: bool = True
    idle: int = 0
    asleep: int = 0
    part: float = 1.0
    passed: int = 0
    _passed_gain: float = 0.0
    _skipped: int = 0
    _resting: int = 0
    _unseen: int = 0
    _rest_after: int = UNSEEN_AT_FIRST
    _booked: int = 0
    _gain: float = 0.0
    _unbooked: tuple[float, float, float] | None = field(default=None)

    def doze(self, rounds: int = 1) -> None:
        """Rounds went by that were not looked at."""
        self.asleep -= rounds
        self.idle += rounds
        self._skipped += rounds

    @property
    def every(self) -> int:
        """One round of how many with drafts is learned from: of several where drafts are expected to pay and have saved
        enough that a few of them may go wrong unseen."""
        routine = self.account.proven and not (self.probing or self.idle or self._resting)
        return EVERY if routine and self.times.timed >= SETTLED else 1

    def pass_over(self, drafted: float, width: float, kept: float) -> None:
        """Note what a draft saved whose round nothing else is learned from; as `book`.

        Each by itself: a long draft that is rejected as a whole loses more than several others save.
        """
        self.passed += 1
        self._passed_gain += self._gained(drafted, width, kept)

    def book(self, drafted: float, width: float, kept: float, unread: int) -> None:
        """Book what a round's draft saved, and what those before it did that were passed over.

        Args:
            drafted: its tokens, 0 for none.
            width: of `RoundTimes`.
            kept: how many of them stay, in expectation over the verdict where that is known.
            unread: tokens of the text that the draft had to read first.
        """
        passed, self.passed = self.passed, 0
        before, self._passed_gain = self._passed_gain, 0.0
        if passed:
            self.account.book(self.part * before, probe=False, rounds=self.part * passed)
        if not drafted:
            gain = 0.0
            if self._unbooked is not None and (self.times.knows_target or self._resting <= 1):
                gain, self._unbooked = self.part * self._gained(*self._unbooked), None
            self._resting, self._unseen = max(0, self._resting - 1), 0
            self.account.book(gain, probe=False, rounds=self.part * (1 + self._skipped))
            self._skipped = 0
            return
        gain = self._gained(drafted, width, kept)
        self._booked += 1
        self._gain += max(GAIN_RATE, 1 / self._booked) * (gain - self._gain)
        self._unseen += 1 + passed
        if not self.times.knows_target and (kept < UNLIKELY or self.times.widening):
            self._resting = RESTING
            self._unbooked = drafted, width, kept  # what it lost is known when the target's time is
            return
        if self.times.several:
            rests = self._unseen >= self._rest_after and self._gain < SMALL_OF_SEVERAL
            self._rest_after = min(UNSEEN, 2 * self._rest_after) if rests else self._rest_after
        else:
            rests = self._unseen >= UNSEEN and self._gain < SMALL
        if rests:
            self._resting = RESTING
        reading = 0.0 if self.account.proven and not self.probing else self.times.catching_up(unread)
        self.account.book(self.part * (gain - reading), probe=self.probing, rounds=self.part)

    def _gained(self, drafted: float, width: float, kept: float) -> float:
        """Passes that a draft saved."""
        return kept - self.times.lost(drafted, width)

    def longest(self, pays: bool, unread: int) -> int:
        """The longest next draft that the account covers, in tokens; 0 for none.

        Args:
            pays: whether it is expected to.
            unread: tokens of the text that it has to read first.
        """
        times, account = self.times, self.account
        self.probing = not pays
        longest = 0
        if not self._resting and (pays or account.probes):
            reading = 0.0 if account.proven and pays else times.catching_up(unread)
            doubt = self.part * trust_after(self.idle)
            longest = account.longest(doubt * (times.lost_entry + reading), doubt * times.lost_step)
            if self._booked < FIRST_DRAFTS:
                longest = min(longest, FIRST_LENGTH)
        lull = LULL if longest else min(LONGEST_LULL, max(LULL, self.idle // 4))
        self.asleep = lull - 1 if self.idle > (LULL_OF_SEVERAL if times.several else LULL) else 0
        return longest
