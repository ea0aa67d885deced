"""Replayed rounds as columns. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from specctl.records import Round, RoundSummary
from specctl.replay.traces import Trace


@dataclass(slots=True)
class Level:
    """The rounds of one level on one sequence, as columns of equal length.

    Attributes:
        starts: generated tokens before each round; for an inner round, the tokens collected in the block so far count
            too.
        drafted, accepted: tokens of each round.
        copied: how many of the drafted tokens were copied, if any were; else empty.
    """

    starts: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """The replayed rounds of a sequence, as columns of equal length.

    Attributes:
        trace: the sequence.
        starts: tokens generated before each round.
        drafted, accepted: tokens of each round.
        inner: the levels below the first, from the top down.
        copied: as of `Level`.
    """

    trace: Trace
    starts: list[int]
    drafted: list[int]
    accepted: list[int]
    inner: tuple[Level, ...] = ()
    copied: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.trace.tokens)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The rounds of every level, from the top down."""
        return (Level(self.starts, self.drafted, self.accepted, copied=self.copied), *self.inner)


def columns(rounds: Iterable[Round | RoundSummary], least: int = 1) -> list[Level]:
    """The rounds of a sequence by level, from the top down; at least ``least`` levels, some of them perhaps empty."""
    levels = [Level() for _ in range(least)]
    rounds = list(rounds)
    _note(rounds, 0, 0, levels)
    if any(round_.copied for round_ in rounds):
        levels[0].copied.extend(round_.copied for round_ in rounds)
    return levels


def _note(rounds: Iterable[Round | RoundSummary], start: int, depth: int, levels: list[Level]) -> None:
    if depth == len(levels):
        levels.append(Level())
    level = levels[depth]
    for round_ in rounds:
        level.starts.append(start)
        level.drafted.append(round_.drafted)
        level.accepted.append(round_.accepted)
        if round_.inner:
            _note(round_.inner, start, depth + 1, levels)
        start += round_.accepted + 1  # only the last round may lack the verifier's own token
