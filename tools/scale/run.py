"""A run of many replicas, record by record: start, stragglers, failures, and what one command can keep up with."""

import heapq
import random
from collections import deque
from dataclasses import dataclass
from math import log

REPLACED = -1
"""In place of a record: a replica is there again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run and the machines that it is on. Times are seconds, sizes bytes.

    Attributes:
        records: how many.
        tokens: mean number of tokens of a record; lengths are geometric, cut at ``longest``.
        longest: the most tokens of a record.
        replicas: how many pairs answer at once.
        cards: of a replica.
        per_second: tokens a second of a replica.
        prompt: reading a record's prompt.
        window: how many records may be begun from the first unfinished one on, for each replica.
        command: what the one command that hands out and writes does for each record, one after the other.
        start: a process's imports and its first answer.
        weights: of a replica, read at each start.
        storage: bytes a second of the shared storage, for all that read at once.
        link: bytes a second that a replica can read at most.
        between_failures: a card's mean time between failures that end its process.
        noticed: until a dead replica is replaced; a free machine stands by.
        seed: of lengths and failures.
    """

    records: int = 3_900_000
    tokens: float = 256
    longest: int = 1024
    replicas: int = 64
    cards: int = 1
    per_second: float = 100.0
    prompt: float = 0.1
    window: int = 8
    command: float = 0.0033
    start: float = 20.0
    weights: float = 18.6e9
    storage: float = 10e9
    link: float = 2e9
    between_failures: float = 50_700 * 3600.0
    noticed: float = 2.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run took.

    Attributes:
        seconds: from the start to the last record.
        starting: until the replicas were loaded.
        generated: tokens.
        failures: of replicas.
        repeated: tokens that were generated twice because a replica died.
        held: replica seconds without a record because the window was full, those at the end left out.
        down: replica seconds between a failure and the next record.
        commanding: share of the time after the start that the command was busy.
    """

    seconds: float
    starting: float
    generated: int
    failures: int
    repeated: int
    held: float
    down: float
    commanding: float


def loading(plan: Plan, replicas: int) -> float:
    """Seconds in which so many replicas load at once."""
    return plan.start + max(plan.weights * replicas / plan.storage, plan.weights / plan.link)


def length(plan: Plan, draw: random.Random) -> int:
    """Tokens of a record."""
    return min(plan.longest, 1 + int(log(1 - draw.random()) / log(1 - 1 / plan.tokens)))


def simulated(plan: Plan) -> Outcome:
    """Play a run.

    A replica takes the next record as soon as it has handed back its last one, if the window allows that; the command
    takes a moment for each. A replica that fails loses its record, which the next free one repeats.
    """
    draw = random.Random(plan.seed)
    now = starting = loading(plan, plan.replicas)
    rate = plan.cards / plan.between_failures
    again: deque[tuple[int, int]] = deque()  # record and length
    following = first = 0  # the next record to begin, and the first that is not finished
    done: set[int] = set()
    idle = [(now, replica) for replica in range(plan.replicas)]  # since when
    events: list[tuple[float, int, int, int, bool]] = []  # when, replica, record, length, whether it failed
    free_at, busy = now, 0.0  # the command
    generated = failures = repeated = 0
    held = down = 0.0
    room = plan.window * plan.replicas

    def begun(replica: int, at: float) -> bool:
        """Whether there is a record to begin."""
        nonlocal following
        if again:
            record, tokens = again.popleft()
        elif following < plan.records and following < first + room:
            record, tokens = following, length(plan, draw)
            following += 1
        else:
            return False
        takes = plan.prompt + tokens / plan.per_second
        failing = draw.expovariate(rate) if rate else float("inf")
        heapq.heappush(events, (at + min(takes, failing), replica, record, tokens, failing < takes))
        return True

    while first < plan.records:
        waiting = []
        for since, replica in idle:
            if begun(replica, max(now, since)):
                held += max(0.0, now - since)
            else:
                waiting.append((since, replica))
        idle = waiting
        now, replica, record, tokens, failed = heapq.heappop(events)
        if record == REPLACED:
            idle.append((now, replica))
        elif failed:
            failures += 1
            repeated += tokens // 2  # half of them, on average, were written
            again.append((record, tokens))
            back = plan.noticed + loading(plan, 1)
            down += back
            heapq.heappush(events, (now + back, replica, REPLACED, 0, False))
        else:
            free_at = max(free_at, now) + plan.command
            busy += plan.command
            generated += tokens
            done.add(record)
            while first in done:
                done.remove(first)
                first += 1
            idle.append((free_at, replica))
    end = max(now, free_at)
    return Outcome(end, starting, generated, failures, repeated, held, down, busy / (end - starting))
