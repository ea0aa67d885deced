"""Names the fastest candidate within paired intervals, in the same words for all commands."""

from collections.abc import Sequence
from typing import NamedTuple

from specctl.statistics import Interval, is_clear

MOST_NAMED = 4  # Number of level candidates that are named


class Placed(NamedTuple):
    """A compared candidate."""

    name: str  # its name in sentences
    speedup: Interval  # over target-only decoding
    distance: Interval  # the speed of the fastest over its own, from the runs of both on the same prompts


def times(interval: Interval) -> str:
    """E.g. ``1.31x (1.16 to 1.65)``, with a note on doubtful intervals; only the value without an interval."""
    bounds = "" if interval.low is None or interval.high is None else f"{interval.low:.2f} to {interval.high:.2f}"
    told = ", ".join(filter(None, (bounds, interval.doubt)))
    return f"{interval.value:.2f}x" + (f" ({told})" if told else "")


def level(placed: Sequence[Placed]) -> list[Placed]:
    """The fastest, and the others that differ from it only within noise."""
    return [one for number, one in enumerate(placed) if number == 0 or not is_clear(one.distance)]


def placing(placed: Sequence[Placed], where: str = "") -> str:
    """A sentence that names the fastest, or those that are level, with their speedups.

    Args:
        placed: at least one, the fastest first.
        where: follows the names, for example `` on onnx``.
    """
    first, *others = placed
    leading = level(placed)
    if others and others[0].distance.low is None:
        shown = ", ".join(f"{one.name} {times(one.speedup)}" for one in leading[:MOST_NAMED])
        return f"one prompt cannot show which is fastest{where}: {shown}"
    if len(leading) == 1:
        after = f", {times(others[0].distance)} as fast as {others[0].name}" if others else ""
        return f"{first.name} is fastest{where}: {times(first.speedup)}{after}"
    return f"{_all(leading)} are level{where}: {listed([times(one.speedup) for one in leading[:MOST_NAMED]])}"


def _all(leading: Sequence[Placed]) -> str:
    names = [one.name for one in leading[:MOST_NAMED]]
    hidden = len(leading) - len(names)
    return listed([*names, f"{hidden} more"] if hidden else names)


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last
