"""Passes of ONNX graphs over one sequence or several, in key-value buffers that this process owns."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.graph import ELEMENTS, ON_HOST, Array, DeviceMemory, Memory, OnnxGraph, state_name
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, Signals, joined
from specctl.models.passes.tree_sight import Seen, TreeSight, gather_path
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from specctl.models.running.threads import ONE_THREAD, fastest, small_round, timed

if TYPE_CHECKING:
    import torch

CAPACITY = 256  # Initial capacity in tokens; the buffers double when full
PIECE, SCORES = 512, 1 << 21
"""The most prompt tokens in one pass, and the most scores of a head: attention keeps the scores of all heads."""
BOUND_WIDTH = 64
"""Sequences with at most this many tokens share a pass, and its inputs stay bound for the next one of the same kind. A
longer prompt has a pass of its own, since attention pads all sequences to the longest."""
MOST_KINDS = 256  # How many kinds of passes stay bound, of each sequence
ATTENDED, WIDE_HEAD, WIDE_ATTENDED = 2, 128, 65
"""The fewest rows of a sequence in attention on a CPU, where onnxruntime computes a single row otherwise than several:
the last token's is repeated. The keys and values of repeated rows take slots after the sequence, until the next pass.
The scores of heads wider than WIDE_HEAD are computed otherwise where there are fewer than WIDE_ATTENDED keys, so the
last row is repeated until there are as many."""


class _Integers:
    """An input of a few integers.

    Attributes:
        host: to be filled before a pass.
        there: the pass's input: the same memory on the host, a copy by `Memory.send` on a device.
    """

    def __init__(self, numbers: Array, memory: Memory) -> None:
        self.host = numbers
        self.memory = memory
        self.there = memory.like(numbers)

    def bind(self, binding: onnxruntime.IOBinding, name: str) -> None:
        device, index, _, _, address = self.memory.place(self.there)
        binding.bind_input(name, device, index, ELEMENTS[self.host.dtype.name], self.host.shape, address)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a pass over one sequence: logits ``(R, V)`` and the requested states ``(T, D)``.

    They have the memory's own type: numpy arrays on the host.
    """

    logits: Any  # ``(R, V)``
    states: dict[int, Any]  # by layer
    shared: bool  # whether the next pass overwrites them
    signals: Signals | None = None  # see `Forward`, for R rows; None if not requested


class _Kind(NamedTuple):
    """The properties that passes must share to reuse the same bindings."""

    first: int  # the first of B adjacent sequences
    stop: int  # the sequence after the last of them
    width: int  # N, the tokens of all sequences
    longest: int  # S, the rows of each sequence in attention
    rows: int  # R
    layers: tuple[int, ...]  # the layers to return states of
    signals: bool


class _Layout(NamedTuple):
    """The inputs of a pass that depend only on how many tokens each sequence reads; see `sequences`."""

    rows: Array  # (R,) int64
    spread: Array  # (B, S, 2) int64
    packed: Array  # (1, N, 2) int64
    queries: Array  # (B,) int32


