"""What a request asks of a pair, and what it hears of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from time import monotonic

from specctl.models.running.rules.grammar import Compiled
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round

_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Order:
    """A text that is to be written.

    Attributes:
        prompt: ids, at least one.
        settings: the sampling table in force.
        policy: in place of the profile's, as ``--policy`` writes it; None for that one.
        draft: whether the draft drafts.
    """

    prompt: tuple[int, ...]
    settings: SamplingTable
    policy: str | None = None
    draft: bool = True


@dataclass(frozen=True)
class Wrote:
    """A round of a text.

    Attributes:
        round: as it ended.
        known: how many of its first tokens were heard of already: where memory runs out a text begins again.
    """

    round: Round
    known: int = 0

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Those that are new."""
        return self.round.emitted[self.known :]


@dataclass(frozen=True)
class Ended:
    """A text that has ended.

    Attributes:
        completion: all of it.
        kept: tokens of its prompt that were in the target's caches, and were not read.
        begun: when its first round ended, as `time.monotonic` tells it; None without one.
    """

    completion: Completion
    kept: int = 0
    begun: float | None = None

    @cached_property
    def drafted_and_accepted(self) -> tuple[int, int]:
        """How many tokens were drafted, and how many of them stayed."""
        rounds = self.completion.rounds
        drafted = sum(one.nodes if one.tree else len(one.steps) for one in rounds)
        return drafted, sum(one.accepted for one in rounds)


Event = Wrote | Ended | Exception
"""What is heard of an order: its rounds, if they are wanted, and then its text or why there is none."""


class Ticket:
    """An order on its way.

    Args:
        order: what is asked.
        hear: told what has happened, in order, where requests are answered.
        every: whether it is told each round, or the text alone.

    Attributes:
        number: tells it from all others.
        cancelled: set by whoever does not want the text any more.
        begun: as of `Ended`.
        grammar: what keeps the compiled grammar of the text until that has begun.
    """

    def __init__(
        self, order: Order, hear: Callable[[Sequence[Event]], None] = lambda _: None, *, every: bool = True
    ) -> None:
        self.number = next(_NUMBERS)
        self.order, self.hear, self.every = order, hear, every
        self.cancelled = False
        self.begun: float | None = None
        self.grammar: Compiled | None = None
        self._told: list[int] = []

    @property
    def heard(self) -> int:
        """How many of its tokens were told."""
        return len(self._told)

    def wrote(self, seen: int, round_: Round) -> Wrote | None:
        """What is new of a round; None where the text differs from what was told of it.

        Args:
            seen: tokens of this text before the round.
            round_: as it ended.
        """
        if self.begun is None:
            self.begun = monotonic()
        tokens = round_.emitted
        known = self._told[seen : seen + len(tokens)]
        if tuple(known) != tokens[: len(known)]:
            return None
        self._told += tokens[len(known) :]
        return Wrote(round_, len(known))


Told = Sequence[tuple[Ticket, Event]]
"""What happened in a round, in order."""
