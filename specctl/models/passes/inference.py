"""Passes that remember nothing for gradients."""

import sys
from collections.abc import Callable, Generator
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, ParamSpec, TypeVar, cast

Given = ParamSpec("Given")
Found = TypeVar("Found")


def in_inference_mode(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A function in torch's inference mode, a generator in each of its steps; as it is where nobody needs torch.

    As torch's own decorator, but that a call within the mode costs next to nothing.
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
    """A generator whose steps are in the mode, and who takes them is not."""
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