Sizes = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""For each of B sequences how many tokens it reads, how many of the last ones have logits, and its rows in attention; 0
of a sequence without tokens."""


@dataclass(slots=True)
class _Bound:
    """A kind of pass with bound inputs and results; only their contents change."""

    binding: onnxruntime.IOBinding
    given: Mapping[str, _Integers]  # its inputs other than caches
    layout: _Layout
    sizes: Sizes  # to which `layout` belongs
    results: Results
    ids: Array  # (1, N) int64
    positions: Array | None  # (1, N) int64; None where the graph does not read them
    before: Array  # (B,) int32
    total: Array  # (1,) int32
    # the arrays that every pass fills and that are elsewhere on the device, with their places there
    sent: Sequence[tuple[Array, Any]]


class OnnxPasses(Passes):
    """`Passes` of an exported graph, over buffers ``(slots, heads, capacity, size)`` that it owns.

    A pass writes in place; a rollback only moves the caller's counter. The same graph reads one sequence and several.
    On a CPU a token's results are the same bit for bit, whatever is read with it.

    Args:
        graph: of the model.
        memory: memory of the device that the graph runs on.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        context: the most tokens of a sequence.
        engine: the engine's name in reports.
        no_trees: why the graph cannot read trees, as the end of a sentence; None if it can.
        draft_vocabulary: the ids of the columns of the graph's logits; None where columns are ids.
        slots: the number of sequences.
        watched: layers to return states of in every pass, numbered as in `Slot.watch`.
        apart: whether each sequence has separate passes, so that their shape does not depend on the others.

    Attributes:
        capacity: the number of tokens of a sequence that fit.
    """

    preparing_seconds: float | None = None
    # the file of the model's `GraphFacts`; None where its files do not identify the model
    facts: Path | None = None

    def __init__(
        self,
        graph: OnnxGraph,
        memory: Memory,
        vocabulary: int,
        context: int,
        *,
        engine: str = "onnx",
        no_trees: str | None,
        draft_vocabulary: DraftVocabulary | None = None,
        slots: int = 1,
        watched: Sequence[int] = (),
        apart: bool = False,
    ) -> None:
        self.graph, self.memory, self.slots = graph, memory, slots
        self.context, self.device, self._engine, self.threads = context, memory.device, engine, graph.threads
        self.no_trees, self.draft_vocabulary = no_trees, draft_vocabulary
        if memory.device.type != "cpu":
            self.no_rows = "specctl lets onnxruntime read several texts at once on a CPU only"
        else:
            self.no_rows = "its graph reads trees" if graph.trees else None
        self._vocabulary, self._apart = vocabulary, apart
        self._attended = ATTENDED if memory.device.type == "cpu" else 1
        wide = self._attended > 1 and any(size > WIDE_HEAD for _, size in graph.caches.values())
        self._least = WIDE_ATTENDED if wide else 0  # tokens of a sequence in attention
        self._watched = tuple(watched)
        self._sight = TreeSight()
        self._can_tell = graph.tells and graph.columns <= vocabulary
        self.capacity = min(CAPACITY, context)
        self._buffers = self._allocated(self.capacity)
        self.token_bytes = sum(int(buffer[:1, :, :1].nbytes) for buffer in self._buffers.values())
        self._no_bias = ON_HOST.zeros([0], "float32")  # the empty bias of a chain
        self._results: dict[tuple[int | None, int], Any] = {}  # by layer, None for logits, and largest number of rows
        self._bound: dict[_Kind, _Bound] = {}

    def _like_this(self, slots: int, *, apart: bool = False) -> "OnnxPasses":
        return OnnxPasses(
            self.graph,
            self.memory,
            self._vocabulary,
            self.context,
            engine=self._engine,
            no_trees=self.no_trees,
            draft_vocabulary=self.draft_vocabulary,
            slots=slots,
            watched=self._watched,
            apart=apart,
        )

    def over(self, slots: int, width: int | None = None) -> "OnnxPasses":
        assert self.no_rows is None, self.no_rows
        return self._like_this(slots, apart=width is not None)

    def fresh(self) -> "OnnxPasses":
        return self._like_this(1)

    def watch(self, layers: Iterable[int]) -> None:
        wanted = {*self._watched, *layers}
        if unknown := [layer for layer in wanted if not LAST <= layer < self.graph.layers]:
            raise IndexError(f"the model has {self.graph.layers} layers, and none is number {unknown[0]}")
        self._watched = tuple(sorted(wanted))

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        gather_path((buffer[slot : slot + 1] for buffer in self._buffers.values()), start, path)
        return start + len(path)

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        for buffer in self._buffers.values():
            buffer[slot, :, start:stop] = buffer[source, :, start:stop]

    def answer(self, request: Request) -> Any:
        return self._one(request) if request.reader is None else super().answer(request)

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        if len(requests) == 1:
            return [self._one(requests[0])]
        widest = 0 if self._apart else BOUND_WIDTH
        groups = [[each] for each in requests if len(each.tokens) > widest]
        if len(groups) < len(requests):
            groups.append([each for each in requests if len(each.tokens) <= widest])
        if len(groups) == 1:
            return self._together(groups[0])
        found = {
            request.slot: _copied(forward)
            for group in groups
            for request, forward in zip(group, self.forward(group), strict=True)
        }
        return [found[request.slot] for request in requests]

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens of each sequence."""
        if tokens <= self.capacity:
            return
        filled = self.capacity
        # Padding may extend beyond the context.
        capacity = max(tokens, min(2 * filled, self.context + BOUND_WIDTH))
        grown = self._allocated(capacity)
        for name, buffer in grown.items():
            buffer[:, :, :filled] = self._buffers[name][:, :, :filled]
        self._buffers, self.capacity = grown, capacity  # only now, since memory may run out before all buffers exist
        self._bound.clear()

    def _allocated(self, capacity: int) -> dict[str, Any]:
        # Zeros: slots after the sequence are multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: self.memory.zeros((self.slots, heads, capacity, size), self.graph.dtype)
            for name, (heads, size) in self.graph.caches.items()
        }

    def _room(self, layer: int | None, rows: int) -> Any:  # (rows, columns or width)
        """Memory for logits or a layer's states, shared by kinds of passes with about as many rows."""
        size = 1 << (rows - 1).bit_length()
        if (found := self._results.get((layer, size))) is None:
            found = self._results[layer, size] = self._own_room(layer, size)
        return found[:rows]

    def _own_room(self, layer: int | None, rows: int) -> Any:  # (rows, columns or width)
        width = self.graph.columns if layer is None else self.graph.width
        return self.memory.zeros((rows, width), self.graph.dtype)

    def _one(self, request: Request) -> Forward:
        """A pass over one sequence; the next one may overwrite numpy's logits and states."""
        slot, after, tokens, keep, hidden, _, _, _, _, parents, before = request
        if len(tokens) > BOUND_WIDTH and len(tokens) > (piece := _piece(after + len(tokens))):
            return self._in_pieces(request, piece)
        seen = None if parents is None else self._sight.grown(parents, before)
        found = self.one(slot, tokens, after, keep, self._layers(hidden=hidden), seen, self._tells(request))
        return self._part(request, found, slice(keep), slice(len(tokens)))

    def _layers(self, *, hidden: bool) -> tuple[int, ...]:
        """The layers to return states of."""
        return tuple(sorted({*self._watched, LAST})) if hidden else self._watched

    def _tells(self, request: Request) -> bool:
        """Whether the pass is to tell signals."""
        if not self._can_tell or request.hidden or not request.keep:
            return False
        return self.wants_signals or (request.reader is not None and request.reader.takes_pass_signals)

    def _part(self, request: Request, found: Results, rows: slice, tokens: slice) -> Forward:
        """One sequence's results of a pass: some rows of logits, and the states of some tokens."""
        logits = found.logits[rows, : self._vocabulary]
        states = {layer: found.states[layer][tokens] for layer in self._watched}
        if not isinstance(logits, np.ndarray):
            logits = self._owned(logits, found)
            states = {layer: self._owned(each, found) for layer, each in states.items()}
        if request.hidden:
            import torch  # a caller that reads the last states is a torch network

            last = found.states[LAST][tokens][len(request.tokens) - request.keep :]
            hidden = torch.as_tensor(self._owned(last, found))
            return Forward(logits, hidden, states or None, self.draft_vocabulary)
        signals = found.signals
        if signals is not None:
            signals = (signals[0][rows], signals[1][rows]) if request.keep else None
        return Forward(logits, None, states or None, self.draft_vocabulary, None, signals)

    def _owned(self, rows: Any, found: Results) -> Any:
        return self.memory.copied(rows) if found.shared else rows

    def _in_pieces(self, request: Request, width: int) -> Forward:
        tokens, parts = request.tokens, []
        for start in range(0, len(tokens), width):
            piece = tokens[start : start + width]
            later = len(tokens) - start - len(piece)
            keep = max(0, min(request.keep - later, len(piece)))
            parts.append(self._one(request._replace(after=request.after + start, tokens=piece, keep=keep)))
        return joined(parts)

    def one(
        self,
        slot: int,
        tokens: Sequence[int],
        after: int,
        keep: int,
        layers: tuple[int, ...] = (),
        seen: Seen | None = None,
        signals: bool = False,
    ) -> Results:
        """One pass of the graph for one sequence.

        Args:
            slot: the sequence.
            tokens: T ids.
            after: the number of cached tokens before them; later ones are overwritten.
            keep: the number of last tokens to compute logits for; R is at least 1.
            layers: the layers to return states of.
            seen: for a tree, ``(T, B + T)``: which of its B + T tokens, the last ones, each of the T tokens sees; None
                for a chain.
            signals: whether to return signals, which the graph must be able to compute.
        """
        width, narrowest = len(tokens), self.graph.narrowest
        longest = self._rows(after, width)
        end = after + longest
        if end > self.capacity:
            self._reserve(end)
        kept = keep or 1  # onnxruntime takes no empty tensors
        padded = width if width > narrowest else narrowest
        kind = _Kind(slot, slot + 1, padded, longest, kept, layers, signals)
        bound = self._bound_for(kind, ([width], [kept], [longest]))
        bound.before[0] = end - 1
        bound.total[0] = end
        if width == 1:
            bound.ids[0, 0] = tokens[0]  # takes half of a slice's time
        else:
            bound.ids[0, :width] = tokens
        if bound.positions is not None:
            start = 0 if seen is None else after + width - seen.shape[1]
            placed = range(after, after + width) if seen is None else start + seen.sum(1) - 1
            bound.positions[0, :width] = placed
            bound.positions[0, width:] = after  # padding may have any valid position
        if self.graph.trees:
            bias = self._bias(width, longest, after, seen)  # referenced until the pass has run
            bound.binding.bind_input("bias", *ON_HOST.place(bias))
        if bound.sent:
            self.memory.send(bound.sent)
        self.graph.session.run_with_iobinding(bound.binding)
        if padded > width and layers:
            own = {layer: states[:width] for layer, states in bound.results.states.items()}
            return replace(bound.results, states=own)
        return bound.results

    def _together(self, requests: Sequence[Request]) -> list[Forward]:
        """A pass over several sequences on the host."""
        asked = sorted(requests, key=lambda request: request.slot)
        first, stop = asked[0].slot, asked[-1].slot + 1
        sizes, keeps, rows, ends = ([0] * (stop - first) for _ in range(4))
        tokens: list[int] = []
        places: list[int] = []
        for request in asked:
            place, after, width = request.slot - first, request.after, len(request.tokens)
            sizes[place], keeps[place], rows[place] = width, request.keep, self._rows(after, width)
            ends[place] = after + rows[place]
            tokens += request.tokens
            places += range(after, after + width)
        # Rounded up to a power of two, so that there are fewer kinds of passes.
        longest = 1 << (max(rows) - 1).bit_length()
        self._reserve(max(request.after for request in asked) + longest)
        layers = self._layers(hidden=any(request.hidden for request in requests))
        signals = any(map(self._tells, requests))
        kind = _Kind(first, stop, len(tokens), longest, sum(keeps) or 1, layers, signals)
        bound = self._bound_for(kind, (sizes, keeps, rows))
        bound.ids[0], bound.total[0] = tokens, max(*ends, longest)
        bound.before[:] = [max(0, end - 1) for end in ends]
        if bound.positions is not None:
            bound.positions[0] = places
        self.graph.session.run_with_iobinding(bound.binding)
        found: dict[int, Forward] = {}
        row = token = 0
        for request in asked:
            kept, own = slice(row, row + request.keep), slice(token, token + len(request.tokens))
            found[request.slot] = self._part(request, bound.results, kept, own)
            row, token = kept.stop, own.stop
        return [found[request.slot] for request in requests]

    def _rows(self, after: int, width: int) -> int:
        """How many rows of a sequence are in attention."""
        attended = self._attended
        if after + width < self._least:
            return max(self._least - after, attended)
        return width if width > attended else attended

    def _bound_for(self, kind: _Kind, sizes: Sizes) -> _Bound:
        bound = self._bound.get(kind) or self._bind(kind, sizes)
        if bound.sizes != sizes:
            for array, new in zip(bound.layout, self._layout(kind, sizes), strict=True):
                array[:] = new
            bound.sizes = sizes
        return bound

    def _layout(self, kind: _Kind, sizes: Sizes) -> _Layout:
        counts, keeps, queries = (np.asarray(each, dtype=np.int64) for each in sizes)  # (B,)
        ends = counts.cumsum()
        spread, packed = np.zeros((len(counts), kind.longest, 2), np.int64), np.zeros((1, kind.width, 2), np.int64)
        within = np.minimum(np.arange(kind.longest), counts[:, None] - 1)  # (B, S); the last token for padding
        spread[:, :, 1] = np.maximum((ends - counts)[:, None] + within, 0)
        packed[0, : ends[-1], 0] = np.repeat(np.arange(len(counts)), counts)
        packed[0, : ends[-1], 1] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        rows = [np.arange(end - keep, end) for end, keep in zip(ends, keeps, strict=True)]
        kept = np.concatenate(rows) if keeps.any() else np.zeros(1, np.int64)
        return _Layout(kept, spread, packed, queries.astype(np.int32))

    def _bind(self, kind: _Kind, sizes: Sizes) -> _Bound:
        if len(self._bound) >= MOST_KINDS * self.slots:
            self._bound.clear()
        graph, memory = self.graph, self.memory
        binding, layout = graph.session.io_binding(), self._layout(kind, sizes)
        changing: dict[str, Array] = {
            name: np.zeros((1, kind.width), np.int64) for name in ("ids", *["positions"] * graph.placed)
        }
        changing["before"] = np.zeros(kind.stop - kind.first, np.int32)
        given = {name: _Integers(array, memory) for name, array in (changing | layout._asdict()).items()}
        given["total"] = _Integers(np.zeros(1, np.int32), ON_HOST)  # on a GPU, attention takes it from the host
        if graph.tells:
            given["signals"] = _Integers(np.array([kind.signals]), ON_HOST)
        for name, numbers in given.items():
            numbers.bind(binding, name)
        for name, buffer in self._buffers.items():
            place = memory.place(buffer[kind.first : kind.stop])
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past", "present"), *place)
        results = self._results_of(kind)
        binding.bind_output("logits", *memory.place(results.logits[None]))
        for layer, made in results.states.items():
            binding.bind_output(state_name(layer), *memory.place(made[None]))
        for name, signal in zip(("entropy", "top_prob"), results.signals or (), strict=False):
            binding.bind_output(name, *ON_HOST.place(signal[None]))
        sent = [(given[name].host, given[name].there) for name in changing if given[name].there is not given[name].host]
        bound = _Bound(
            binding,
            given,
            layout,
            sizes,
            results,
            changing["ids"],
            changing.get("positions"),
            changing["before"],
            given["total"].host,
            sent,
        )
        if kind.longest <= BOUND_WIDTH:
            self._bound[kind] = bound
        return bound

    def _results_of(self, kind: _Kind) -> Results:
        """Memory for the results of a kind of pass, shared by narrow ones."""
        shared = kind.longest <= BOUND_WIDTH
        room = self._room if shared else self._own_room
        logits, states = room(None, kind.rows), {layer: room(layer, kind.width) for layer in kind.layers}
        signals = (np.zeros(kind.rows, np.float32), np.zeros(kind.rows, np.float32)) if kind.signals else None
        return Results(logits, states, shared, signals)

    def _bias(self, width: int, longest: int, after: int, seen: Seen | None) -> npt.NDArray[np.float32]:
        """Attention bias ``(1, 1, S, C + S)`` after C tokens: hides from each token of a tree the tokens that it does
        not see; 0 elsewhere.
        """
        shape = 1, 1, longest, after + longest
        if seen is not None:
            bias, end = np.zeros(shape, dtype=np.float32), after + width
            bias[0, 0, : len(seen), end - seen.shape[1] : end] = np.where(seen, np.float32(0), np.finfo(np.float32).min)
            return bias
        size = longest * (after + longest)
        if self._no_bias.size < size:
            self._no_bias = ON_HOST.zeros([2 * size], "float32")
        return self._no_bias[:size].reshape(shape)


