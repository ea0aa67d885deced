"""The budget for drafts: their savings so far, and a small share of the time."""

from dataclasses import dataclass, field

from specctl.policies.round_times import RoundTimes

SHARE = 0.01  # Share of the time that drafts may lose for good
ALLOWANCE, ADVANCE = 1.9, 1.0
"""The balance of a new run in passes, which its first drafts may lose; and how much of it is an advance on the shares
of later rounds. These add nothing until the advance is repaid.
"""
SCANTY = 0.5  # Up to this balance, a draft has one token, if its fixed cost is small enough for that
EVEN = 0.5  # What a one-token draft may lose as a trial: accepted half of the time, it saves as much
MOST = 20.0  # The largest balance, and so the most that a text of a new kind can lose
MOST_TOKENS = 1 << 10  # More than any draft has
RISK = 1 / 3  # The part of the balance that one draft of more than two tokens may lose
PROVEN = 5.0  # From this balance on, the draft reads a whole prompt whatever that costs
IMPATIENCE, PATIENCE = 1.5, 4.0
"""The factor by which the wait grows with each failed probe, and its upper bound, as a multiple of the loss / SHARE."""


@dataclass(slots=True)
class DraftAccount:
    """Keeps decoding with a draft about as fast as without one, however bad the draft.

    Savings and losses are booked in target passes over a single token, the rounds of decoding without a draft. A round
    saves its accepted draft tokens, minus the time of drafting, minus the additional time of the wider pass. Every
    round adds SHARE of a pass. Drafts are made while the balance covers their loss if no token is accepted. A new run
    starts with the shares of its first ADVANCE / SHARE rounds, since at the start there is most to find out. So over T
    passes drafts lose at most ALLOWANCE, or SHARE T + ALLOWANCE - ADVANCE if that is more, beyond their earlier
    savings. This is the constraint of conservative bandits (Wu et al. 2016, arXiv 1602.04282): at any time the reward
    is at least 1 - SHARE times that of the default action, here the target alone.

    A draft that is not expected to pay is a probe. Probes go on while they save. After probes that lost x passes in
    total, the next one comes after x / SHARE rounds, or up to PATIENCE times as many if several failed in a row. So
    probes alone take at most SHARE of the time, and less where none has helped for long.
    """

    balance: float = ALLOWANCE  # in target passes
    _owed: float = ADVANCE
    _found: float = 0.0  # savings of the probes since the last wait
    _wait: float = 0.0  # rounds until the next probe
    _patience: float = 1.0

    @property
    def probes(self) -> bool:
        """Whether a draft that is not expected to pay may be made."""
        return self._wait <= 0

    @property
    def proven(self) -> bool:
        return self.balance >= PROVEN

    def longest(self, entry: float, step: float) -> int:
        """The longest draft that the balance covers, in tokens; 0 for none.

        Args:
            entry: the fixed loss of a draft, in passes.
            step: the additional loss for each token.
        """
        # One token rarely makes up for a fixed cost above its own.
        least = 1 if entry <= step or entry + step <= EVEN else 2
        if self.balance < entry + least * step:
            return 0
        if least == 1 and (self.balance <= SCANTY or self.balance < entry + 2 * step):
            return 1
        spare = RISK * self.balance - entry
        if spare <= 2 * step:  # a lookup's step may take no measurable time
            return 2
        return MOST_TOKENS if spare > step * MOST_TOKENS else int(spare / step)

    def book(self, gain: float, *, probe: bool, rounds: float = 1) -> None:
        """Book a round, or several rounds without a draft.

        Args:
            gain: what the draft saved; negative for a loss, 0 without a draft.
            probe: whether the draft was not expected to pay.
            rounds: the number of rounds.
        """
        share = SHARE * rounds
        if self._owed:
            kept, self._owed = max(0.0, share - self._owed), max(0.0, self._owed - share)
            share = kept
        self.balance = min(MOST, self.balance + share + gain)
        if not probe:
            self._wait -= rounds
            return
        self._found += gain
        if self._found > 0:
            self._patience = 1.0
            return
        self._wait = -self._found * self._patience / SHARE
        self._patience = min(PATIENCE, IMPATIENCE * self._patience)
        self._found = 0.0


