"""The host's device and torch's inference mode, for code that may run without torch."""

import sys
from collections.abc import Callable, Generator
from functools import cache, wraps
from inspect import isgeneratorfunction
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")


def in_inference_mode(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Wraps a function in torch's inference mode, a generator in each of its steps; no effect where torch is not
    needed.

    Like torch's own decorator, except that a call within the mode costs almost nothing.
    """
    steps = isgeneratorfunction(function)

    @wraps(function)
    def called(*args: Given.args, **named: Given.kwargs) -> Found:
        if not steps:
            return _in_mode(function, *args, **named)
        return cast("Found", _stepping(function(*args, **named)))  # type: ignore[arg-type]

    return called


def _in_mode(function: Callable[Given, Found], /, *args: Given.args, **named: Given.kwargs) -> Found:
    torch = sys.modules.get("torch")
    if torch is None or torch.is_inference_mode_enabled():
        return function(*args, **named)
    with torch.inference_mode():
        return function(*args, **named)


def _stepping(made: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A generator with its steps in inference mode, but not its caller's code between them."""
    step: Callable[[Any], Any] = made.send
    given: Any = None
    while True:
        try:
            found = _in_mode(step, given)
        except StopIteration as end:
            return end.value
        try:
            step, given = made.send, (yield found)
        except GeneratorExit:
            _in_mode(made.close)
            raise
        except BaseException as error:
            step, given = made.throw, error


class _Host(str):
    """``cpu`` as a name that torch's functions accept, with the used attributes of a `torch.device`."""

    __slots__ = ()
    type = "cpu"
    index = None  # type: ignore[assignment]  # a device of torch has none, and the name is not searched

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return str(other) != "cpu"

    def __hash__(self) -> int:
        return hash("cpu")


HOST = cast("torch.device", _Host("cpu"))
"""Equal to ``torch.device("cpu")``, and stands for it where torch has not been imported."""

WITHOUT_FLOAT64 = frozenset({"mps"})  # Kinds of devices without float64; some of Intel's have it


@cache
def draws(device: "torch.device") -> bool:
    """Whether tokens can be drawn on a device, which needs float64. Otherwise the host reads its logits."""
    if device.type == "xpu":
        import torch

        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in WITHOUT_FLOAT64
