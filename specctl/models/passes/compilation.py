"""Compiles passes with torch.compile, once each. Passes that fail to compile run uncompiled, with a notice."""

import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from specctl.errors import ModelError
from specctl.models.passes.inference import draws
from specctl.models.passes.preparation_time import preparing

Pass = Callable[..., Any]
_ARGUMENTS = ("ids", "positions", "slots", "rows", "sight", "uniform", "previous")
"""Names of the arguments of a pass over fixed buffers."""


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on this machine, as the end of a sentence; None if nothing is missing."""
    if device.type == "cpu":
        wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
        if not any(map(shutil.which, wanted)):
            return f"there is no C++ compiler ({', '.join(wanted)})"
    if device.type == "cuda" and find_spec("triton") is None:
        return "triton is not installed"
    if not draws(device):
        return f"tokens of {device.type} are drawn on the host, outside of its passes"
    return None


class Compiler:
    """Compiles passes with torch.compile.

    Args:
        notice: called with one line when a pass cannot be compiled and runs uncompiled.
        progress: called with the name of each pass that is compiled.
        must: whether a pass that cannot be compiled is an error.

    Attributes:
        name: the model, for messages.
        seconds: wall time spent so far.
    """

    def __init__(
        self,
        name: str,
        notice: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
        *,
        must: bool = False,
    ) -> None:
        self.name = name
        self.seconds = 0.0
        self._must = must
        self._notice, self._progress = notice, progress
        self._failed = False

    def compiled(
        self,
        step: Pass,
        given: Sequence[torch.Tensor | None],
        buffers: Sequence[torch.Tensor],
        single: bool,
        rows: Sequence[torch.Tensor | None] = (),
    ) -> Pass:
        """``step`` compiled for every sequence length and cache capacity; ``step`` itself if that fails.

        Args:
            step: must be repeatable: it is called with ``given`` here.
            given: arguments of the current pass: ids ``(1, T)``, positions ``(T,)``, slots ``(S,)``, and further
                arguments.
            buffers: keys and values ``(1, heads, capacity, head_dim)`` that the pass writes to.
            single: whether T is always 1; otherwise it is any greater number.
            rows: the further arguments with the shape ``(T, H)``.
        """
        if self._failed:
            return step
        self._progress(f"compiling {self.name} (passes of {'one token' if single else 'several tokens'})")
        began = perf_counter()
        ids, positions, slots = given[:3]
        sizes = [(slots, 0), *((buffer, 2) for buffer in buffers)]
        if not single:
            sizes += [(ids, 1), (positions, 0), *((tensor, 0) for tensor in rows)]
        for tensor, dimension in sizes:
            torch._dynamo.mark_dynamic(tensor, dimension)
        try:
            with preparing(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fast = _torch_compile(step)
                fast(*given)
        except Exception as error:  # any failure of the compiler: the pass itself still works
            self._give_up(error)
            return step
        finally:
            self.seconds += perf_counter() - began

        def fast_or_plain(*given: torch.Tensor | None) -> Any:
            if not self._failed:
                try:
                    return fast(*given)
                except torch._dynamo.exc.TorchDynamoException as error:  # a size that would need another compilation
                    self._give_up(error)
            return step(*given)

        return fast_or_plain

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if self._must:
            raise ModelError(
                f"{self.name} cannot be compiled ({type(error).__name__}: {reason[:200]}).", "Set compile = false."
            ) from error
        self._notice(f"{self.name} runs uncompiled: torch.compile failed ({type(error).__name__}: {reason[:200]})")


def _torch_compile(step: Pass) -> Pass:
    """Compile without guards on the model, if this version of torch separates the compiled passes of several models.

    Checking all attributes of all layers takes longer than a small model's whole pass. Here none of them change:
    weights and buffers are looked up at each call, and only sizes marked as dynamic vary.
    """
    settings: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        settings = {"isolate_recompiles": True, "options": {"guard_filter_fn": _on_arguments}}
    return torch.compile(step, fullgraph=True, **settings)


def _on_arguments(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on the pass's own arguments and on sizes; drop those on the model."""
    return [
        guard.guard_type == "SHAPE_ENV" or (guard.guard_type == "TENSOR_MATCH" and guard.name in _ARGUMENTS)
        for guard in guards
    ]
