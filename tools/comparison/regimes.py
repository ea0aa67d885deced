"""Made-up costs of forward passes, and a made-up draft that is never right."""

from dataclasses import replace

import numpy as np

from specctl.replay.costs import CostTable
from specctl.replay.traces import DraftSteps, Trace, recorded_by_place, recorded_by_start

RATIOS = (3, 8, 30)
"""Costs of a target pass in draft steps."""
WIDENING = 0.05
"""In a linear regime, the cost that each drafted token adds to a target pass, as a share of a pass without any."""


def made_up(ratio: float, widening: float = 0.0) -> CostTable:
    """Costs of 1 ms per draft step and ``ratio * (1 + widening * drafted tokens)`` ms per target pass."""
    lengths = np.array([0.0, 1.0, 64.0])
    return CostTable(np.zeros(1), lengths, lengths[None].copy(), (ratio * (1 + widening * lengths))[None], {}, 0.0)


def regimes() -> dict[str, CostTable]:
    """Costs by name: every ratio, with a flat and with a linear target pass."""
    shapes = {"flat": 0.0, "linear": WIDENING}
    return {f"1:{ratio} {name}": made_up(ratio, slope) for ratio in RATIOS for name, slope in shapes.items()}


def useless(trace: Trace) -> Trace:
    """A trace with the same signals in which every draft token is rejected.

    After a rejected token the draft continues with the tokens and signals along the text.
    """
    draft = trace.draft
    count, along, sampled = len(trace.tokens), draft.along, draft.chances is not None
    if along is None:
        chances = [[0.0] * min(1, len(row)) for row in draft.branches] if sampled else None
        rejected = recorded_by_start(draft.branches, [0] * count, draft.longest, chances)
        return replace(trace, draft=replace(rejected, disco=draft.disco))

    def following(start: int, length: int) -> DraftSteps:
        positions = [position % count for position in range(start, start + length)]
        return DraftSteps(
            [along.tokens[position] for position in positions],
            [along.entropy[position] for position in positions],
            [along.top_prob[position] for position in positions],
            [along.token_prob[position] for position in positions],
        )

    branches = {position: following(position + 1, trace.limit) for position in range(count)}
    unlikely = [0.0] * count if sampled else None
    return replace(trace, draft=recorded_by_place([False] * count, along, branches, unlikely))
