"""JSON from other people: how deeply it is nested, since Python's own limit is reached in unexpected places, and why a
text is none.
"""

from json import JSONDecodeError
from typing import Any

DEEPEST = 100


def json_fault(error: ValueError | RecursionError) -> str:
    """Why a text is not JSON, and where, as what `json.loads` raised says it: ``Expecting value at column 12``."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    place = min(error.pos, len(error.doc.rstrip()))  # a text that ends too soon is at fault at its end
    column = place - error.doc.rfind("\n", 0, place)
    line = f"line {error.doc.count(chr(10), 0, place) + 1}, " if "\n" in error.doc.strip() else ""
    return f"{error.msg.removesuffix(' at')} at {line}column {column}"


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
