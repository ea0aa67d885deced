"""How deeply values from other people's files are nested; Python's own limit is reached in unexpected places."""

from typing import Any

DEEPEST = 100


def too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether dictionaries and lists are nested in each other more than ``most`` times."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
