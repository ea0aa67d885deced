"""Passes of an ONNX graph over one key-value buffer, whose inputs and outputs are memory of this process's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.host_memory import HostMemory, Integers, Memory
from specctl.models.passes.forward import Signals
from specctl.models.passes.tree_sight import Seen, gather_path
from specctl.models.passes.watching import LAST

if TYPE_CHECKING:
    import torch

ELEMENTS = {"tensor(float)": 1, "tensor(int32)": 6, "tensor(int64)": 7, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""ONNX's numbers for kinds of tensors, by onnxruntime's names."""
KEPT = 64
"""Passes at most this wide keep their inputs bound for the next of the same kind."""


def state_name(layer: int) -> str:
    """The output that holds a layer's states, numbered as `Runner.watch` numbers them."""
    return "state.last" if layer == LAST else f"state.{layer}"


def open_session(
    path: Path, device: "torch.device", threads: int, graph: bytes | None = None
) -> onnxruntime.InferenceSession:
    """A graph made ready to run.

    Args:
        path: of a graph as `export.exported` describes it.
        device: a CPU, or a CUDA device for which onnxruntime has its provider.
        threads: for one pass on a CPU.
        graph: one that takes its place, with the same file of weights.
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
    if graph is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return onnxruntime.InferenceSession(str(path) if graph is None else graph, options, providers=providers)


class _Kind(NamedTuple):
    """What passes must have in common to share what is bound: T, R, the layers whose states they give, and whether they
    tell signals."""

    width: int
    rows: int
    layers: tuple[int, ...]
    told: bool


class _Numbers:
    """An input of a few integers.

    Attributes:
        host: to fill in before a pass.
        there: what the pass reads: the same memory on a CPU, a copy by `Memory.send` on another device.
        kind: onnxruntime's name of it.
    """

    def __init__(self, numbers: Integers, memory: Memory) -> None:
        self.host = numbers
        self.memory = memory
        self.there = memory.beside(numbers)
        self.kind = f"tensor({numbers.dtype})"


@dataclass(slots=True)
class _Bound:
    """A kind of pass with its inputs and results bound: only their contents change."""

    binding: onnxruntime.IOBinding
    ids: _Numbers  # (1, T) int64
    positions: _Numbers | None  # (1, T) int64; None where the graph does not read them
    rows: _Numbers  # (R,) int64
    changed: Sequence[tuple[Integers, Any]]  # what every pass fills in that is to be sent, and where
    results: "Results"


@dataclass(frozen=True, slots=True)
class Results:
    """What a pass gave: logits ``(R, V)`` and the states ``(T, D)`` that were asked for, by layer.

    They are of the memory's own kind: arrays of numpy on the host.

    Attributes:
        shared: whether the next pass overwrites them.
        signals: as of `Forward`, of R rows; None where they were not asked for.
    """

    logits: Any
    states: dict[int, Any]
    shared: bool
    signals: Signals | None = None


class Passes:
    """Runs a graph over buffers that it owns; every pass says after how many tokens it comes.

    Args:
        session: of `open_session`.
        memory: where the graph runs and its buffers lie.
        capacity: tokens to make room for at first.
        narrowest: the fewest tokens of a pass; to fewer, others are added behind that nobody sees.

    Attributes:
        session: of the graph.
        telling: of the graph that tells signals too; None where there is none.
        memory: where its results lie.
        columns: of its logits.
        layers: how many decoder layers have states.
        trees: whether the graph reads trees.
        narrowest: the fewest tokens of a pass.
        token_bytes: of the buffers for each token.
    """

    def __init__(
        self, session: onnxruntime.InferenceSession, memory: Memory, capacity: int, narrowest: int = 1
    ) -> None:
        self.session = session
        self.telling: onnxruntime.InferenceSession | None = None
        self.narrowest = narrowest
        self.memory = memory
        self._place = memory.device.type, memory.device.index or 0
        inputs = {given.name: given for given in session.get_inputs()}
        outputs = {made.name: made for made in session.get_outputs()}
        self.columns = int(outputs["logits"].shape[2])
        self.layers = sum(name.startswith("state.") for name in outputs) - 1
        self._width = int(outputs["state.last"].shape[2])
        self._kind: str = outputs["logits"].type
        self._placed = "positions" in inputs
        self.trees = "bias" in inputs
        assert memory.device.type == "cpu" or not self.trees, "trees are read on a CPU"
        self._nothing = HostMemory().zeros([0], "tensor(float)")  # the bias of a chain
        self._caches = [(name, given.shape) for name, given in inputs.items() if name.startswith("past.")]
        self.capacity = capacity
        self._buffers = self._allocated()
        self.token_bytes = sum(int(buffer[:, :, :1].nbytes) for buffer in self._buffers.values())
        # Attention on a GPU wants the number of tokens on the host and the one before on the device.
        self._before = _Numbers(np.zeros(1, dtype=np.int32), memory)
        self._total = _Numbers(np.zeros(1, dtype=np.int32), HostMemory())
        self._bound: dict[tuple[int, int, tuple[int, ...], bool], _Bound] = {}  # by `_Kind`
        self._shared: dict[tuple[str, int], Any] = {}  # by result and the most rows of it

    def _allocated(self) -> dict[str, Any]:
        capacity = self.capacity + self.narrowest - 1
        # Zeros: what lies behind the sequence is multiplied by 0, and uninitialised memory may hold NaN.
        return {name: self.memory.zeros((1, shape[1], capacity, shape[3]), self._kind) for name, shape in self._caches}

    def fresh(self) -> "Passes":
        """The same graph over buffers of its own."""
        return Passes(self.session, self.memory, self.capacity, self.narrowest)

    def grow(self, capacity: int, filled: int) -> None:
        """Move the first ``filled`` tokens to larger buffers."""
        old, self.capacity = self._buffers, capacity
        self._buffers = self._allocated()
        for name, buffer in self._buffers.items():
            buffer[:, :, :filled] = old[name][:, :, :filled]
        self._bound.clear()

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the buffers."""
        gather_path(self._buffers.values(), start, path)

    def run(
        self,
        tokens: Sequence[int],
        after: int,
        keep: int,
        layers: tuple[int, ...] = (),
        *,
        seen: Seen | None = None,
        told: bool = False,
    ) -> Results:
        """One pass over tokens that come after so many cached ones.

        Args:
            tokens: T ids; there is room for them.
            after: how many of the cached tokens they follow; later ones are overwritten.
            keep: logits of the last so many; R is at least 1.
            layers: whose states are wanted.
            seen: of a tree, which of its B + T tokens, the last ones, each of these sees, ``(T, B + T)``; None for a
                chain.
            told: whether signals are wanted; there is `telling`.
        """
        width = len(tokens)
        kind = width, keep or 1, layers, told  # onnxruntime takes no empty tensors
        bound = self._bound.get(kind) or self._bind(_Kind(*kind))
        narrowest = self.narrowest
        end = after + (width if width > narrowest else narrowest)
        self._before.host[0] = end - 1
        self._total.host[0] = end
        if width == 1:
            bound.ids.host[0, 0] = tokens[0]  # half of the time that a slice takes
        else:
            bound.ids.host[0, :width] = tokens
        if bound.positions is not None:
            start = 0 if seen is None else after + width - seen.shape[1]
            placed = range(after, after + width) if seen is None else start + seen.sum(1) - 1
            bound.positions.host[0, :width] = placed
            bound.positions.host[0, width:] = after  # any that the model knows
        if self.trees:
            bias = self._bias(width, after, seen)  # until the pass has run
            bound.binding.bind_input("bias", "cpu", 0, np.float32, bias.shape, bias.ctypes.data)
        if bound.changed:
            self.memory.send(bound.changed)
        self._session(told).run_with_iobinding(bound.binding)
        return bound.results

    def _session(self, told: bool) -> onnxruntime.InferenceSession:
        return self.session if self.telling is None or not told else self.telling

    def _bind(self, kind: _Kind) -> _Bound:
        places = np.arange(max(kind.width, self.narrowest), dtype=np.int64)
        results, states = self._results(kind)
        ids = _Numbers(places[None].copy(), self.memory)
        rows = _Numbers(places[kind.width - kind.rows : kind.width], self.memory)
        changing = {"before": self._before, "ids": ids}
        if self._placed:
            changing["positions"] = _Numbers(places[None].copy(), self.memory)
        bound = _Bound(
            self._session(kind.told).io_binding(),
            ids,
            changing.get("positions"),
            rows,
            [(one.host, one.there) for one in changing.values() if one.there is not one.host],
            results,
        )
        inputs = {**changing, "rows": rows, "total": self._total}
        for name, numbers in inputs.items():
            where = numbers.memory.device.type, numbers.memory.device.index or 0
            address = numbers.memory.address(numbers.there)
            bound.binding.bind_input(name, *where, ELEMENTS[numbers.kind], numbers.host.shape, address)
        for name, buffer in self._buffers.items():
            given = ELEMENTS[self._kind], tuple(buffer.shape), self.memory.address(buffer)
            bound.binding.bind_input(name, *self._place, *given)
            bound.binding.bind_output(name.replace("past", "present"), *self._place, *given)
        for name, made in {"logits": results.logits, **{state_name(n): rows for n, rows in states.items()}}.items():
            shape = 1, *made.shape
            bound.binding.bind_output(name, *self._place, ELEMENTS[self._kind], shape, self.memory.address(made))
        for name, told in zip(("entropy", "top_prob"), results.signals or (), strict=False):
            bound.binding.bind_output(name, "cpu", 0, np.float32, (1, kind.rows), told.ctypes.data)
        if kind.width <= KEPT:
            self._bound[kind] = bound
        return bound

    def _results(self, kind: _Kind) -> tuple[Results, dict[int, Any]]:
        """Memory for the results of a kind of pass, which short ones share, and all of it that the states take."""

        def room(name: str, rows: int, width: int) -> Any:
            if kind.width > KEPT:
                return self.memory.zeros((rows, width), self._kind)
            size = 1 << (rows - 1).bit_length()
            if (name, size) not in self._shared:
                self._shared[name, size] = self.memory.zeros((size, width), self._kind)
            return self._shared[name, size][:rows]

        logits = room("logits", kind.rows, self.columns)
        width = max(kind.width, self.narrowest)
        states = {layer: room(state_name(layer), width, self._width) for layer in kind.layers}
        read = {layer: rows[: kind.width] for layer, rows in states.items()}
        signals = (np.zeros(kind.rows, np.float32), np.zeros(kind.rows, np.float32)) if kind.told else None
        return Results(logits, read, shared=kind.width <= KEPT, signals=signals), states

    def _bias(self, width: int, after: int, seen: Seen | None) -> npt.NDArray[np.float32]:
        """``(1, 1, T, S)``: zeros, but for what a token of a tree does not see; none sees what comes after it."""
        end, width = after + width, max(width, self.narrowest)
        shape = 1, 1, width, after + width
        if seen is not None:
            bias = np.zeros(shape, dtype=np.float32)
            bias[0, 0, : len(seen), end - seen.shape[1] : end] = np.where(seen, np.float32(0), np.finfo(np.float32).min)
            return bias
        if self._nothing.size < width * (after + width):
            self._nothing = HostMemory().zeros([2 * width * (after + width)], "tensor(float)")
        return self._nothing[: width * (after + width)].reshape(shape)
