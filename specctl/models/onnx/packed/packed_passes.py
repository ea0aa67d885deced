"""Passes of an ONNX graph over the tokens of several sequences, each with buffers of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.host_memory import HostMemory
from specctl.models.onnx.onnx_passes import state_name
from specctl.models.onnx.packed.pass_ways import PassWays
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.runner import RowRequest

Array = npt.NDArray[Any]
FILLER = 0
"""Read by sequences that have nothing to read, behind what they hold; their next token overwrites it."""


@dataclass(slots=True)
class _Bound:
    """Passes of one sequence or of all whose buffers are bound, and what was bound for the last of them."""

    binding: onnxruntime.IOBinding
    kind: tuple[int, int] = (0, 0)  # N tokens and R rows of logits of the last pass
    ids: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    positions: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (R,)
    logits: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # (R, V)
    states: dict[int, Array] = field(default_factory=dict)  # (N, D) by layer


class PackedPasses:
    """A graph of `packed_graph` on the CPU, over buffers that it owns: `RowPasses`.

    A pass of that graph is over all sequences: those that have nothing to read read a filler. A pass over one sequence
    is one of the graph that `packed_graph` was made from, over the same buffers; where few sequences have something to
    read they have such passes one after the other, if that takes less time (`PassWays`).

    Args:
        session: of `open_session`.
        alone: the same of the graph for one sequence; None for passes over all only.
        rows: how many sequences the graph reads.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        capacity: tokens of a sequence to make room for at first; buffers double when one is full.
        ids: of the columns of the graph's logits; None where a column is an id.
        watched: layers whose states every pass gives, numbered as `Runner.watch` numbers them.
        apart: whether each sequence has passes of its own, whose shape does not depend on the others.
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
    ) -> None:
        self._session, self._alone, self._rows = session, alone, rows
        self._vocabulary, self._ids = vocabulary, ids
        self._watched, self._apart = tuple(watched), apart
        self._ways = PassWays(rows)
        self._memory = HostMemory()
        inputs = {given.name: given for given in session.get_inputs()}
        made = {each.name: each.shape for each in session.get_outputs()}
        self._widths = {name: int(made[name][2]) for name in ("logits", "state.last")}
        self._placed = "positions" in inputs
        self._caches = {name: given.shape for name, given in inputs.items() if name.startswith("past.")}
        self._lengths = [0] * rows
        self._capacity = 0
        self._buffers: dict[str, Array] = {}
        self._sizes = np.ones(rows, dtype=np.int64)
        self._before, self._total = np.zeros((2, rows, 1), dtype=np.int32)
        self._bound: dict[tuple[int | None, tuple[int, ...]], _Bound] = {}
        self._results: dict[tuple[str | int, int], Array] = {}
        self._reserve(capacity)

    @property
    def rows(self) -> int:
        return self._rows

    def run(self, requests: Sequence[RowRequest]) -> list[Forward]:
        if len(requests) > 1 and (self._apart or self._read_apart(requests)):
            return [kept for request in requests for kept in map(_kept, self._pass([request]))]
        return self._pass(requests)

    def _read_apart(self, requests: Sequence[RowRequest]) -> bool:
        """Whether passes over each sequence take less time than one over all."""
        return self._alone is not None and self._ways.apart([len(request.tokens) for request in requests])

    def _pass(self, requests: Sequence[RowRequest]) -> list[Forward]:
        began = perf_counter()
        only = requests[0].row if len(requests) == 1 and self._alone is not None else None
        asked = {request.row: request for request in requests}
        tokens: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        sizes: list[int] = []
        lengths = self._lengths.copy()  # of all, if the pass is made: memory may run out before
        for row in range(self._rows) if only is None else (only,):
            request, length = asked.get(row), lengths[row]
            if request is None:
                tokens.append(FILLER)
                places.append(length)
                sizes.append(1)
                continue
            after, size = request.after, len(request.tokens)
            tokens += request.tokens
            places += range(after, after + size)
            sizes.append(size)
            lengths[row] = after + size
            wanted += range(len(tokens) - request.keep, len(tokens))
        ends = [length + (row not in asked) for row, length in enumerate(lengths)]
        self._reserve(max(ends))
        self._total[:, 0] = ends
        np.subtract(self._total, 1, out=self._before)
        kept = wanted or [0]  # onnxruntime takes no empty tensors
        hidden = any(request.hidden for request in requests)
        layers = tuple(sorted({*self._watched, LAST})) if hidden else self._watched
        known = self._bound.get((only, layers))
        bound = known or self._bind(only, layers)
        if bound.kind != (len(tokens), len(kept)):
            self._resize(bound, len(tokens), len(kept), layers)
        bound.ids[:], bound.positions[:], bound.rows[:] = tokens, places, kept
        if only is None:
            self._sizes[:] = sizes
        self._session_of(only).run_with_iobinding(bound.binding)
        self._lengths = lengths
        if known is not None:
            self._ways.took(len(tokens), perf_counter() - began, alone=only is not None)
        logits = bound.logits[: len(wanted), : self._vocabulary]  # (R, V)
        found: dict[int, Forward] = {}
        start = end = 0
        for row, size in zip(range(self._rows) if only is None else (only,), sizes, strict=True):
            end += size
            if (request := asked.get(row)) is None:
                continue
            own = slice(start, start + request.keep)
            found[row] = Forward(logits[own], None, None, self._ids)
            if layers:
                self._give_states(found[row], bound, slice(end - size, end), request)
            start = own.stop
        return [found[request.row] for request in requests]

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        for name in self._caches:
            if name.endswith(f".{row}"):
                other = name.removesuffix(f".{row}") + f".{source}"
                self._buffers[name][:, :, start:stop] = self._buffers[other][:, :, start:stop]
        self._lengths[row] = stop  # fillers are written behind

    def _session_of(self, only: int | None) -> onnxruntime.InferenceSession:
        return self._session if only is None or self._alone is None else self._alone

    def _give_states(self, found: Forward, bound: _Bound, tokens: slice, request: RowRequest) -> None:
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
            name: self._memory.zeros((1, shape[1], capacity, shape[3]), "tensor(float)")
            for name, shape in self._caches.items()
        }
        for name, buffer in old.items():
            self._buffers[name][:, :, : self._capacity] = buffer
        self._capacity = capacity
        self._bound.clear()

    def _bind(self, only: int | None, layers: tuple[int, ...]) -> _Bound:
        """Bind the buffers of one sequence, or of all, which takes as long as a pass."""
        numbered = {f"before.{row}": self._before[row] for row in range(self._rows)}
        numbered |= {f"total.{row}": self._total[row] for row in range(self._rows)}
        given, buffers = {**numbered, "sizes": self._sizes}, self._buffers
        if only is not None:
            end = f".{only}"
            given, buffers = (
                {name.removesuffix(end): array for name, array in each.items() if name.endswith(end)}
                for each in (numbered, buffers)
            )
        bound = self._bound[only, layers] = _Bound(self._session_of(only).io_binding())
        for name, array in {**given, **buffers}.items():
            _give(bound, name, array)
        for name, array in buffers.items():
            _take(bound, name.replace("past", "present"), array)
        return bound

    def _resize(self, bound: _Bound, width: int, rows: int, layers: tuple[int, ...]) -> None:
        """Bind inputs and results of N tokens, with R rows of logits."""
        bound.kind = width, rows
        bound.ids, bound.positions, bound.rows = (np.zeros(size, dtype=np.int64) for size in (width, width, rows))
        bound.logits = self._result("logits", rows, self._widths["logits"])
        bound.states = {layer: self._result(layer, width, self._widths["state.last"]) for layer in layers}
        _give(bound, "ids", bound.ids[None])
        _give(bound, "rows", bound.rows)
        if self._placed:
            _give(bound, "positions", bound.positions[None])
        _take(bound, "logits", bound.logits[None])
        for layer, states in bound.states.items():
            _take(bound, state_name(layer), states[None])

    def _result(self, name: str | int, rows: int, width: int) -> Array:  # (rows, width)
        """Memory for a result, which kinds of passes of about as many rows share."""
        room = 1 << (rows - 1).bit_length()
        if (whole := self._results.get((name, room))) is None:
            whole = self._results[name, room] = np.zeros((room, width), dtype=np.float32)
        return whole[:rows]


def _kept(found: Forward) -> Forward:
    """What the next pass leaves alone."""
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states), found.vocabulary)  # type: ignore[union-attr]


def _give(bound: _Bound, name: str, array: Array) -> None:
    bound.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _take(bound: _Bound, name: str, array: Array) -> None:
    bound.binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
