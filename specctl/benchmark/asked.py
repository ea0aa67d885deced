"""Requests to a server that have ended, and what they say together."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specctl.benchmark.latency import Latency, latency
from specctl.files import Content, LineFormat
from specctl.remote.chunks import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHeader:
    """The first line of a file of requests.

    Attributes:
        created: when the run began, in ISO 8601.
        url, model: what was asked.
        concurrency: of the levels.
        suite: name, sha256 of the prompts and their number.
        settings: sent with each request, unless its record says otherwise.
    """

    created: str
    url: str
    model: str
    concurrency: list[int]
    suite: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that has ended; times in milliseconds from when it was sent.

    Attributes:
        concurrency: how many were asked at once.
        prompt, category: of the record.
        turn: of the record, from 0.
        text: that came.
        tokens: of the text: what the server says, else the number of pieces.
        counted: whether pieces were counted, for the server does not say.
        finish_reason: why the text ended.
        arrivals_ms: when pieces with text came.
        end_ms: when it ended.
        prompt_tokens, accepted, rejected: as the server says; None where it does not.
        error: why there is no whole answer, by kind; None where there is one.
        message: the same in words.
    """

    concurrency: int
    prompt: str
    category: str
    turn: int = 0
    text: str = ""
    tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    arrivals_ms: tuple[float, ...] = ()
    end_ms: float = 0.0
    prompt_tokens: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def first_token_ms(self) -> float:
        return self.arrivals_ms[0] if self.arrivals_ms else self.end_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first piece; None where there is no such time."""
        several = self.tokens > 1 and len(self.arrivals_ms) > 1
        return (self.arrivals_ms[-1] - self.arrivals_ms[0]) / (self.tokens - 1) if several else None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_ms))


LOAD = LineFormat(Content.LOAD, LoadHeader, {"request": Asked})
"""A file of requests."""


@dataclass(slots=True)
class Level:
    """What was asked at one concurrency.

    Attributes:
        concurrency: requests at once.
        asked: those that have ended.
        seconds: wall time of all of them.
        drafted: tokens that the server drafted meanwhile, as its metrics say.
    """

    concurrency: int
    asked: list[Asked] = field(default_factory=list)
    seconds: float = 0.0
    drafted: Usage | None = None

    @property
    def answered(self) -> list[Asked]:
        return [one for one in self.asked if one.error is None]

    @property
    def failures(self) -> dict[str, int]:
        """How many requests failed, by kind."""
        kinds = [one.error for one in self.asked if one.error is not None]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.answered)

    @property
    def counted(self) -> bool:
        """Whether tokens are numbers of pieces."""
        return any(one.counted for one in self.answered)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return len(self.answered) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Of drafted tokens, as answers tell, else as the server's metrics do; None where nobody does."""
        told = [(one.accepted, one.rejected or 0) for one in self.answered if one.accepted is not None]
        if not told and self.drafted is not None and self.drafted.accepted is not None:
            told = [(self.drafted.accepted, self.drafted.rejected or 0)]
        accepted, rejected = sum(one for one, _ in told), sum(one for _, one in told)
        return accepted / (accepted + rejected) if accepted + rejected else None

    @property
    def latency(self) -> Latency:
        return latency(self.answered)
