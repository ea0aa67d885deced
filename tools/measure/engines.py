"""The table that compares specctl with other engines: their speeds, and how many times as fast specctl's policy is."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specctl.observing.results import BASELINE, Run, RunSet, paired, speed_ratio
from specctl.reporting.table import show_interval
from specctl.statistics import Interval, bootstrap

Weight = Callable[[Run], float]
"""How often a run's tokens and seconds count."""


def engines_table(results: Mapping[str, RunSet]) -> tuple[list[str], list[list[str]], str]:
    """Headings, one row for each candidate with its speeds in decoding and in whole calls, and what stands below.

    Args:
        results: of benchmarks with the same candidates, by what heads their columns. The first policy that drafts is
            compared with all other candidates; those that failed are left out.
    """
    first = next(iter(results.values())).header
    labels = [one.label for one in first.candidates if all(found.of(one.label) for found in results.values())]
    peers = {one.label for one in first.candidates if one.peer is not None and one.label in labels}
    policy = next(label for label in labels if label not in {BASELINE, *peers})
    cells: dict[str, list[str]] = {label: [f"`{label}`"] for label in labels}
    headings, nearest = ["candidate"], []
    for name, found in results.items():
        for what, weight in _weights(found.header.lengths).items():
            headings.append(f"{name}: {what}")
            speeds = {label: speeds_of(found.of(policy), found.of(label), weight) for label in labels}
            for label, (speed, ratio) in speeds.items():
                cells[label].append(f"{speed:.0f}" if label == policy else f"{speed:.0f}, {show_interval(ratio)}")
            fastest = max(peers, key=lambda label: speeds[label][0])
            nearest.append(f"{show_interval(speeds[fastest][1])} of `{fastest}` ({name}: {what})")
    told = f"`{policy}` over the fastest peer: {'; '.join(nearest)}."
    compared = [run for found in results.values() for run in found.runs if run.candidate != BASELINE]
    gaps = [run.difference.gap for run in compared if run.difference is not None]
    apart = (
        f", where the target's two best logits are at most {max(gap or 0.0 for gap in gaps):.2g} apart" if gaps else ""
    )
    identity = f"Of {len(compared)} greedy runs, {len(gaps)} differed from `none`{apart}."
    return headings, list(cells.values()), f"{told}\n\n{identity}"


def _weights(lengths: Sequence[int]) -> dict[str, Weight]:
    """What is compared: calls to the longest limit, and what these have over calls to the shortest."""

    def whole(run: Run) -> float:
        return float(run.length == max(lengths))

    def decoding(run: Run) -> float:
        return whole(run) - (run.length == min(lengths))

    return {"decoding": decoding, "whole calls": whole}


def speeds_of(ours: Sequence[Run], theirs: Sequence[Run], weight: Weight) -> tuple[float, Interval]:
    """Tokens/s of a candidate, and those of ours over them, on the prompts that both finished."""

    def figures(run: Run) -> tuple[float, float]:
        return weight(run) * run.tokens, weight(run) * run.seconds

    sums = np.stack(list(paired(ours, theirs, figures).values()))  # (prompts, 4)
    sums = sums[(sums[:, ::2] > 0).all(axis=1)]  # else a text ended before the shortest limit
    tokens, seconds = sums.sum(axis=0)[2:]
    return tokens / seconds, bootstrap(lambda weights: speed_ratio(weights @ sums), len(sums))
