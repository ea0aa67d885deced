"""Passes of an ONNX graph over the tokens of several sequences, each with buffers of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.host_memory import HostMemory
from specctl.models.onnx.onnx_passes import state_name
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import LAST
from specctl.models.running.runner import RowRequest

Array = npt.NDArray[Any]
FILLER = 0
"""Read by sequences that have nothing to read, behind what they hold; their next token overwrites it."""
KEPT = 64
"""Passes of at most so many tokens keep their inputs bound for the next of the same kind."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A kind of pass, N tokens and R rows of logits, with its inputs and results bound."""

    binding: onnxruntime.IOBinding
    ids: Array  # (N,) int64
    positions: Array  # (N,) int64
    rows: Array  # (R,) int64
    logits: Array  # (R, V)
    states: dict[int, Array]  # (N, D) by layer


class PackedPasses:
    """A graph of `packed_graph` on the CPU, over buffers that it owns: `RowPasses`.

    Args:
        session: of `open_session`.
        rows: how many sequences the graph reads.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        capacity: tokens of a sequence to make room for at first; buffers double when one is full.
        ids: of the columns of the graph's logits; None where a column is an id.
        watched: layers whose states every pass gives, numbered as `Runner.watch` numbers them.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        rows: int,
        vocabulary: int,
        capacity: int,
        ids: DraftVocabulary | None = None,
        watched: Sequence[int] = (),
    ) -> None:
        self._session, self._rows, self._vocabulary, self._ids = session, rows, vocabulary, ids
        self._watched = tuple(watched)
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
        self._bound: dict[tuple[int, int, tuple[int, ...]], _Bound] = {}
        self._reserve(capacity)

    @property
    def rows(self) -> int:
        return self._rows

    def run(self, requests: Sequence[RowRequest]) -> list[Forward]:
        asked = {request.row: request for request in requests}
        tokens: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        sizes: list[int] = []
        for row, length in enumerate(self._lengths):
            request = asked.get(row)
            if request is None:
                tokens.append(FILLER)
                places.append(length)
                sizes.append(1)
                continue
            after, size = request.after, len(request.tokens)
            tokens += request.tokens
            places += range(after, after + size)
            sizes.append(size)
            self._lengths[row] = after + size
            wanted += range(len(tokens) - request.keep, len(tokens))
        ends = [length + (row not in asked) for row, length in enumerate(self._lengths)]
        self._sizes[:], self._total[:, 0] = sizes, ends
        np.subtract(self._total, 1, out=self._before)
        self._reserve(max(ends))
        kept = wanted or [0]  # onnxruntime takes no empty tensors
        hidden = any(request.hidden for request in requests)
        layers = tuple(sorted({*self._watched, LAST})) if hidden else self._watched
        kind = len(tokens), len(kept), layers
        bound = self._bound.get(kind) or self._bind(*kind)
        bound.ids[:], bound.positions[:], bound.rows[:] = tokens, places, kept
        self._session.run_with_iobinding(bound.binding)
        logits = bound.logits[: len(wanted), : self._vocabulary]  # (R, V)
        found: dict[int, Forward] = {}
        start = end = 0
        for row, size in enumerate(sizes):
            end += size
            if (request := asked.get(row)) is None:
                continue
            own = slice(start, start + request.keep)
            found[row] = Forward(logits[own], None, None, self._ids)
            if layers:
                self._give_states(found[row], bound, slice(end - size, end), request)
            start = own.stop
        return [found[request.row] for request in requests]

    def _give_states(self, found: Forward, bound: _Bound, tokens: slice, request: RowRequest) -> None:
        import torch  # whoever reads states is a network

        if request.hidden:
            found.hidden = torch.from_numpy(bound.states[LAST][tokens.stop - request.keep : tokens.stop].copy())
        if self._watched:
            found.states = {layer: torch.from_numpy(bound.states[layer][tokens].copy()) for layer in self._watched}

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

    def _bind(self, width: int, rows: int, layers: tuple[int, ...]) -> _Bound:
        logits = np.zeros((rows, self._widths["logits"]), dtype=np.float32)
        states = {layer: np.zeros((width, self._widths["state.last"]), dtype=np.float32) for layer in layers}
        ids, positions, places = (np.zeros(size, dtype=np.int64) for size in (width, width, rows))
        bound = _Bound(self._session.io_binding(), ids, positions, places, logits, states)
        given = {"ids": ids[None], "rows": places, "sizes": self._sizes}
        if self._placed:
            given["positions"] = positions[None]
        for name, counts in (("before", self._before), ("total", self._total)):
            given |= {f"{name}.{row}": counts[row] for row in range(self._rows)}
        for name, array in {**given, **self._buffers}.items():
            bound.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in self._buffers.items():
            present = name.replace("past", "present")
            bound.binding.bind_output(present, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, made in {"logits": logits, **{state_name(layer): made for layer, made in states.items()}}.items():
            bound.binding.bind_output(name, "cpu", 0, np.float32, (1, *made.shape), made.ctypes.data)
        if width <= KEPT * self._rows:
            self._bound[width, rows, layers] = bound
        return bound
