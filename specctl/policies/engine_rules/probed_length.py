"""onnxruntime-genai: a length that is raised or lowered by one where that is about as fast."""

from dataclasses import dataclass, field

from specctl.policies.base import Rule
from specctl.records import Round

LONGEST = 16
MEMORY = 0.75
"""Factor on the mean of a length's earlier rounds when one ends."""
HIGH, LOW = 0.75, 0.5
"""Acceptance from which on a longer draft is tried, and below which a shorter one is."""
AS_FAST, FAR_SLOWER = 0.97, 0.8
"""What a tried length must reach of the earlier one's speed to stay, and below what it is given up at once."""
TRIED = 2
"""Rounds of a length before anything is decided."""
AFTER_SUCCESS, AFTER_FAILURE = 1, 6
"""Rounds until the next try."""
IN_VAIN = 3
"""Rounds in a row without an accepted token after which ``cooldown`` drafts nothing once."""


@dataclass(slots=True)
class _Means:
    """Fading means over the rounds of one length: emitted tokens, seconds, and acceptance."""

    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    acceptance: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def learn(self, tokens: float, seconds: float, acceptance: float) -> None:
        share = 1 - MEMORY if self.rounds else 1.0
        self.rounds += 1
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)
        self.acceptance += share * (acceptance - self.acceptance)


@dataclass(slots=True, kw_only=True)
class ProbedLength(Rule):
    """onnxruntime-genai's ``min_adaptive_k`` and ``cooldown`` (src/speculative_decoding_strategy.h, a0c04eb).

    Drafts begin with ``least`` tokens, and have at most ``max_draft``. Acceptance is accepted over judged tokens: those
    after a rejection do not count. Where it is high, one token more is tried for two rounds, where it is low, one less,
    and what is as fast stays. Times are those of the passes that propose and verify; the draft's own first token of a
    round is already there.
    """

    least: int = 2
    max_draft: int = LONGEST
    cooldown: bool = False
    _length: int = field(init=False, default=0)
    _known: dict[int, _Means] = field(init=False, default_factory=dict)
    _before: int | None = field(init=False, default=None)  # the length from which another one is tried
    _rounds: int = field(init=False, default=0)  # since the last decision
    _waits: int = field(init=False, default=0)
    _in_vain: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._length, self._known, self._before = self.least, {}, None
        self._rounds = self._waits = self._in_vain = 0

    def draft_limit(self) -> int:
        return 0 if self._in_vain == IN_VAIN else self._length

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            self._in_vain = 0
            return
        if self.cooldown:
            vain = not round_.accepted and round_.drafted == self.least
            self._in_vain = self._in_vain + 1 if vain else 0
        if round_.drafted == self._length:  # a shorter one was cut by the end of the text
            judged = min(round_.accepted + 1, round_.drafted)
            proposing = round_.draft_seconds * (1 - 1 / round_.drafted)
            known = self._known.setdefault(self._length, _Means())
            known.learn(len(round_.emitted), proposing + round_.verify_seconds, round_.accepted / judged)
            self._rounds += 1
            self._judge(known) if self._before is not None else self._try(known)

    def _judge(self, known: _Means) -> None:
        """Whether the tried length stays."""
        assert self._before is not None
        earlier = self._known[self._before].speed
        if known.speed < FAR_SLOWER * earlier:
            self._settle(stays=False)
        elif self._rounds == TRIED:
            longer = self._length > self._before
            self._settle(known.speed >= AS_FAST * earlier and not (longer and known.acceptance < HIGH))

    def _settle(self, stays: bool) -> None:
        assert self._before is not None
        self._length = self._length if stays else self._before
        self._waits = AFTER_SUCCESS if stays else AFTER_FAILURE
        self._before, self._rounds = None, 0

    def _try(self, known: _Means) -> None:
        """Try another length if it is time."""
        if self._waits:
            self._waits -= 1
        elif known.rounds < TRIED:
            return
        elif known.acceptance < LOW and self._length > self.least:
            self._before, self._length, self._rounds = self._length, self._length - 1, 0
        elif known.acceptance >= HIGH and self._length < self.max_draft and self._rounds >= TRIED:
            self._before, self._length, self._rounds = self._length, self._length + 1, 0
