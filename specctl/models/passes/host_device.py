"""The host as a device, told without torch, which need not be there where numpy computes."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
Given = TypeVar("Given")


class _Host(str):
    """``cpu``, as a name that torch's functions take, with what is asked of a `torch.device`."""

    __slots__ = ()
    type = "cpu"
    index = None  # type: ignore[assignment] - a device has none, and a name is not searched

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return str(other) != "cpu"

    def __hash__(self) -> int:
        return hash("cpu")


HOST = cast("torch.device", _Host("cpu"))
"""What equals ``torch.device("cpu")`` and stands for it where torch has not been imported."""


def without_gradients(function: Callable[P, Given]) -> Callable[P, Given]:
    """`torch.inference_mode` as a decorator, of generators too, where torch is imported when the function is called.

    Where it is not, there are no networks that could record anything.
    """

    @wraps(function)
    def run(*given: P.args, **named: P.kwargs) -> Given:
        if "torch" not in sys.modules:
            return function(*given, **named)
        import torch

        found: Given = torch.inference_mode()(function)(*given, **named)
        return found

    return run
