"""Compares the tokens of greedy runs with the baseline's."""

from itertools import zip_longest

from specctl.observing.results import BASELINE, Difference, Run, RunSet


def compare(results: RunSet) -> list[tuple[Run, Difference | None]]:
    """Compare every run with the baseline's first run of the same prompt and length; the baseline's repeats too.

    The tokens themselves are compared, so a difference that was not recorded while measuring is still found.
    """
    first: dict[tuple[str, int], Run] = {}
    for run in results.of(BASELINE):
        first.setdefault((run.prompt, run.length), run)
    pairs = ((run, first.get((run.prompt, run.length))) for run in results.runs)
    return [
        (run, run.difference or _difference(run, baseline))
        for run, baseline in pairs
        if run is not baseline and (baseline or run.difference)
    ]


def _difference(run: Run, baseline: Run | None) -> Difference | None:
    if baseline is None:
        return None
    turns = zip_longest((turn.tokens for turn in baseline.turns), (turn.tokens for turn in run.turns), fillvalue=())
    for number, (expected, found) in enumerate(turns):
        for position, (ours, theirs) in enumerate(zip_longest(expected, found)):
            if ours != theirs:
                return Difference(number, position, ours, theirs, None)
    return None
