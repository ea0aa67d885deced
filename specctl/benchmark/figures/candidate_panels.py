"""How candidates are drawn, the same in every figure: their colours and markers, and panels with a row for each."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specctl.benchmark.digest import Digest
from specctl.benchmark.summaries import Summary
from specctl.observing.candidate import Candidate
from specctl.observing.results import BASELINE, Run
from specctl.records import RoundSummary
from specctl.reporting.style import BASELINE_COLOUR, MARKERS, PALETTE, shorten, tint

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Look:
    """How a candidate is drawn in every figure."""

    colour: str
    marker: str


def looks(candidates: Sequence[Candidate]) -> dict[str, Look]:
    """One colour per family with tints for its further settings, and grey for the baseline."""
    names = list(dict.fromkeys(candidate.family for candidate in candidates if candidate.label != BASELINE))
    found = {}
    for candidate in candidates:
        if candidate.label == BASELINE:
            found[candidate.label] = Look(BASELINE_COLOUR, "o")
            continue
        same = [other.label for other in candidates if other.family == candidate.family]
        index = names.index(candidate.family)
        lightness = 0.6 * same.index(candidate.label) / len(same)
        found[candidate.label] = Look(tint(PALETTE[index % len(PALETTE)], lightness), MARKERS[index % len(MARKERS)])
    return found


ROW = 0.24
"""Height of one candidate in a panel, in inches."""


def parts_of(digest: Digest) -> list[tuple[str, list[Summary]]]:
    """All prompts, then each category where there are several: its name and the summaries."""
    parts = list(digest.by_category.items()) if len(digest.by_category) > 1 else []
    return [("all prompts", digest.overall), *parts]


def panel_height(parts: Sized, names: Sequence[str]) -> float:
    """Inches that a page of one panel per part needs, with one row per name in each."""
    return (ROW * len(names) + 0.85) * -(-len(parts) // panel_columns(parts))


def panel_columns(parts: Sized) -> int:
    """Number of panels in a row of the page."""
    return 3 if len(parts) in (3, 5, 6, 9) else min(4, len(parts))


def candidate_panel(axes: "Axes", title: str, names: Sequence[str]) -> None:
    """Prepare axes with one row per candidate, the first on top."""
    axes.set_title(title)
    axes.set_yticks(range(len(names)), [shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def note_right(axes: "Axes", row: int, text: str) -> None:
    """Write a text to the right of a row."""
    axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def note_after(axes: "Axes", across: float, row: int, text: str) -> None:
    """Write a text behind what a row has drawn up to ``across``, inside of the panel, where no neighbour takes it."""
    axes.annotate(text, (across, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def drafting_rounds(run: Run) -> list[RoundSummary]:
    """The rounds of a run in which a draft ran."""
    return [round_ for round_ in run.rounds if round_.stop is not None]
