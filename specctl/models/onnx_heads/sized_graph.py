"""A graph whose inputs and results are arrays of numpy, bound once for each size of a pass. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.passes import ELEMENTS, KEPT, HostMemory

Array = npt.NDArray[Any]
PAST, PRESENT = "past.", "present."
"""How the names of a cache begin, before a pass and after it."""


@dataclass(frozen=True, slots=True)
class SizedPass:
    """A pass of one size.

    Attributes:
        given: its inputs by name, to fill in before it runs.
        found: its results by name, which the next pass of the same size overwrites.
    """

    given: Mapping[str, Array]
    found: Mapping[str, Array]
    _session: onnxruntime.InferenceSession
    _binding: onnxruntime.IOBinding

    def run(self) -> Mapping[str, Array]:
        """The results."""
        self._session.run_with_iobinding(self._binding)
        return self.found


class SizedGraph:
    """A graph on the CPU, over a cache of its own if it has one: inputs ``past.*`` ``(1, heads, capacity, size)``.

    Args:
        session: of `open_session`, which several may share.
        capacity: tokens to make room for at first.

    Attributes:
        caches: the buffers by name of the input, which passes write to.
        capacity: tokens that there is room for.
    """

    def __init__(self, session: onnxruntime.InferenceSession, capacity: int = 0) -> None:
        self._session = session
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        self._outputs = {one.name: one for one in self._session.get_outputs()}
        self.capacity = capacity
        self.caches = self._allocated()
        self._passes: dict[tuple[int, ...], SizedPass] = {}

    def reads(self, name: str) -> bool:
        """Whether it has an input of this name."""
        return name in self._inputs

    def makes(self, name: str) -> bool:
        """Whether it has a result of this name."""
        return name in self._outputs

    def reserve(self, tokens: int, filled: int) -> None:
        """Make room for so many tokens, of which the first ``filled`` are cached."""
        if tokens <= self.capacity:
            return
        old, self.capacity = self.caches, max(tokens, 2 * self.capacity)
        self.caches = self._allocated()
        for name, buffer in self.caches.items():
            buffer[:, :, :filled] = old[name][:, :, :filled]
        self._passes.clear()

    def _allocated(self) -> dict[str, Array]:
        # Zeros: what lies behind the sequence is multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: HostMemory().zeros((1, one.shape[1], self.capacity, one.shape[3]), one.type)
            for name, one in self._inputs.items()
            if name.startswith(PAST)
        }

    def sized(self, **sizes: int) -> SizedPass:
        """The pass whose dimensions have these sizes, always named in the same order."""
        key = tuple(sizes.values())
        return self._passes.get(key) or self._bound(key, sizes)

    def _bound(self, key: tuple[int, ...], sizes: Mapping[str, int]) -> SizedPass:
        binding = self._session.io_binding()

        def room(one: onnxruntime.NodeArg) -> Array:
            shape = [size if isinstance(size, int) else sizes[size] for size in one.shape]
            return HostMemory().zeros(shape, one.type)

        given = {name: self.caches[name] if name in self.caches else room(one) for name, one in self._inputs.items()}
        found = {
            name: self.caches[PAST + name.removeprefix(PRESENT)] if name.startswith(PRESENT) else room(one)
            for name, one in self._outputs.items()
        }
        for name, array in given.items():
            binding.bind_input(name, "cpu", 0, ELEMENTS[self._inputs[name].type], array.shape, array.ctypes.data)
        for name, array in found.items():
            binding.bind_output(name, "cpu", 0, ELEMENTS[self._outputs[name].type], array.shape, array.ctypes.data)
        made = SizedPass(given, found, self._session, binding)
        if max(key, default=0) <= KEPT:
            self._passes[key] = made
        return made
