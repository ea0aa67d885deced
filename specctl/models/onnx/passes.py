"""Where the buffers of a graph's passes lie: on the host they are arrays of numpy. No torch here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, Signals
from specctl.models.passes.host_device import HOST
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.tree_sight import Seen, gather_path
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.passes import Passes as EnginePasses
from specctl.models.running.passes import Request

if TYPE_CHECKING:
    import torch

Integers = npt.NDArray[np.int32] | npt.NDArray[np.int64]
KINDS = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}
"""Kinds of tensors by onnxruntime's names, as numpy and torch name them."""
LINE = 64
"""Bytes of a line of the processor's caches, at which buffers begin."""


class Memory(Protocol):
    """Memory that passes read and write.

    Attributes:
        device: where it is.
    """

    @property
    def device(self) -> "torch.device": ...

    def zeros(self, shape: Sequence[int], kind: str) -> Any:
        """A buffer; ``kind`` is onnxruntime's name of its numbers, such as ``tensor(float)``."""

    def address(self, buffer: Any) -> int:
        """Where a buffer begins."""

    def copied(self, rows: Any) -> Any:
        """Rows in memory of their own."""

    def beside(self, numbers: Integers) -> Any:
        """A buffer for numbers that are filled in on the host, which takes numpy a tenth of torch's time for so few."""

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        """Bring numbers to the buffers `beside` them, and wait until all that was given to the device is done."""


