"""What is known of torch's operations and their arguments, found quickly: it is asked for every kernel."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Known(NamedTuple):
    """What the schema of an operation says; torch makes its lists anew whenever it is asked.

    Attributes:
        name: without its namespace.
        composite: whether it is taken apart into others.
        is_view: whether it gives a view of what it is given.
        writes: places and names of the arguments that it writes to.
        returns: whether it gives anything.
    """

    name: str
    composite: bool
    is_view: bool
    writes: tuple[tuple[int, str], ...]
    returns: bool


@cache
def known_of(function: Any) -> Known:
    schema = getattr(function, "_schema", None)
    if schema is None:
        return Known(function.__name__, False, False, (), True)
    aliases = [x.alias_info for x in schema.returns]
    is_view = not schema.is_mutable and any(alias is not None and not alias.is_write for alias in aliases)
    writes = tuple(
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    composite = function.has_kernel_for_dispatch_key(COMPOSITE)
    return Known(schema.name.removeprefix("aten::"), composite, is_view, writes, bool(aliases))


def leaves(tree: Any) -> Iterator[Any]:
    """What is in lists, tuples and dictionaries; torch's own function does more, thousands of times a pass."""
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from leaves(part)
    else:
        yield tree


def each_changed(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same with each leaf changed."""
    if isinstance(tree, list | tuple):
        return type(tree)([each_changed(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: each_changed(change, part) for name, part in tree.items()}
    return change(tree)
