"""SGLang: one of a few lengths, by a fading mean of how many draft tokens were accepted."""

from dataclasses import dataclass, field

from specctl.policies.base import Rule
from specctl.records import Round

SHARE = 0.2
"""Of the newest round in the mean."""
FIRST, EVERY = 10, 5
"""Rounds before the first decision, and between two."""
DOWN = -0.25
"""Added to what the mean must fall to for a shorter length."""


@dataclass(slots=True, kw_only=True)
class SteppedLength(Rule):
    """SGLang's ``--speculative-adaptive`` (sglang/srt/speculative/adaptive_spec_params.py, 0.5.23), for one text.

    Between two ``lengths`` the mean of accepted tokens decides: above the shorter one less a half the longer one is
    taken, at or below that less a quarter the shorter one. The mean begins at the first length less one.
    """

    lengths: tuple[int, ...] = (1, 3, 5, 7)
    first: int = 3
    _at: int = field(init=False, default=0)
    _mean: float = field(init=False, default=0.0)
    _rounds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._at, self._mean = self.lengths.index(self.first), self.first - 1.0

    def draft_limit(self) -> int:
        return self.lengths[self._at]

    def observe(self, round_: Round) -> None:
        self._mean += SHARE * (round_.accepted - self._mean)
        self._rounds += 1
        if self._rounds > FIRST and not (self._rounds - FIRST) % EVERY:
            self._decide()

    def _decide(self) -> None:
        lengths, start = self.lengths, self._at
        while self._at and self._mean <= lengths[self._at - 1] - 0.5 + DOWN:
            self._at -= 1
        if self._at == start:
            while self._at < len(lengths) - 1 and self._mean > lengths[self._at] - 0.5:
                self._at += 1
