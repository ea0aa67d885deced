"""A speedup with its interval, in tables and as plain values."""

from specctl.reporting.table import UNKNOWN
from specctl.statistics.intervals import Interval


def plain_interval(interval: Interval | None) -> dict[str, float | None] | None:
    """An interval as a JSON object."""
    if interval is None:
        return None
    return {name: None if value is None else round(value, 4) for name, value in interval._asdict().items()}


def speedup_cells(speedup: Interval | None) -> tuple[str, str]:
    """A speedup and its interval, for two columns."""
    if speedup is None:
        return UNKNOWN, UNKNOWN
    bounds = UNKNOWN if speedup.low is None else f"{speedup.low:.2f} to {speedup.high:.2f}"
    return f"{speedup.value:.2f}", f"{bounds} ({speedup.doubt})" if speedup.doubt else bounds
