"""All figures of a benchmark's report."""

from collections.abc import Callable, Iterator

from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.candidate_panels import Look, looks
from specctl.benchmark.figures.draft_figures import accepted_histogram, draft_length_over_rounds, lengths_by_category
from specctl.benchmark.figures.hierarchy_figures import speed_by_window, where_it_pays
from specctl.benchmark.figures.speed_figures import speedup_by_category, speedup_by_length, wall_time
from specctl.benchmark.figures.tradeoff_figure import verification_against_discard
from specctl.reporting.style import MissingDataError, Picture, style

Drawing = Callable[[Digest, dict[str, Look]], Picture]

FIGURES: dict[str, Drawing] = {
    "Speedup by category": speedup_by_category,
    "Drafted and accepted length by category": lengths_by_category,
    "Verification rate against discard rate": verification_against_discard,
    "Accepted lengths": accepted_histogram,
    "Draft length over rounds": draft_length_over_rounds,
    "Wall time": wall_time,
    "Speedup by length": speedup_by_length,
}

LEVEL_FIGURES: dict[str, Drawing] = {
    "When a third model pays": where_it_pays,
    "Speed by window": speed_by_window,
}
"""Drawn only where several drafts are loaded."""


def draw_all(digest: Digest) -> Iterator[tuple[str, Picture | str]]:
    """The title of each figure with the figure, or with the reason why it cannot be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    look = looks(digest.results.header.candidates)
    for title, draw in {**FIGURES, **(LEVEL_FIGURES if digest.levels else {})}.items():
        with style():
            try:
                yield title, draw(digest, look)
            except MissingDataError as reason:
                yield title, str(reason)
