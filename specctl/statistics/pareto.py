"""The points of a trade-off that no other point beats."""

from collections.abc import Sequence


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that are not dominated: no other point is as low in both coordinates and lower in one."""
    return [
        index
        for index, point in enumerate(points)
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    ]
