"""Passes of an ONNX graph over one key-value buffer, whose inputs and outputs are torch's own memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch

from specctl.models.passes.tree_paths import gather_path
from specctl.models.passes.watching import LAST

NUMBERS: dict[str, torch.dtype] = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
}
ELEMENTS = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
"""ONNX's numbers for torch's dtypes."""
KEPT = 64
"""Passes at most this wide keep their inputs bound for the next of the same kind."""


def state_name(layer: int) -> str:
    """The output that holds a layer's states, numbered as `Runner.watch` numbers them."""
    return "state.last" if layer == LAST else f"state.{layer}"


def open_session(path: Path, device: torch.device, threads: int) -> onnxruntime.InferenceSession:
    """A graph made ready to run.

    Args:
        path: of a graph as `export.exported` describes it.
        device: a CPU, or a CUDA device for which onnxruntime has its provider.
        threads: for one pass on a CPU.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as well
    # Threads of a pass meet after each of its many nodes, where waking up takes longer than the work does; between
    # passes a spinning thread would take a core from whoever has work for it, such as the other model.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


class _Kind(NamedTuple):
    """What passes must have in common to share what is bound: T, R, and the layers whose states they give."""

    width: int
    rows: int
    layers: tuple[int, ...]


class _Numbers:
    """An input of a few integers: filled in on the host by numpy, which takes a tenth of torch's time for so few.

    Attributes:
        host: to fill in before a pass.
        tensor: what the pass reads: the same memory on a CPU, a copy by `send` on another device.
    """

    def __init__(self, numbers: torch.Tensor, device: torch.device) -> None:
        self._source = numbers
        self.host: npt.NDArray[Any] = numbers.numpy()
        self.tensor = numbers.to(device)

    def send(self) -> None:
        self.tensor.copy_(self._source)


@dataclass(slots=True)
class _Bound:
    """A kind of pass with its inputs and results bound: only their contents change."""

    binding: onnxruntime.IOBinding
    ids: _Numbers  # (1, T) int64
    positions: _Numbers | None  # (1, T) int64; None where the graph does not read them
    rows: _Numbers  # (R,) int64
    results: "Results"


@dataclass(frozen=True)
class Results:
    """What a pass gave: logits ``(R, V)`` and the states ``(T, D)`` that were asked for, by layer.

    Attributes:
        shared: whether the next pass overwrites them.
    """

    logits: torch.Tensor
    states: dict[int, torch.Tensor]
    shared: bool

    @cached_property
    def rows(self) -> npt.NDArray[np.float32]:
        """The logits of a float32 graph on the host, as numpy's."""
        return self.logits.numpy()


