"""Replays several texts at once: their rounds share passes, whose times a cost table says. No torch here."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from specctl.batching.decisions import Decisions
from specctl.batching.hub import Hub
from specctl.decoding.copying.chaining import Chaining
from specctl.policies import Setting, Signal, StoppingPolicy
from specctl.replay.costs import CostTable, Replay, signal_key
from specctl.replay.play import Player, replay_levels
from specctl.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class PassShare:
    """What a text needs of a pass.

    Attributes:
        context: tokens that are cached before it.
        drafted: of a verification, how many draft tokens are read besides the newest token.
        unread: of a draft's pass, how many tokens of the text it has to read first.
    """

    context: int
    drafted: int = 0
    unread: int = 0

    @property
    def size(self) -> float:
        return self.drafted + 1


EVERY = 32
"""Contexts between which prices of passes do not change."""


@dataclass(slots=True)
class BatchPrices:
    """Milliseconds of passes over several texts, from the tables of `CostTable.batches`."""

    costs: CostTable
    _known: dict[tuple[int, int, int], tuple[float, float, float]] = field(default_factory=dict)

    def of(self, rows: int, context: int, drafted: int) -> tuple[float, float, float]:
        """Of a draft pass that writes a token in each of so many rows, of one that verifies ``drafted`` tokens in all
        and the newest one of each row, and of a round outside of passes."""
        place = rows, context // EVERY, drafted
        if place not in self._known:
            middle = (context // EVERY + 0.5) * EVERY
            tables = sorted({1: self.costs, **self.costs.batches}.items())
            counts, beyond = [count for count, _ in tables], max(1.0, rows / tables[-1][0])
            steps = [table.at(middle)[0] for _, table in tables]
            passes = [table.verifying(middle, drafted / rows) for _, table in tables]
            rest = [table.overhead_ms for _, table in tables]
            draft, verify, outside = (beyond * float(np.interp(rows, counts, ms)) for ms in (steps, passes, rest))
            self._known[place] = draft, verify, outside
        return self._known[place]

    def reading(self, rows: int, signals: Set[Signal]) -> float:
        """What reading signals adds to a draft pass over so many rows."""
        key = signal_key(signals)
        known = {1: self.costs.signal_ms.get(key, 0.0)}
        known |= {count: table.signal_ms[key] for count, table in self.costs.batches.items() if key in table.signal_ms}
        return rows * float(np.interp(rows, sorted(known), [known[count] for count in sorted(known)]))


@dataclass(slots=True)
class VirtualPasses:
    """Passes that take no time, and tell each text the seconds of its share of what they would take, by its tokens.

    Attributes:
        prices: of passes.
        signals: read of each drafted token.
        verifies: whether they read drafts, or write a token in each row.
        count, seconds: passes so far, and what they took.
    """

    prices: BatchPrices
    signals: Set[Signal]
    verifies: bool
    count: int = 0
    seconds: float = 0.0

    def run(self, requests: Sequence[PassShare]) -> list[float]:
        rows = len(requests)
        context = sum(request.context for request in requests) // rows
        draft, verify, rest = self.prices.of(rows, context, sum(request.drafted for request in requests))
        if self.verifies:
            taken = verify
            self.seconds += rest / 1e3  # which no policy is told of
        else:
            taken = draft + self.prices.reading(rows, self.signals)
            taken += self.prices.costs.catching_up(max(request.unread for request in requests))
        self.count += 1
        self.seconds += taken / 1e3
        each = taken / 1e3 / sum(request.size for request in requests)
        return [each * request.size for request in requests]


@dataclass(slots=True)
class BatchReplay:
    """Texts that were replayed together.

    Attributes:
        replays: of the texts, in the order in which they ended.
        shares: of each, what it took of the seconds.
        seconds: of all passes, and of rounds outside of them.
        draft_passes, verifications: how many.
    """

    replays: list[Replay] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    seconds: float = 0.0
    draft_passes: int = 0
    verifications: int = 0

    @property
    def tokens(self) -> int:
        return sum(replay.tokens for replay in self.replays)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


Played = tuple[Replay, float]
"""A text's rounds, and the seconds of its shares of passes."""


@dataclass(slots=True)
class _Text:
    """The passes of one text, as its rounds wait for them, and its shares of them."""

    hub: Hub[Played]
    drafting: VirtualPasses
    verifying: VirtualPasses
    seconds: float = 0.0

    def draft(self, context: int, unread: int) -> float:
        return self._wait(self.drafting, PassShare(context, unread=unread))

    def verify(self, context: int, drafted: int) -> float:
        return self._wait(self.verifying, PassShare(context, drafted))

    def _wait(self, passes: VirtualPasses, share: PassShare) -> float:
        seconds = self.hub.asker(passes)(share)
        self.seconds += seconds
        return seconds


def replay_together(
    setting: Setting, traces: Iterable[Trace], rows: int, costs: CostTable, eos: Set[int], *, jointly: bool = True
) -> BatchReplay:
    """Replay a setting on texts of which so many are written at once, as `RowReplicas` would: who ends makes room.

    Rounds are those of `play`, and what waits for what is what waits live, for the hub is the same. Prompts take no
    time, as in `CostTable.milliseconds`.

    Args:
        setting: of one draft, or of its chain with a lookup.
        traces: the texts, in the order in which they are begun.
        rows: how many at once, at least 1.
        costs: with `CostTable.batches` for numbers of rows from 2 on.
        eos: ids that end a text.
        jointly: whether a policy that can decide for several rows together does.
    """
    prices = BatchPrices(costs)
    drafting, verifying = (VirtualPasses(prices, setting.signals, verifies) for verifies in (False, True))
    decisions = Decisions()
    hub: Hub[Played] = Hub([drafting, decisions, verifying], decisions.begin)
    ask = hub.asker(decisions)
    jointly = jointly and rows > 1
    policies = [decisions.policy(setting, number, ask) if jointly else setting.build() for number in range(rows)]
    chains = [Chaining(setting.earlier) if setting.lookup else None for _ in range(rows)]
    waiting, batch = iter(traces), BatchReplay()

    def played(policy: StoppingPolicy, chaining: Chaining | None, trace: Trace) -> Played:
        text = _Text(hub, drafting, verifying)
        return replay_levels([Player(policy, passes=text, chaining=chaining)], [trace], eos)[0], text.seconds

    trace = next(waiting, None)
    while trace is not None or hub.busy:
        for free in range(rows) if trace is not None else ():
            if trace is not None and free not in hub.busy:
                hub.begin(free, partial(played, policies[free], chains[free], trace))
                trace = next(waiting, None)
        for _, (replay, seconds) in hub.advance():
            batch.replays.append(replay)
            batch.shares.append(seconds)
    batch.seconds = drafting.seconds + verifying.seconds
    whole = batch.seconds / (sum(batch.shares) or 1.0)  # what is outside of passes is shared as they are
    batch.shares = [share * whole for share in batch.shares]
    batch.draft_passes, batch.verifications = drafting.count, verifying.count
    return batch
