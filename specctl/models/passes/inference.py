"""Passes that remember nothing for gradients."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


def in_inference_mode(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """A function in torch's inference mode, a generator so between its steps too; as it is where nobody needs torch."""

    @wraps(function)
    def called(*args: Given.args, **named: Given.kwargs) -> Found:
        torch = sys.modules.get("torch")
        chosen: Callable[Given, Found] = function if torch is None else torch.inference_mode()(function)
        return chosen(*args, **named)

    return called
