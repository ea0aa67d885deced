"""The table that compares one policy with simpler ones."""

from collections.abc import Mapping

from specctl.observing.results import BASELINE, RunSet
from specctl.reporting.table import show_interval
from tools.measure.engines import speeds_of


def rules_table(results: Mapping[str, RunSet]) -> tuple[list[str], list[list[str]], str]:
    """Headings, a row for each candidate but the first that drafts, and what stands below.

    A cell has how many times as fast that first one is, over all repeats, with 95% over prompts.

    Args:
        results: of benchmarks with the same candidates, by what heads their columns.
    """
    labels = [one.label for one in next(iter(results.values())).header.candidates]
    first = next(label for label in labels if label != BASELINE)
    rows = []
    for label in labels:
        if label != first:
            found = [speeds_of(one.of(first), one.of(label), lambda _: 1.0)[1] for one in results.values()]
            rows.append([f"over `{label}`", *map(show_interval, found)])
    return [f"`{first}`", *results], rows, ""
