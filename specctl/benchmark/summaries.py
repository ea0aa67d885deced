"""Speed and rates of each entrant over some prompts, with intervals from a bootstrap over prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

import numpy as np

from specctl.metrics import Metrics
from specctl.observing.results import BASELINE, Run
from specctl.statistics.intervals import Floats, Interval, bootstrap


class Spread(NamedTuple):
    """Mean and (population) standard deviation over rounds."""

    mean: float
    sd: float


class Speedup(NamedTuple):
    """Speed over the baseline's on the prompts that both finished.

    Attributes:
        of_totals: total tokens/s divided by the baseline's total tokens/s.
        of_prompts: mean over prompts of the ratio of tokens/s.
        prompts: how many were paired.
    """

    of_totals: Interval
    of_prompts: Interval
    prompts: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One entrant over some prompts. Repeats of a prompt count as one, their mean; unknown values are None.

    Attributes:
        prompts, runs: how many it finished.
        speedup: None without a prompt that the baseline finished too.
        acceptance_rate, redundancy, draft_length, accepted_length: None where nothing was drafted.
        draft_length, accepted_length: over the rounds in which a draft ran.
        stops: share of those rounds by stop reason.
        wall: share of wall time spent on ``draft``, ``verify``, ``prefill`` and ``other``; empty for a peer.
        first_token_ms: mean time to the first tokens, i.e. to the end of the first round.
    """

    entrant: str
    prompts: int
    runs: int
    tokens_per_second: float
    ms_per_token: float
    speedup: Speedup | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    verification_rate: float | None
    discard_rate: float | None
    redundancy: float | None
    draft_length: Spread | None
    accepted_length: Spread | None
    first_token_ms: float
    stops: Mapping[str, float] = field(default_factory=dict)
    wall: Mapping[str, float] = field(default_factory=dict)


def summarise(runs: Iterable[Run], entrants: Iterable[str]) -> list[Summary]:
    """A summary of each entrant that has a run, in the entrants' order."""
    by_entrant: dict[str, list[Run]] = {}
    for run in runs:
        by_entrant.setdefault(run.entrant, []).append(run)
    baseline = by_entrant.get(BASELINE, [])
    return [_summary(by_entrant[name], speedup(by_entrant[name], baseline)) for name in entrants if name in by_entrant]


def _summary(runs: Sequence[Run], speed: Speedup | None) -> Summary:
    counted = evened(runs)
    metrics = metrics_of(counted)
    drafting = [round_ for run in counted for round_ in run.rounds if round_.stop is not None]
    seen, drafted = metrics.rounds > 0, metrics.drafted > 0
    passes = sum(turn.target_forwards for run in counted for turn in run.turns)
    return Summary(
        entrant=runs[0].entrant,
        prompts=len({run.prompt for run in runs}),
        runs=len(runs),
        tokens_per_second=metrics.tokens_per_second,
        ms_per_token=1e3 / metrics.tokens_per_second if metrics.generated_tokens else 0.0,
        speedup=speed,
        acceptance_rate=metrics.acceptance_rate if drafted else None,
        mean_acceptance_length=metrics.mean_acceptance_length if seen else None,
        # The passes of a peer are counted by hooks on the models, since its rounds are not visible.
        verification_rate=passes / metrics.generated_tokens if passes and metrics.generated_tokens else None,
        discard_rate=metrics.discard_rate if seen else None,
        redundancy=1 - metrics.acceptance_rate if drafted else None,
        draft_length=_spread([round_.drafted for round_ in drafting]),
        accepted_length=_spread([round_.accepted for round_ in drafting]),
        first_token_ms=float(np.mean([turn.first_token_ms for run in counted for turn in run.turns])),
        stops={stop: count / len(drafting) for stop, count in sorted(metrics.stops.items())},
        wall=_wall(metrics) if seen else {},
    )


def evened(runs: Sequence[Run]) -> list[Run]:
    """The runs, duplicated so that every prompt and length counts the same however many repeats it has."""
    cells = list(_cells(runs).values())
    times = lcm(*map(len, cells))
    return [run for repeats in cells for run in repeats * (times // len(repeats))]


def metrics_of(runs: Iterable[Run]) -> Metrics:
    """The sums from which every rate is derived."""
    metrics = Metrics()
    for run in runs:
        count(run, metrics)
    return metrics


def count(run: Run, metrics: Metrics) -> None:
    """Add a finished run to the sums."""
    for turn in run.turns:
        metrics.sequences += 1
        metrics.prompt_tokens += turn.prompt_tokens
        metrics.generated_tokens += len(turn.tokens)
        metrics.prefill_seconds += turn.prefill_ms / 1e3
        metrics.total_seconds += turn.total_ms / 1e3
    for round_ in run.rounds:
        metrics.rounds += 1
        metrics.drafted += round_.drafted
        metrics.accepted += round_.accepted
        metrics.draft_seconds += round_.draft_ms / 1e3
        metrics.verify_seconds += round_.verify_ms / 1e3
        if round_.stop is not None:
            metrics.stops[round_.stop] += 1


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> Speedup | None:
    """The speedup on the prompts and lengths that both finished; None where there are none."""
    mine, theirs = _means(runs), _means(baseline)
    by_prompt: dict[str, Floats] = {}
    for cell, figures in mine.items():
        if cell in theirs:
            pair = np.concatenate([figures, theirs[cell]])
            by_prompt[cell[0]] = by_prompt.get(cell[0], 0.0) + pair
    if not by_prompt:
        return None
    sums = np.stack(list(by_prompt.values()))  # (prompts, 4)
    ratios = _ratio(sums)
    prompts = len(ratios)

    def of_totals(weights: Floats) -> Floats:
        return _ratio(weights @ sums)

    def of_prompts(weights: Floats) -> Floats:
        return weights @ ratios / prompts

    return Speedup(bootstrap(of_totals, prompts), bootstrap(of_prompts, prompts), prompts)


def _cells(runs: Iterable[Run]) -> dict[tuple[str, int], list[Run]]:
    cells: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.prompt, run.length), []).append(run)
    return cells


def _means(runs: Iterable[Run]) -> dict[tuple[str, int], Floats]:
    """Tokens and seconds by prompt and length, repeats averaged; without those that generated nothing."""
    means = {
        cell: np.mean([(run.tokens, run.seconds) for run in repeats], axis=0) for cell, repeats in _cells(runs).items()
    }
    return {cell: figures for cell, figures in means.items() if figures.all()}


def _ratio(sums: Floats) -> Floats:
    """Tokens/s over the baseline's tokens/s from rows of tokens, seconds, baseline tokens, baseline seconds."""
    tokens, seconds, baseline_tokens, baseline_seconds = sums.T
    ratio: Floats = tokens * baseline_seconds / (seconds * baseline_tokens)
    return ratio


def _spread(values: Sequence[int]) -> Spread | None:
    return Spread(float(np.mean(values)), float(np.std(values))) if any(values) else None


def _wall(metrics: Metrics) -> dict[str, float]:
    total = metrics.total_seconds
    known = {"draft": metrics.draft_seconds, "verify": metrics.verify_seconds, "prefill": metrics.prefill_seconds}
    shares = {part: seconds / total for part, seconds in known.items()}
    return {**shares, "other": max(0.0, 1 - sum(shares.values()))}
