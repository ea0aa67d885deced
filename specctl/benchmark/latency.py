"""How long the tokens of an answer take to arrive, as benchmarks of model servers report it.

A turn is a request, and the tokens that one round adds arrive together, as those in one chunk of a stream do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Timed(Protocol):
    """An answer whose tokens' arrivals are known, in milliseconds from its start: see `CompletionSummary`."""

    @property
    def first_token_ms(self) -> float: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def gaps_ms(self) -> Sequence[float]: ...
    @property
    def end_ms(self) -> float: ...


class Percentiles(NamedTuple):
    """The mean of some values and their percentiles, linearly interpolated."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in milliseconds; None where nothing is known.

    Attributes:
        ttft_ms: time to first token: from the prompt's ids to the end of the first round. One value for each turn.
        tpot_ms: time per output token: from the end of the first round to the last token, over the number of tokens
            less one. One value for each turn with two tokens or more.
        itl_ms: inter-token latency: from one arrival of tokens to the next. One value for each round but the first.
        e2el_ms: end-to-end latency: from the prompt's ids to the last token. One value for each turn.
    """

    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None


def latency(answers: Iterable[Timed]) -> Latency:
    """The latencies of some answers."""
    turns = list(answers)
    return Latency(
        ttft_ms=percentiles([turn.first_token_ms for turn in turns]),
        tpot_ms=percentiles([turn.tpot_ms for turn in turns if turn.tpot_ms is not None]),
        itl_ms=percentiles([gap for turn in turns for gap in turn.gaps_ms]),
        e2el_ms=percentiles([turn.end_ms for turn in turns]),
    )


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Mean and percentiles; None without values."""
    if not values:
        return None
    return Percentiles(float(np.mean(values)), *map(float, np.percentile(values, [50, 90, 99])))
