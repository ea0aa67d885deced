"""The speedup of a candidate's runs over the baseline's, paired by prompt."""

from collections.abc import Callable, Iterable, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np

from specctl.observing.results import Run
from specctl.statistics import Floats, Interval, bootstrap


class Speedup(NamedTuple):
    """Ratio of a candidate's speed to the baseline's on the prompts that both finished.

    Attributes:
        of_totals: ratio of total speeds, each being all tokens divided by all seconds.
        of_prompts: mean over prompts of the ratio of tokens/s.
        prompts: number of paired prompts.
    """

    of_totals: Interval
    of_prompts: Interval
    prompts: int


def evened(runs: Sequence[Run]) -> list[Run]:
    """The runs, repeated so that every prompt and length has the same number of runs."""
    cells = list(_cells(runs).values())
    times = lcm(*map(len, cells))
    return [run for repeats in cells for run in repeats * (times // len(repeats))]


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> Speedup | None:
    """The speedup on the prompts (and lengths) that both finished; None if they have none in common."""
    by_prompt = paired(runs, baseline, speed_figures)
    if not by_prompt:
        return None
    sums = np.stack(list(by_prompt.values()))  # (prompts, 4)
    ratios = speed_ratio(sums)
    prompts = len(ratios)

    def of_totals(weights: Floats) -> Floats:
        return speed_ratio(weights @ sums)

    def of_prompts(weights: Floats) -> Floats:
        return weights @ ratios / prompts

    return Speedup(bootstrap(of_totals, prompts), bootstrap(of_prompts, prompts), prompts)


def speed_figures(run: Run) -> tuple[float, float]:
    """Tokens and seconds of a run."""
    return run.tokens, run.seconds


def paired(runs: Iterable[Run], others: Iterable[Run], figures: Callable[[Run], Sequence[float]]) -> dict[str, Floats]:
    """Figures of runs next to the same figures of other runs, for each prompt that both finished to one length or more.

    A run that lacks a figure has 0 for it; prompts and lengths whose mean is 0 are left out, as there is no ratio.

    Args:
        figures: N numbers of a run.

    Returns:
        By prompt (2 N,): the N figures of the runs, then those of the others, each the mean of repeats, summed over
        lengths.
    """
    mine, theirs = _means(runs, figures), _means(others, figures)
    by_prompt: dict[str, Floats] = {}
    for cell, numbers in mine.items():
        if cell in theirs:
            pair = np.concatenate([numbers, theirs[cell]])
            by_prompt[cell[0]] = by_prompt.get(cell[0], 0.0) + pair
    return by_prompt


def _cells(runs: Iterable[Run]) -> dict[tuple[str, int], list[Run]]:
    cells: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.prompt, run.length), []).append(run)
    return cells


def _means(runs: Iterable[Run], figures: Callable[[Run], Sequence[float]]) -> dict[tuple[str, int], Floats]:
    """Means of the repeats by prompt and length, without those where one is 0."""
    means = {cell: np.mean([figures(run) for run in repeats], axis=0) for cell, repeats in _cells(runs).items()}
    return {cell: numbers for cell, numbers in means.items() if numbers.all()}


def speed_ratio(sums: Floats) -> Floats:
    """Tokens/s over the baseline's tokens/s from rows of tokens, seconds, baseline tokens, baseline seconds."""
    tokens, seconds, baseline_tokens, baseline_seconds = sums.T
    ratio: Floats = tokens * baseline_seconds / (seconds * baseline_tokens)
    return ratio
