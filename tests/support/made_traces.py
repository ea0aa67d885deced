"""Traces and costs made by hand, for tests of replay and of the choice that is made with it."""

import random

import numpy as np

from specctl.replay.costs import CostTable, signal_key
from specctl.replay.trace_files import TraceHeader, TraceSet
from specctl.replay.traces import DraftSteps, Trace, recorded_by_place

LENGTH = 60
SIGNALS = {"entropy", "top_prob", "token_prob"}
ALL_SIGNALS = {*SIGNALS, "accept_prob"}


def flat_costs(draft: float, target: float, *, per_token: float = 0.0, rest: float = 0.0) -> CostTable:
    lengths = np.array([0.0, 1.0, 40.0])
    return CostTable(
        np.array([10.0, 100.0]),
        lengths,
        np.tile(draft * lengths, (2, 1)),
        np.tile(target + per_token * lengths, (2, 1)),
        {signal_key(signals): 0.0 for signals in (frozenset({"entropy"}), frozenset({"top_prob"}))},
        rest,
    )


def trace(prompt: str, accepted: list[bool], category: str = "c") -> Trace:
    """Sure where it is right, unsure where it is wrong."""
    entropy = [0.1 if fine else 3.0 for fine in accepted]
    top = [0.95 if fine else 0.3 for fine in accepted]
    tokens = list(range(100, 100 + len(accepted)))
    along = DraftSteps([t if fine else 7 for t, fine in zip(tokens, accepted, strict=True)], entropy, top, top)
    branch = DraftSteps([8] * 40, [3.0] * 40, [0.3] * 40, [0.3] * 40)
    branches = {position: branch for position, fine in enumerate(accepted) if not fine}
    return Trace(prompt, category, 0, 20, len(accepted), tokens, recorded_by_place(accepted, along, branches), 1.0)


def traces(every: int, prompts: int = 12) -> TraceSet:
    """The draft is wrong at one token in so many, here and there."""
    chance = random.Random(0)
    found = [trace(f"p{n}", [chance.random() * every >= 1 for _ in range(LENGTH)], f"c{n % 2}") for n in range(prompts)]
    return TraceSet(TraceHeader(41, [0], ["entropy"], {}), found)
