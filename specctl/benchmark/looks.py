"""The colour and marker of each entrant, the same in every figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from specctl.observing.entrant import Entrant
from specctl.observing.results import BASELINE
from specctl.reporting.style import BASELINE_COLOUR, MARKERS, PALETTE, tint


@dataclass(frozen=True, slots=True)
class Look:
    """How an entrant is drawn in every figure."""

    colour: str
    marker: str


def looks(entrants: Sequence[Entrant]) -> dict[str, Look]:
    """One colour per family with tints for its further settings, and grey for the baseline."""
    names = list(dict.fromkeys(entrant.family for entrant in entrants if entrant.label != BASELINE))
    found = {}
    for entrant in entrants:
        if entrant.label == BASELINE:
            found[entrant.label] = Look(BASELINE_COLOUR, "o")
            continue
        same = [other.label for other in entrants if other.family == entrant.family]
        index = names.index(entrant.family)
        lightness = 0.6 * same.index(entrant.label) / len(same)
        found[entrant.label] = Look(tint(PALETTE[index % len(PALETTE)], lightness), MARKERS[index % len(MARKERS)])
    return found
