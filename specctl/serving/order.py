"""What a request asks of a pair, and what it hears of it."""

from dataclasses import dataclass
from itertools import count

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


@dataclass(frozen=True, slots=True)
class Wrote:
    """A round of a text.

    Attributes:
        round: as it ended.
        known: how many of its first tokens were heard of already: where memory runs out a text begins again.
    """

    round: Round
    known: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those that are new."""
        return self.round.emitted[self.known :]


Event = Wrote | Completion | Exception
"""What is heard of an order: its rounds, and then its text or why there is none."""


class Ticket:
    """An order on its way.

    Attributes:
        number: tells it from all others.
        order: what is asked.
        every: whether each of its rounds is told, or the first one alone.
        cancelled: set by whoever does not want the text any more.
        heard: how many of its tokens were told.
    """

    def __init__(self, order: Order, *, every: bool = True) -> None:
        self.number = next(_NUMBERS)
        self.order, self.every = order, every
        self.cancelled = False
        self._told: list[int] = []

    @property
    def heard(self) -> int:
        return len(self._told)

    def hear(self, seen: int, round_: Round) -> Wrote | None:
        """What is new of a round; None where the text differs from what was told of it.

        Args:
            seen: tokens of this text before the round.
            round_: as it ended.
        """
        tokens = round_.emitted
        known = self._told[seen : seen + len(tokens)]
        if tuple(known) != tokens[: len(known)]:
            return None
        self._told += tokens[len(known) :]
        return Wrote(round_, len(known))
