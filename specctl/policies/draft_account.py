"""What drafts may cost: what they have saved so far, and a small share of the time."""

from dataclasses import dataclass

SHARE = 0.01
"""Of the time, what may be lost by drafts for good."""
ALLOWANCE, ADVANCE = 1.9, 1.0
"""The balance of a new run, in passes: what its first drafts may lose; and how much of it are shares of rounds to come,
which add nothing until it is made up for."""
SCANTY = 0.5
"""The balance up to which drafts have one token, where their beginning costs no more than that."""
EVEN = 0.5
"""What a draft of one token may lose where it is tried: as likely accepted as not, it saves as much."""
MOST = 20.0
"""The largest balance: a text that is of another kind than those before loses no more than that."""
MOST_TOKENS = 1 << 10
"""More than any draft has."""
RISK = 1 / 3
"""The part of the balance that one draft of more than two tokens may lose."""
PROVEN = 5.0
"""The balance from which on the draft reads a whole prompt without asking what that costs."""
IMPATIENCE, PATIENCE = 1.5, 4.0
"""By how much the waiting grows with each probe that failed, and how often 1 / SHARE times the loss it is at most."""


@dataclass(slots=True)
class DraftAccount:
    """Keeps decoding with a draft about as fast as without one, whatever the draft.

    What a round saved or lost is booked in target passes of a single token, the rounds of decoding without a draft: the
    tokens that the draft brought, minus what it took, minus by how much the pass was longer. Every round adds SHARE of
    a pass, and drafts are made while the balance covers what they lose if nothing of them is accepted. A new run has
    the shares of its first ADVANCE / SHARE rounds from the beginning, when there is most to find out. So over T passes
    drafts lose at most ALLOWANCE, or SHARE T + ALLOWANCE - ADVANCE if that is more, for whatever they lose beyond that
    they have saved before. This is the constraint of conservative bandits (Wu et al. 2016, arXiv 1602.04282): at any
    time the reward is at least 1 - SHARE times that of the default action, here the target alone.

    A draft that is not expected to pay is a probe. Probes go on as long as they save, and after some that lost x passes
    in all the next one comes after x / SHARE further rounds or more, up to PATIENCE times as many if several failed in
    a row. So probes alone take at most SHARE of the time, and less where none has been of use for long.

    Attributes:
        balance: in passes.
    """

    balance: float = ALLOWANCE
    _owed: float = ADVANCE
    _found: float = 0.0  # what the probes since the last waiting saved
    _wait: float = 0.0  # rounds until the next probe
    _patience: float = 1.0

    @property
    def probes(self) -> bool:
        """Whether a draft may be made that is not expected to pay."""
        return self._wait <= 0

    @property
    def proven(self) -> bool:
        return self.balance >= PROVEN

    def longest(self, entry: float, step: float) -> int:
        """The longest draft that the balance covers, in tokens; 0 for none.

        Args:
            entry: what a draft may lose whatever its length, in passes.
            step: what each token may lose besides.
        """
        # A token alone hardly makes up for a beginning that costs more.
        least = 1 if entry <= step or entry + step <= EVEN else 2
        if self.balance < entry + least * step:
            return 0
        if least == 1 and (self.balance <= SCANTY or self.balance < entry + 2 * step):
            return 1
        spare = RISK * self.balance - entry
        return MOST_TOKENS if spare > step * MOST_TOKENS else max(2, int(spare / step))

    def book(self, gain: float, *, probe: bool, rounds: float = 1) -> None:
        """A round is over, or several without a draft.

        Args:
            gain: what its draft saved, or below 0 lost; 0 without one.
            probe: whether it was a draft that was not expected to pay.
            rounds: how many.
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
