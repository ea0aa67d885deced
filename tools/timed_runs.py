"""Runs of an engine with several settings: what its passes cost by them, and which setting is the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specctl.export.engines import ENGINES
from specctl.export.exports import GivenCosts
from specctl.statistics import Floats, Interval, bootstrap


@dataclass(frozen=True, slots=True)
class Timed:
    """Runs of S settings on P prompts, each array ``(S, P)``: times are the shortest of the repeats.

    Attributes:
        labels: S of them.
        ms: milliseconds, the prompt's time included.
        tokens, passes, drafted: generated tokens, target passes and draft tokens.
        prompt_tokens: ``(P,)``.
    """

    labels: list[str]
    ms: Floats
    tokens: Floats
    passes: Floats
    drafted: Floats
    prompt_tokens: Floats

    def of(self, rows: Sequence[int]) -> "Timed":
        """Those of some settings."""
        columns = (self.ms, self.tokens, self.passes, self.drafted)
        ms, tokens, passes, drafted = (one[list(rows)] for one in columns)
        return Timed([self.labels[row] for row in rows], ms, tokens, passes, drafted, self.prompt_tokens)


def fit(runs: Timed) -> tuple[GivenCosts, float]:
    """Milliseconds of a draft token, of a target pass with and without a draft and of a prompt's token, least squares.

    Returns:
        The costs, and the root mean square of the residuals over the mean of the times.
    """
    prompt = np.broadcast_to(runs.prompt_tokens, runs.ms.shape)
    drafting = np.broadcast_to(runs.drafted.sum(1, keepdims=True) > 0, runs.ms.shape)
    parts = [runs.drafted, runs.passes * drafting, prompt]
    if not drafting.all():
        parts.append(runs.passes * ~drafting)
    columns = np.stack([part.ravel() for part in parts], axis=1)  # (S P, 3 or 4)
    found, *_ = np.linalg.lstsq(columns, runs.ms.ravel(), rcond=None)
    residuals = runs.ms.ravel() - columns @ found
    draft, target, _, *alone = map(float, found)
    off = float(np.sqrt((residuals**2).mean()) / runs.ms.mean())
    return GivenCosts(draft, target, 0.0, *(alone or [target])), off


def flag_of(costs: GivenCosts, engine: str) -> str:
    """``--costs`` with these, without the passes that the replay adds for this engine."""
    target = costs.target - ENGINES[engine].further_passes * costs.draft
    alone = "" if costs.alone == costs.target else f",0,{costs.alone:.4g}"
    return f"--costs {costs.draft:.4g},{target:.4g}{alone}"


def compared(runs: Timed, exported: str) -> tuple[str, Interval]:
    """The fastest of the grid, and how fast the exported setting is in relation to it, with an interval."""
    totals = {label: runs.ms[row].sum() for row, label in enumerate(runs.labels)}
    best = min(totals, key=lambda label: totals[label])
    own, other = runs.ms[runs.labels.index(exported)], runs.ms[runs.labels.index(best)]

    def ratio(weights: Floats) -> Floats:
        ratios: Floats = (weights @ other) / (weights @ own)
        return ratios

    return best, bootstrap(ratio, len(own))
