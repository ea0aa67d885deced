"""Passes of an ONNX graph over the tokens of several sequences, each with buffers of its own."""

from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter

import numpy as np
import onnxruntime

from specctl.models.onnx.host_memory import HostMemory
from specctl.models.onnx.onnx_passes import state_name
from specctl.models.onnx.packed.bound_pass import Array, BoundPass
from specctl.models.onnx.packed.pass_ways import PassWays
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.runner import RowRequest

FILLER = 0
"""Read by sequences that have nothing to read, behind what they hold; their next token overwrites it."""
SIZES, WORTH = (4, 8), 128
"""Numbers of sequences for which a graph of their own is opened after so many passes that it would have taken."""
LATELY = 16
"""Passes after which a sequence that had nothing to read is taken for an empty place."""
MOST_BOUND = 64
"""Choices of several sequences whose buffers stay bound."""


class PackedPasses:
    """A graph of `packed_graph` on the CPU, over buffers that it owns: `RowPasses`.

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
        watched: layers whose states every pass gives, numbered as `Runner.watch` numbers them.
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
        self._rows = rows
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

    @property
    def rows(self) -> int:
        return self._rows

    def run(self, requests: Sequence[RowRequest]) -> list[Forward]:
        chosen = self._chosen([request.row for request in requests])
        if len(requests) > 1 and (self._apart or self._takes_longer(requests, len(chosen))):
            return [
                kept
                for request in requests
                for kept in map(_kept, self._pass([request], (request.row,) if 1 in self._sessions else chosen))
            ]
        return self._pass(requests, chosen)

    def _takes_longer(self, requests: Sequence[RowRequest], size: int) -> bool:
        """Whether a pass over so many sequences takes longer than one over each that has something to read."""
        fillers = size - len(requests)
        return 1 in self._sessions and self._ways.apart([len(each.tokens) for each in requests], fillers)

    def _chosen(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The sequences of a pass: those that had something to read lately, which seldom change and stay bound."""
        self._made += 1
        self._read_at.update(dict.fromkeys(asked, self._made))
        if len(asked) == 1 and 1 in self._sessions:
            return (asked[0],)
        lately = [row for row in range(self._rows) if self._made - self._read_at[row] < LATELY]
        size = self._size_for(len(lately))
        others = (row for row in range(self._rows) if row not in lately)
        return tuple(sorted([*lately, *islice(others, size - len(lately))]))

    def _size_for(self, count: int) -> int:
        """How many sequences a pass reads where there are so many."""
        size = next((size for size in self._missed if size >= count), self._rows)
        if size in self._sessions:
            return size
        self._missed[size] += 1
        if self._further is None or self._missed[size] <= WORTH:
            return self._rows
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

    def _pass(self, requests: Sequence[RowRequest], chosen: tuple[int, ...]) -> list[Forward]:
        began = perf_counter()
        asked = {request.row: request for request in requests}
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
        return [found[request.row] for request in requests]

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        for buffer in self._buffers.values():
            buffer[row, :, start:stop] = buffer[source, :, start:stop]
        self._lengths[row] = stop  # fillers are written behind

    def _give_states(self, found: Forward, bound: BoundPass, tokens: slice, request: RowRequest) -> None:
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
            name: self._memory.zeros((self._rows, shape[1], capacity, shape[3]), "tensor(float)")
            for name, shape in self._caches.items()
        }
        for name, buffer in old.items():
            self._buffers[name][:, :, : self._capacity] = buffer
        self._capacity = capacity
        self._bound.clear()

    def _bind(self, chosen: tuple[int, ...], layers: tuple[int, ...], *, steps: bool) -> BoundPass:
        """Bind the buffers of some sequences, which takes as long as a pass."""
        if len(self._bound) >= MOST_BOUND + self._rows:
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


def _kept(found: Forward) -> Forward:
    """What the next pass leaves alone."""
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states), found.vocabulary)  # type: ignore[union-attr]
