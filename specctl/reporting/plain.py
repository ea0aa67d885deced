"""Values as any JSON writer takes them."""

from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any, *, digits: int | None = None, optional: Set[str] = frozenset()) -> Any:
    """Dataclasses, named tuples and mappings as dicts, other sequences as lists, everything inside them too.

    Args:
        value: to convert.
        digits: decimals that floats are rounded to; None leaves them as they are.
        optional: names of dataclass fields that are left out where they are empty.
    """

    def inner(item: Any) -> Any:
        return plain(item, digits=digits, optional=optional)

    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: inner(item) for name, item in items.items() if item or name not in optional}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: inner(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    return round(value, digits) if digits is not None and isinstance(value, float) else value