DOUBTED = 100
"""The half-life, in rounds without a draft, of the trust in a draft's price: it may have been measured at a bad moment.
"""
LULL, LONGEST_LULL, LULL_OF_SEVERAL = 8, 64, 2
"""After more than LULL rounds without a draft (LULL_OF_SEVERAL for several texts), only one round in LULL is looked at.
Once a quarter of the rounds without a draft is more than LULL, it is one round in that quarter, and never fewer than
one in LONGEST_LULL. The rounds between cost nothing.
"""
UNSEEN, RESTING, SMALL, GAIN_RATE = 300, 2, 0.2, 0.02
"""After UNSEEN rounds with drafts that save less than SMALL of a pass each, RESTING rounds go without, so that the time
of the target alone stays known, and after a first draft that brings nothing, or of several texts; the weight of one
draft in what they save.
"""
UNSEEN_AT_FIRST, SMALL_OF_SEVERAL = 16, 0.25
"""Of several texts: the first time after this many rounds, then after twice as many, up to UNSEEN; and SMALL. What a
pass over them takes follows from the lengths of all. A draft that saves as little as the error is found out soon."""
SETTLED, EVERY = 64, 8
"""Once SETTLED drafts have been timed, and while drafts have saved much, one round of EVERY is learned from: code right
after a target pass runs from cold caches, and takes three times as long.
"""
FIRST_LENGTH, FIRST_DRAFTS = 2, 2
"""The most tokens in each of a run's first FIRST_DRAFTS drafts. A rejected draft of four would take most of what a run
may lose, before the draft's worth is known.
"""
UNLIKELY = 0.5  # Below this expected number of accepted tokens, a first draft counts as a failure


def trust_after(idle: int) -> float:
    """The trust in the price of a draft after this many rounds without one, falling from 1 to 0."""
    return float(0.5 ** (idle / DOUBTED))


@dataclass(slots=True)
class DraftAllowance:
    """Books the savings of drafts in a `DraftAccount`, at the prices of `RoundTimes`, and limits the next draft."""

    times: RoundTimes  # the times of rounds
    account: DraftAccount  # pays for drafts
    probing: bool = True  # whether the next draft is not expected to pay
    idle: int = 0  # rounds since the last draft
    asleep: int = 0  # how many coming rounds without a draft may be skipped
    part: float = 1.0  # the round's number of texts, as a share of the largest number so far
    passed: int = 0  # rounds with drafts passed over since the last booked one
    _passed_gain: float = 0.0
    _skipped: int = 0
    _resting: int = 0
    _unseen: int = 0
    _rest_after: int = UNSEEN_AT_FIRST
    _booked: int = 0
    _gain: float = 0.0
    _unbooked: tuple[float, float, float] | None = field(default=None)

    def doze(self, rounds: int = 1) -> None:
        """Count rounds that were not looked at."""
        self.asleep -= rounds
        self.idle += rounds
        self._skipped += rounds

    @property
    def every(self) -> int:
        """N, to learn from one drafted round in N. N is above 1 where drafts are expected to pay and have saved enough
        that a few may fail unnoticed.
        """
        routine = self.account.proven and not (self.probing or self.idle or self._resting)
        return EVERY if routine and self.times.timed >= SETTLED else 1

    def pass_over(self, drafted: float, width: float, accepted: float) -> None:
        """Note the savings of a draft in a round that is not learned from otherwise; as `book`.

        Each round counts by itself, since a long draft that is fully rejected loses more than several others save.
        """
        self.passed += 1
        self._passed_gain += self._gained(drafted, width, accepted)

    def book(self, drafted: float, width: float, accepted: float, unread: int) -> None:
        """Book the savings of a round's draft, and of the rounds passed over before it.

        Args:
            drafted: its number of tokens, 0 for none.
            width: see `RoundTimes`.
            accepted: the number of accepted tokens, in expectation over the verdict where that is known.
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
        gain = self._gained(drafted, width, accepted)
        self._booked += 1
        self._gain += max(GAIN_RATE, 1 / self._booked) * (gain - self._gain)
        self._unseen += 1 + passed
        if not self.times.knows_target and (accepted < UNLIKELY or self.times.widening):
            self._resting = RESTING
            self._unbooked = drafted, width, accepted  # its loss is known once the target's time is
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

    def _gained(self, drafted: float, width: float, accepted: float) -> float:
        """The passes that a draft saved."""
        return accepted - self.times.lost(drafted, width)

    def longest(self, pays: bool, unread: int) -> int:
        """The longest next draft that the account covers, in tokens; 0 for none.

        Args:
            pays: whether the draft is expected to pay.
            unread: the number of tokens of the text that the draft has to read first.
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
            elif not times.several:  # what wider passes take is not known far beyond the widest one
                longest = min(longest, 2 * max(FIRST_LENGTH, times.longest) + 1)
        lull = LULL if longest else min(LONGEST_LULL, max(LULL, self.idle // 4))
        self.asleep = lull - 1 if self.idle > (LULL_OF_SEVERAL if times.several else LULL) else 0
        return longest
