"""Percentile bootstrap intervals over prompts."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 20240531
CONFIDENCE = 0.95
FEW = 10
"""From fewer prompts than this, a bootstrap interval is too narrow: few resamples differ."""
_CHUNK = 4_000_000
"""How many resampling weights may be in memory at once."""

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A value and its 95% bootstrap interval.

    Attributes:
        value: from all prompts.
        low, high: the bounds; None for fewer than two prompts.
        prompts: how many prompts it is from; None for what is no estimate, such as a speed over itself.
    """

    value: float
    low: float | None = None
    high: float | None = None
    prompts: int | None = None

    @property
    def doubt(self) -> str:
        """Why the bounds cannot be trusted, in words; empty where nothing speaks against them."""
        if self.prompts is not None and self.prompts < FEW:
            return f"only {self.prompts} prompt{'s' * (self.prompts != 1)}"
        if self.low is not None and self.low == self.high and self.value != 1:
            return "an interval of no width tells nothing"
        return ""


def is_clear(ratio: Interval) -> bool:
    """Whether a ratio has an interval, and 1 is outside."""
    return ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def bootstrap(statistic: Callable[[Floats], Floats], prompts: int, resamples: int = RESAMPLES) -> Interval:
    """Percentile interval of a statistic under resampling of prompts; the same prompts are drawn at every call.

    Args:
        statistic: from weights (R, prompts), how often each prompt was drawn, to values (R,).
        prompts: at least 1.
        resamples: number of resamples.
    """
    value = float(statistic(np.ones((1, prompts)))[0])
    if prompts < 2:
        return Interval(value, prompts=prompts)
    generator = np.random.default_rng(SEED)
    even = np.full(prompts, 1 / prompts)
    chunk = max(1, _CHUNK // prompts)
    values = [
        statistic(generator.multinomial(prompts, even, size=min(chunk, resamples - start)).astype(np.float64))
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(values), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high), prompts)