def _piece(tokens: int) -> int:
    """How many tokens of a text of this length are read in one pass: more than share memory for their results."""
    return max(2 * BOUND_WIDTH, min(PIECE, SCORES // tokens))


def _copied(found: Forward) -> Forward:
    """A copy that the next pass does not overwrite."""
    assert isinstance(found.columns, np.ndarray), "several sequences are read on the host"
    signals = found.signals and (found.signals[0].copy(), found.signals[1].copy())
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states), found.vocabulary, None, signals)


@dataclass(frozen=True, slots=True)
class Opening:
    """How to run a graph."""

    device: "torch.device"  # the device to run on
    vocabulary: int  # the pair's shared vocabulary
    context: int  # the most tokens of a sequence
    quantize: str | None  # how its weights are rounded, or None
    no_trees: str | None  # see `OnnxPasses`
    # the ids of the columns of its logits; None where columns are ids
    draft_vocabulary: DraftVocabulary | None = None

    @property
    def memory(self) -> Memory:
        """Memory of the device."""
        return ON_HOST if self.device.type == "cpu" else DeviceMemory(self.device)

    def passes(self, path: Path, seconds: float | None = None, threads: int = 1) -> OnnxPasses:
        """Passes over one sequence.

        Args:
            path: of the graph.
            seconds: wall time spent on making it; None if it existed.
            threads: of a pass on a CPU.
        """
        passes = OnnxPasses(
            OnnxGraph(path, self.device, threads),
            self.memory,
            self.vocabulary,
            self.context,
            engine="onnx" if self.quantize is None else f"onnx, {self.quantize}",
            no_trees=self.no_trees,
            draft_vocabulary=self.draft_vocabulary,
        )
        passes.preparing_seconds = seconds
        return passes

    def fastest(self, path: Path, weight_bytes: int, numbers: Set[int], seconds: float | None = None) -> OnnxPasses:
        """Passes with the fastest number of threads.

        The numbers are tried one after the other, since each session holds its own copy of the weights.

        Args:
            path, seconds: see `passes`.
            weight_bytes: of its model.
            numbers: the numbers of threads to choose from; a small model always gets one.
        """
        choices = [1] if weight_bytes <= ONE_THREAD else sorted(numbers)
        if len(choices) == 1:
            return self.passes(path, seconds, choices[0])
        tried: dict[int, list[float]] = {}
        passes: OnnxPasses | None = None
        for threads in choices:
            passes = None  # frees the session before the next one is opened
            passes = self.passes(path, seconds, threads)
            tried |= self._tried(passes, threads)
        if (best := fastest(tried)) != choices[-1]:
            passes = None
            passes = self.passes(path, seconds, best)
        assert passes is not None, "there is a choice"
        passes.tried = {threads: median(found) * 1e3 for threads, found in tried.items()}
        return passes

    def _tried(self, passes: OnnxPasses, threads: int) -> dict[int, list[float]]:
        """Seconds of small rounds, by number of threads."""
        play = small_round([Slot(passes)], self.vocabulary)
        return timed(lambda _: play(), [threads])