class Passes:
    """Runs a graph over buffers that it owns; every pass says after how many tokens it comes.

    Args:
        session: of `open_session`.
        device: where the graph runs and its buffers lie.
        capacity: tokens to make room for at first.
        narrowest: the fewest tokens of a pass; to fewer, others are added behind that nobody sees.

    Attributes:
        layers: how many decoder layers have states.
        gives_rows: whether results have logits as numpy's.
        trees: whether the graph reads trees.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, device: torch.device, capacity: int, narrowest: int = 1
    ) -> None:
        self._session = session
        self._narrowest = narrowest
        self._device = device
        self._on_host = device.type == "cpu"
        inputs = {given.name: given for given in session.get_inputs()}
        outputs = {made.name: made for made in session.get_outputs()}
        self._vocabulary = int(outputs["logits"].shape[2])
        self.layers = sum(name.startswith("state.") for name in outputs) - 1
        self._width = int(outputs["state.last"].shape[2])
        self._dtype = NUMBERS[outputs["logits"].type]
        self.gives_rows = self._on_host and self._dtype == torch.float32
        self._placed = "positions" in inputs
        self.trees = "bias" in inputs
        assert self.gives_rows or not self.trees, "trees are read in float32 on a CPU"
        self._nothing = torch.zeros(0)  # the bias of a chain
        self._caches = [(name, given.shape) for name, given in inputs.items() if name.startswith("past.")]
        self.capacity = capacity
        self._buffers = self._allocated()
        with torch.inference_mode(False):  # what is filled anew in each pass must not be an inference tensor
            # Attention on a GPU wants the number of tokens on the host and the one before on the device.
            self._before = _Numbers(torch.zeros(1, dtype=torch.int32), device)
            self._total = _Numbers(torch.zeros(1, dtype=torch.int32), torch.device("cpu"))
        self._bound: dict[_Kind, _Bound] = {}
        self._shared: dict[tuple[str, int], torch.Tensor] = {}  # by result and the most rows of it

    @torch.inference_mode(False)
    def _allocated(self) -> dict[str, torch.Tensor]:
        capacity = self.capacity + self._narrowest - 1
        # Zeros: what lies behind the sequence is multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: torch.zeros(1, shape[1], capacity, shape[3], dtype=self._dtype, device=self._device)
            for name, shape in self._caches
        }

    def fresh(self) -> "Passes":
        """The same graph over buffers of its own."""
        return Passes(self._session, self._device, self.capacity, self._narrowest)

    def grow(self, capacity: int, filled: int) -> None:
        """Move the first ``filled`` tokens to larger buffers."""
        old, self.capacity = self._buffers, capacity
        self._buffers = self._allocated()
        for name, buffer in self._buffers.items():
            buffer[:, :, :filled] = old[name][:, :, :filled]
        self._bound.clear()

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the buffers."""
        gather_path([buffer.numpy() for buffer in self._buffers.values()], start, path)

    def run(
        self,
        tokens: Sequence[int],
        after: int,
        keep: int,
        layers: Sequence[int] = (),
        *,
        seen: torch.Tensor | None = None,
    ) -> Results:
        """One pass over tokens that come after so many cached ones.

        Args:
            tokens: T ids; there is room for them.
            after: how many of the cached tokens they follow; later ones are overwritten.
            keep: logits of the last so many; R is at least 1.
            layers: whose states are wanted.
            seen: of a tree, which of its B + T tokens, the last ones, each of these sees ``(T, B + T)`` bool on the
                CPU; None for a chain.
        """
        width, rows = len(tokens), max(keep, 1)  # onnxruntime takes no empty tensors
        kind = _Kind(width, rows, tuple(layers))
        bound = self._bound.get(kind) or self._bind(kind)
        end = after + max(width, self._narrowest)
        self._before.host[0] = end - 1
        self._total.host[0] = end
        bound.ids.host[0, :width] = tokens
        if bound.positions is not None:
            start = 0 if seen is None else after + width - seen.shape[1]
            placed = range(after, after + width) if seen is None else start + seen.sum(1).numpy() - 1
            bound.positions.host[0, :width] = placed
            bound.positions.host[0, width:] = after  # any that the model knows
        if self.trees:
            bias = self._bias(width, after, seen)  # until the pass has run
            self._bind_input(bound.binding, "bias", bias)
        if not self._on_host:
            for numbers in (self._before, bound.ids, bound.positions):
                if numbers is not None:
                    numbers.send()
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(bound.binding)
        return bound.results

    @torch.inference_mode(False)  # what is filled anew in each pass must not be an inference tensor
    def _bind(self, kind: _Kind) -> _Bound:
        places = torch.arange(max(kind.width, self._narrowest))
        results, states = self._results(kind)
        bound = _Bound(
            self._session.io_binding(),
            _Numbers(places[None].clone(), self._device),
            _Numbers(places[None].clone(), self._device) if self._placed else None,
            _Numbers(places[kind.width - kind.rows : kind.width], self._device),
            results,
        )
        inputs = {"ids": bound.ids, "rows": bound.rows, "before": self._before, "total": self._total}
        if bound.positions is not None:
            inputs["positions"] = bound.positions
        given = {**{name: numbers.tensor for name, numbers in inputs.items()}, **self._buffers}
        for name, tensor in given.items():
            self._bind_input(bound.binding, name, tensor)
        for name, buffer in self._buffers.items():
            self._bind_output(bound.binding, name.replace("past", "present"), buffer)
        self._bind_output(bound.binding, "logits", bound.results.logits)
        for layer, rows in states.items():
            self._bind_output(bound.binding, state_name(layer), rows)
        if kind.width <= KEPT:
            self._bound[kind] = bound
        return bound

    def _results(self, kind: _Kind) -> tuple[Results, dict[int, torch.Tensor]]:
        """Memory for the results of a kind of pass, which short ones share, and all of it that the states take."""

        def memory(name: str, rows: int, width: int) -> torch.Tensor:
            if kind.width > KEPT:
                return torch.empty(rows, width, dtype=self._dtype, device=self._device)
            size = 1 << (rows - 1).bit_length()
            if (name, size) not in self._shared:
                self._shared[name, size] = torch.empty(size, width, dtype=self._dtype, device=self._device)
            return self._shared[name, size][:rows]

        logits = memory("logits", kind.rows, self._vocabulary)
        width = max(kind.width, self._narrowest)
        states = {layer: memory(state_name(layer), width, self._width) for layer in kind.layers}
        read = {layer: rows[: kind.width] for layer, rows in states.items()}
        return Results(logits, read, shared=kind.width <= KEPT), states

    @torch.inference_mode(False)
    def _bias(self, width: int, after: int, seen: torch.Tensor | None) -> torch.Tensor:
        """``(1, 1, T, S)``: zeros, but for what a token of a tree does not see; none sees what comes after it."""
        end, width = after + width, max(width, self._narrowest)
        shape = 1, 1, width, after + width
        if seen is not None:
            bias = np.zeros(shape, dtype=np.float32)
            bias[0, 0, : len(seen), end - seen.shape[1] : end] = np.where(
                seen.numpy(), np.float32(0), np.finfo(np.float32).min
            )
            return torch.from_numpy(bias)
        if self._nothing.numel() < width * (after + width):
            self._nothing = torch.zeros(2 * width * (after + width))
        return self._nothing[: width * (after + width)].view(shape)

    def _bind_input(self, binding: onnxruntime.IOBinding, name: str, tensor: torch.Tensor) -> None:
        where = tensor.device.type, tensor.device.index or 0
        binding.bind_input(name, *where, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def _bind_output(self, binding: onnxruntime.IOBinding, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape) if tensor.dim() == 4 else (1, *tensor.shape)
        binding.bind_output(
            name, self._device.type, self._device.index or 0, ELEMENTS[tensor.dtype], shape, tensor.data_ptr()
        )
