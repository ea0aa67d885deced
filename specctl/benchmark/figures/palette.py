"""The colour and marker of each candidate, the same in every figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.observing.candidate import Candidate
from specctl.observing.results import BASELINE
from specctl.reporting.style import BASELINE_COLOUR, MARKERS, PALETTE, tint


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
