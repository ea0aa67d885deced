"""Made-up costs of forward passes, and a made-up draft that is never right."""

from dataclasses import replace

import numpy as np

from specctl.replay.costs import CostTable
from specctl.replay.traces import Line, Proposals, Trace

RATIOS = (3, 8, 30)
"""Costs of a target pass in draft steps."""
WIDENING = 0.05
"""In a linear regime, what each further token adds to a target pass, as a share of the pass."""


def made_up(ratio: float, widening: float = 0.0) -> CostTable:
    """A draft step of 1 ms, a target pass of ``ratio`` ms, and ``widening`` of that more for each drafted token."""
    lengths = np.array([0.0, 1.0, 64.0])
    return CostTable(np.zeros(1), lengths, lengths[None].copy(), (ratio * (1 + widening * lengths))[None], {}, 0.0)


def regimes() -> dict[str, CostTable]:
    """By name: every ratio with a flat and a linear target pass."""
    shapes = {"flat": 0.0, "linear": WIDENING}
    return {f"1:{ratio} {name}": made_up(ratio, slope) for ratio in RATIOS for name, slope in shapes.items()}


def useless(trace: Trace) -> Trace:
    """The same signals of a draft that is never right; after a refusal it goes on with those it had on the path."""
    count = len(trace.tokens)

    def following(start: int, length: int) -> Proposals:
        places = [place % count for place in range(start, start + length)]
        path = trace.line.path
        return Proposals(
            [path.tokens[place] for place in places],
            [path.entropy[place] for place in places],
            [path.top_prob[place] for place in places],
            [path.token_prob[place] for place in places],
        )

    return replace(
        trace,
        line=Line([False] * count, trace.line.path, {p: following(p + 1, trace.limit) for p in range(count)}),
        chances=None if trace.chances is None else [0.0] * count,
    )
