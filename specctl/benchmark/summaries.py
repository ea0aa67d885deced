"""Speed and rates of each candidate over some prompts, with intervals from a bootstrap over prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from specctl.metrics import Metrics
from specctl.observing.results import BASELINE, Run, Speedup, evened, speedup


class Timed(Protocol):
    """An answer with the arrival times of its tokens, in milliseconds from its start; see `CompletionSummary`."""

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
    """Latencies in milliseconds; unknown ones are None."""

    # time to first token: from the prompt's ids to the end of the first round. One value for each turn.
    ttft_ms: Percentiles | None
    # time per output token: from the end of the first round to the last token, over the number of tokens less one. One
    # value for each turn with two tokens or more.
    tpot_ms: Percentiles | None
    # inter-token latency: from one arrival of tokens to the next. One value for each round but the first.
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None  # end-to-end latency: from the prompt's ids to the last token. One value for each turn.


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


class Spread(NamedTuple):
    """Mean and (population) standard deviation over rounds."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One candidate over some prompts. Every prompt counts the same however often it ran; unknown values are None."""

    candidate: str
    # prompts, runs: number that the candidate finished
    prompts: int
    runs: int
    tokens_per_second: float
    ms_per_token: float
    speedup: Speedup | None  # None if the baseline finished none of these prompts
    # acceptance_rate, redundancy, draft_length, accepted_length: None if nothing was drafted
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    verification_rate: float | None
    draft_rate: float | None  # forward passes of the first draft for each generated token; None if nothing was drafted
    discard_rate: float | None
    redundancy: float | None
    # draft_length, accepted_length: over the rounds in which a draft ran
    draft_length: Spread | None
    accepted_length: Spread | None
    nodes: Spread | None  # tokens of trees that were verified, over the same rounds; None for chains
    latency: Latency  # of its turns; the table of speeds shows the mean of ``ttft_ms``
    stops: Mapping[str, float] = field(default_factory=dict)  # share of the rounds in which a draft ran, by stop reason
    # share of wall time spent on ``draft``, ``verify``, ``prefill`` and ``other``; empty for a peer
    wall: Mapping[str, float] = field(default_factory=dict)


def summarise(runs: Iterable[Run], candidates: Iterable[str]) -> list[Summary]:
    """A summary of each candidate that has a run, in the candidates' order."""
    by_candidate: dict[str, list[Run]] = {}
    for run in runs:
        by_candidate.setdefault(run.candidate, []).append(run)
    baseline = by_candidate.get(BASELINE, [])
    return [
        _summary(by_candidate[name], speedup(by_candidate[name], baseline))
        for name in candidates
        if name in by_candidate
    ]


def _summary(runs: Sequence[Run], speed: Speedup | None) -> Summary:
    counted = evened(runs)
    metrics = metrics_of(counted)
    drafting = [round_ for run in counted for round_ in run.rounds if round_.stop is not None]
    seen, drafted = metrics.rounds > 0, metrics.drafted > 0
    turns = [turn for run in counted for turn in run.turns]
    passes = sum(turn.target_forwards for turn in turns)
    draft_passes = sum(turn.draft_forwards for turn in turns)
    return Summary(
        candidate=runs[0].candidate,
        prompts=len({run.prompt for run in runs}),
        runs=len(runs),
        tokens_per_second=metrics.tokens_per_second,
        ms_per_token=1e3 / metrics.tokens_per_second if metrics.generated_tokens else 0.0,
        speedup=speed,
        acceptance_rate=metrics.acceptance_rate if drafted else None,
        mean_acceptance_length=metrics.mean_acceptance_length if seen else None,
        # The passes of a peer are counted by hooks on the models, since its rounds are not visible.
        verification_rate=passes / metrics.generated_tokens if passes and metrics.generated_tokens else None,
        draft_rate=draft_passes / metrics.generated_tokens if draft_passes and metrics.generated_tokens else None,
        discard_rate=metrics.discard_rate if seen else None,
        redundancy=1 - metrics.acceptance_rate if drafted else None,
        draft_length=_spread([round_.drafted for round_ in drafting]),
        accepted_length=_spread([round_.accepted for round_ in drafting]),
        nodes=_spread([round_.nodes for round_ in drafting]) if metrics.nodes else None,
        latency=latency(turn for run in counted for turn in run.turns),
        stops={stop: count / len(drafting) for stop, count in sorted(metrics.stops.items())},
        wall=_wall(metrics) if seen else {},
    )


def metrics_of(runs: Iterable[Run]) -> Metrics:
    """The sums of all runs, from which every rate is derived."""
    metrics = Metrics()
    for run in runs:
        for turn in run.turns:
            metrics.add(turn)
    return metrics


def _spread(values: Sequence[int]) -> Spread | None:
    return Spread(float(np.mean(values)), float(np.std(values))) if any(values) else None


def _wall(metrics: Metrics) -> dict[str, float]:
    total = metrics.total_seconds
    known = {"draft": metrics.draft_seconds, "verify": metrics.verify_seconds, "prefill": metrics.prefill_seconds}
    shares = {part: seconds / total for part, seconds in known.items()}
    return {**shares, "other": max(0.0, 1 - sum(shares.values()))}