class HostMemory:
    """`Memory` of the processor's own, which needs nothing to be sent."""

    device = HOST

    def zeros(self, shape: Sequence[int], kind: str) -> npt.NDArray[Any]:
        dtype = np.dtype(KINDS[kind])
        size = prod(shape) * dtype.itemsize
        whole = np.zeros(size + LINE, dtype=np.uint8)
        start = -self.address(whole) % LINE
        found: npt.NDArray[Any] = whole[start : start + size].view(dtype).reshape(shape)
        return found

    def address(self, buffer: npt.NDArray[Any]) -> int:
        return buffer.ctypes.data

    def copied(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return rows.copy()

    def beside(self, numbers: Integers) -> Integers:
        return numbers

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        pass


class DeviceMemory:
    """`Memory` of a device, as tensors of torch.

    What is filled anew in each pass must not be an inference tensor.

    Args:
        device: where the graph runs.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.device, self._torch = device, torch

    def zeros(self, shape: Sequence[int], kind: str) -> "torch.Tensor":
        with self._torch.inference_mode(False):
            return self._torch.zeros(*shape, dtype=getattr(self._torch, KINDS[kind]), device=self.device)

    def address(self, buffer: "torch.Tensor") -> int:
        return buffer.data_ptr()

    def copied(self, rows: "torch.Tensor") -> "torch.Tensor":
        return rows.clone()

    def beside(self, numbers: Integers) -> "torch.Tensor":
        with self._torch.inference_mode(False):
            return self._torch.tensor(numbers, device=self.device)

    def send(self, numbers: Iterable[tuple[Integers, Any]]) -> None:
        for host, there in numbers:
            there.copy_(self._torch.from_numpy(host))
        if self.device.type == "cuda":
            self._torch.cuda.current_stream(self.device).synchronize()


ELEMENTS = {"tensor(float)": 1, "tensor(int32)": 6, "tensor(int64)": 7, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""ONNX's numbers for kinds of tensors, by onnxruntime's names."""
KEPT = 64
"""Passes at most this wide keep their inputs bound for the next of the same kind."""


def state_name(layer: int) -> str:
    """The output that holds a layer's states, numbered as `Slot.watch` numbers them."""
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


WIDEST = 8
"""Tokens of a sequence from which on a pass over all is not weighed against others: it is a prompt's."""
RISING = 1.02
"""By how much the least time of a pass is taken to have risen when the next one is timed."""
AGAIN = 128
"""Once in so many decisions the way that seems to take longer is taken, and timed anew."""


class PassWays:
    """Learns what passes take, and which way takes less.

    A pass takes what it took at least with as many tokens, else with the nearest number that was timed; less in
    proportion if that is larger, so that a way which may be faster is tried.

    Args:
        rows: sequences of a pass over all.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._one: dict[int, float] = {}  # seconds of a pass over one sequence, by its tokens
        self._all: dict[int, float] = {}  # of one over all, by theirs, fillers included
        self._decided = 0

    def apart(self, sizes: Sequence[int], fillers: int) -> bool:
        """Whether some sequences are to have a pass each.

        Args:
            sizes: how many tokens each of them reads.
            fillers: how many others would read one each.
        """
        few = 1 < len(sizes) <= self._rows // 2
        if not few or max(sizes) > WIDEST or not self._all:  # which is timed first
            return False
        if not self._one:
            return True
        self._decided += 1
        whole = _expected(self._all, sum(sizes) + fillers)
        less = sum(_expected(self._one, size) for size in sizes) < whole
        return less is not (self._decided % AGAIN == 0)

    def took(self, tokens: int, seconds: float, *, alone: bool) -> None:
        """A pass was made.

        Args:
            tokens: that it read, fillers included.
            seconds: that it took.
            alone: whether it was over one sequence.
        """
        if tokens > (WIDEST if alone else WIDEST * self._rows):
            return
        known = self._one if alone else self._all
        known[tokens] = min(seconds, RISING * known.get(tokens, seconds))


def _expected(known: dict[int, float], tokens: int) -> float:
    if (found := known.get(tokens)) is not None:
        return found
    near = min(known, key=lambda each: abs(each - tokens))
    return known[near] * min(1.0, tokens / near)


Array = npt.NDArray[Any]


@dataclass(slots=True)
class BoundPass:
    """Passes of some sequences whose buffers are bound, and what was bound for the last of them."""

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    sizes: Array  # (S,) tokens of each
    before: Array  # (S, 1) tokens that it holds, less one
    total: Array  # (S, 1) and behind the pass
    longest: Array  # (1,) of these
    kind: tuple[int, int] = (0, 0)  # N tokens and R rows of logits of the last pass
    ids: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    positions: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (R,)
    logits: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # (R, V)
    states: dict[int, Array] = field(default_factory=dict)  # (N, D) by layer

    @classmethod
    def of(cls, session: onnxruntime.InferenceSession, count: int) -> Self:
        """One over so many sequences, of which nothing is bound."""
        before, total = np.zeros((2, count, 1), dtype=np.int32)
        sizes, longest = np.ones(count, dtype=np.int64), np.zeros(1, dtype=np.int32)
        return cls(session, session.io_binding(), sizes, before, total, longest)

    def give(self, name: str, array: Array) -> None:
        """Let an input be read there."""
        self.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def take(self, name: str, array: Array) -> None:
        """Let a result be written there."""
        self.binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


FILLER = 0
"""Read by sequences that have nothing to read, behind what they hold; their next token overwrites it."""
SIZES, WORTH = (4, 8), 128
"""Numbers of sequences for which a graph of their own is opened after so many passes that it would have taken."""
LATELY = 16
"""Passes after which a sequence that had nothing to read is taken for an empty place."""
MOST_BOUND = 64
"""Choices of several sequences whose buffers stay bound."""


class PackedPasses(EnginePasses):
    """A graph of `packed_graph` on the CPU, over buffers that it owns: `Passes`.

    A pass of that graph is over all sequences: those that have nothing to read read a filler. A pass over one sequence
    is one of the graph that `packed_graph` was made from, over the same buffers; where few sequences have something to
    read they have such passes one after the other, if that takes less time (`PassWays`). Where few have had anything to
    read for long, a graph for fewer sequences reads them. One token of each is read by a graph of its own.

    Args:
        session: of `open_session`.
        alone: the same of the graph for one sequence; None for passes over all only.
        rows: how many sequences the graph reads.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        capacity: tokens of a sequence to make room for at first; buffers double when one is full.
        ids: of the columns of the graph's logits; None where a column is an id.
        watched: layers whose states every pass gives, numbered as `Slot.watch` numbers them.
        apart: whether each sequence has passes of its own, whose shape does not depend on the others.
        further: opens a graph for so many sequences, or for None that for one token of each, which it keeps; None for
            no such graphs.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        alone: onnxruntime.InferenceSession | None,
        rows: int,
        vocabulary: int,
        capacity: int,
        ids: DraftVocabulary | None = None,
        watched: Sequence[int] = (),
        *,
        apart: bool = False,
        further: Callable[[int | None], onnxruntime.InferenceSession] | None = None,
    ) -> None:
        self.slots = rows
        self._further, self._missed = further, dict.fromkeys((size for size in SIZES if size < rows), 0)
        self._sessions = {rows: session} if alone is None else {1: alone, rows: session}
        self._vocabulary, self._ids = vocabulary, ids
        self._watched, self._apart = tuple(watched), apart
        self._ways = PassWays(rows)
        self._memory = HostMemory()
        inputs = {given.name: given for given in session.get_inputs()}
        made = {each.name: each.shape for each in session.get_outputs()}
        self._widths = {name: int(made[name][2]) for name in ("logits", "state.last")}
        self._placed = "positions" in inputs
        caches = [name for name in inputs if name.startswith("past.") and name.endswith(".0")]
        self._caches = {name[:-2]: inputs[name].shape for name in caches}
        self._lengths = [0] * rows
        self._made = 0  # passes
        self._read_at = dict.fromkeys(range(rows), -LATELY)  # the last pass in which a sequence had something to read
        self._capacity = 0
        self._buffers: dict[str, Array] = {}  # (S, heads, capacity, head_dim) by the name of one sequence's
        self._bound: dict[tuple[tuple[int, ...], tuple[int, ...], bool], BoundPass] = {}
        self._results: dict[tuple[str | int, int], Array] = {}
        self._reserve(capacity)

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        chosen = self._chosen([request.slot for request in requests])
        if len(requests) > 1 and (self._apart or self._takes_longer(requests, len(chosen))):
            return [
                kept
                for request in requests
                for kept in map(_copied, self._pass([request], (request.slot,) if 1 in self._sessions else chosen))
            ]
        return self._pass(requests, chosen)

    def _takes_longer(self, requests: Sequence[Request], size: int) -> bool:
        """Whether a pass over so many sequences takes longer than one over each that has something to read."""
        fillers = size - len(requests)
        return 1 in self._sessions and self._ways.apart([len(each.tokens) for each in requests], fillers)

    def _chosen(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The sequences of a pass: those that had something to read lately, which seldom change and stay bound."""
        self._made += 1
        self._read_at.update(dict.fromkeys(asked, self._made))
        if len(asked) == 1 and 1 in self._sessions:
            return (asked[0],)
        lately = [row for row in range(self.slots) if self._made - self._read_at[row] < LATELY]
        size = self._size_for(len(lately))
        others = (row for row in range(self.slots) if row not in lately)
        return tuple(sorted([*lately, *islice(others, size - len(lately))]))

    def _size_for(self, count: int) -> int:
        """How many sequences a pass reads where there are so many."""
        size = next((size for size in self._missed if size >= count), self.slots)
        if size in self._sessions:
            return size
        self._missed[size] += 1
        if self._further is None or self._missed[size] <= WORTH:
            return self.slots
        self._sessions[size] = self._opened(size)
        return size

    def _steps_together(self, chosen: tuple[int, ...], tokens: int) -> bool:
        """Whether sequences that lie side by side have a token each, and there is a graph for that."""
        return self._further is not None and 1 < tokens == len(chosen) == 1 + chosen[-1] - chosen[0]

    def _opened(self, size: int | None) -> onnxruntime.InferenceSession:
        """A further graph: for so many sequences, or for None that for one token of each."""
        assert self._further is not None
        with preparing():
            return self._further(size)

    def _pass(self, requests: Sequence[Request], chosen: tuple[int, ...]) -> list[Forward]:
        began = perf_counter()
        asked = {request.slot: request for request in requests}
        tokens: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        sizes: list[int] = []
        lengths = self._lengths.copy()  # of all, if the pass is made: memory may run out before
        for row in chosen:
            request, length = asked.get(row), lengths[row]
            if request is None:
                tokens.append(FILLER)
                places.append(length)
                sizes.append(1)
                continue
            after, width = request.after, len(request.tokens)
            tokens += request.tokens
            places += range(after, after + width)
            sizes.append(width)
            lengths[row] = after + width
            wanted += range(len(tokens) - request.keep, len(tokens))
        ends = [lengths[row] + (row not in asked) for row in chosen]
        self._reserve(max(ends))
        kept = wanted or [0]  # onnxruntime takes no empty tensors
        hidden = any(request.hidden for request in requests)
        layers = tuple(sorted({*self._watched, LAST})) if hidden else self._watched
        steps = self._steps_together(chosen, len(tokens))
        known = self._bound.get((chosen, layers, steps))
        bound = known or self._bind(chosen, layers, steps=steps)
        if bound.kind != (len(tokens), len(kept)):
            self._resize(bound, len(tokens), len(kept), layers)
        bound.ids[:], bound.positions[:], bound.rows[:] = tokens, places, kept
        bound.sizes[:], bound.total[:, 0] = sizes, ends
        np.subtract(bound.total, 1, out=bound.before)
        bound.longest[0] = max(ends)
        bound.session.run_with_iobinding(bound.binding)
        self._lengths = lengths
        if known is not None:
            self._ways.took(len(tokens), perf_counter() - began, alone=len(chosen) == 1)
        logits = bound.logits[: len(wanted), : self._vocabulary]  # (R, V)
        found: dict[int, Forward] = {}
        start = end = 0
        for row, width in zip(chosen, sizes, strict=True):
            end += width
            if (request := asked.get(row)) is None:
                continue
            own = slice(start, start + request.keep)
            found[row] = Forward(logits[own], None, None, self._ids)
            if layers:
                self._give_states(found[row], bound, slice(end - width, end), request)
            start = own.stop
        return [found[request.slot] for request in requests]

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        for buffer in self._buffers.values():
            buffer[slot, :, start:stop] = buffer[source, :, start:stop]
        self._lengths[slot] = stop  # fillers are written behind

    def _give_states(self, found: Forward, bound: BoundPass, tokens: slice, request: Request) -> None:
        if self._watched:
            found.states = {layer: bound.states[layer][tokens] for layer in self._watched}
        if request.hidden:
            import torch  # whoever reads the last states is a network

            found.hidden = torch.from_numpy(bound.states[LAST][tokens.stop - request.keep : tokens.stop].copy())

    def _reserve(self, tokens: int) -> None:
        """Make room for so many tokens of each sequence, and one that nobody asked for."""
        if tokens < self._capacity:
            return
        capacity = max(tokens + 1, 2 * self._capacity)
        old = self._buffers
        self._buffers = {
            name: self._memory.zeros((self.slots, shape[1], capacity, shape[3]), "tensor(float)")
            for name, shape in self._caches.items()
        }
        for name, buffer in old.items():
            self._buffers[name][:, :, : self._capacity] = buffer
        self._capacity = capacity
        self._bound.clear()

    def _bind(self, chosen: tuple[int, ...], layers: tuple[int, ...], *, steps: bool) -> BoundPass:
        """Bind the buffers of some sequences, which takes as long as a pass."""
        if len(self._bound) >= MOST_BOUND + self.slots:
            self._bound.clear()
        count = len(chosen)
        bound = BoundPass.of(self._opened(None) if steps else self._sessions[count], count)
        before, total = bound.before, bound.total
        # The graph for one has no numbers, and that for one token of each reads what lies side by side.
        together = slice(chosen[0], chosen[-1] + 1)
        if steps or count == 1:
            parts = [("", together, before[:, 0], bound.longest if steps else total[0])]
        else:
            parts = [
                (f".{place}", slice(row, row + 1), before[place], total[place]) for place, row in enumerate(chosen)
            ]
        for end, rows, its_before, its_total in parts:
            bound.give(f"before{end}", its_before)
            bound.give(f"total{end}", its_total)
            for name, buffer in self._buffers.items():
                bound.give(f"{name}{end}", buffer[rows])
                bound.take(f"{name.replace('past', 'present')}{end}", buffer[rows])
        if count > 1 and not steps:
            bound.give("sizes", bound.sizes)
        self._bound[chosen, layers, steps] = bound
        return bound

    def _resize(self, bound: BoundPass, width: int, rows: int, layers: tuple[int, ...]) -> None:
        """Bind inputs and results of N tokens, with R rows of logits."""
        bound.kind = width, rows
        bound.ids, bound.positions, bound.rows = (np.zeros(size, dtype=np.int64) for size in (width, width, rows))
        bound.logits = self._result("logits", rows, self._widths["logits"])
        bound.states = {layer: self._result(layer, width, self._widths["state.last"]) for layer in layers}
        bound.give("ids", bound.ids[None])
        bound.give("rows", bound.rows)
        if self._placed:
            bound.give("positions", bound.positions[None])
        bound.take("logits", bound.logits[None])
        for layer, states in bound.states.items():
            bound.take(state_name(layer), states[None])

    def _result(self, name: str | int, rows: int, width: int) -> Array:  # (rows, width)
        """Memory for a result, which kinds of passes of about as many rows share."""
        room = 1 << (rows - 1).bit_length()
        if (whole := self._results.get((name, room))) is None:
            whole = self._results[name, room] = np.zeros((room, width), dtype=np.float32)
        return whole[:rows]


def _copied(found: Forward) -> Forward:
    """What the next pass leaves alone."""
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states), found.vocabulary)  # type: ignore[union-attr]
