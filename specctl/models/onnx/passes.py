"""Passes of ONNX graphs over one sequence or several, in key-value buffers that this process owns."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.onnx.graph import ELEMENTS, ON_HOST, Array, DeviceMemory, Memory, OnnxGraph, state_name
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, Signals, joined
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.tree_sight import Seen, TreeSight, gather_path
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from specctl.models.running.threads import fastest, small_round, timed

if TYPE_CHECKING:
    import torch

CAPACITY = 256  # Initial capacity in tokens; the buffers double when full
PIECE = 512  # Prompt tokens in one pass, limited so that attention's scratch memory stays small
BOUND_WIDTH = 64
"""Passes over one sequence up to this width keep their inputs bound for the next one of the same kind."""
SMALL = 64 << 20
"""The largest graph, with weights, in bytes, to be opened several times, for passes over fewer sequences and for
signals. Each has its own weights.
"""
SIGNALS_WORTH = 100  # Passes that wanted signals before a graph that computes them is opened
FILLER = 0  # Read by sequences with nothing to read, after their cached tokens; their next token overwrites it
SIZES, SIZE_WORTH = (4, 8), 128
"""A graph for this number of sequences is opened after this number of passes that could have used it."""
LATELY = 16  # Passes without tokens after which a sequence counts as an empty slot
MOST_BOUND = 64  # How many choices of sequences, and kinds of passes over each choice, stay bound
MOST_KINDS = 256  # How many kinds of passes over one sequence stay bound
ONE_THREAD = 16 << 20
"""Models up to this size in bytes run with one thread: their passes are over before other threads have started."""
WIDEST = 8  # A sequence with more tokens than this reads a prompt, and the ways of its pass are not compared
RISING = 1.02  # The least time of a pass is assumed to rise by this factor between two measurements
AGAIN = 128  # One in this many decisions takes the seemingly slower way, to time it again


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
    """The properties that passes over one sequence must share to reuse the same bindings."""

    slot: int
    width: int  # T
    rows: int  # R
    layers: tuple[int, ...]  # the layers to return states of
    signals: bool


@dataclass(slots=True)
class _BoundOne:
    """A kind of pass over one sequence with bound inputs and results; only their contents change."""

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    ids: _Integers  # (1, T) int64
    positions: _Integers | None  # (1, T) int64; None where the graph does not read them
    fixed: dict[str, _Integers]  # the inputs that stay the same
    sent: Sequence[tuple[Array, Any]]  # the arrays that every pass fills and sends, with their destinations
    results: Results


@dataclass(slots=True)
class _BoundSeveral:
    """Passes over some sequences on the host with bound buffers, and the bindings of the last pass."""

    session: onnxruntime.InferenceSession
    binding: onnxruntime.IOBinding
    sizes: Array  # (S,) number of rows of each that attention reads
    before: Array  # (S, 1) cached tokens after the pass, minus one
    total: Array  # (S, 1) cached tokens after the pass
    longest: Array  # (1,) the largest of `total`
    kind: tuple[int, int, int] = (0, 0, 0)  # N tokens, R rows of logits and A rows of attention in the last pass
    ids: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    positions: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (R,)
    attended: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (A,), see `rewriting.read_twice`
    kept: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # (N,)
    logits: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))  # (R, V)
    states: dict[int, Array] = field(default_factory=dict)  # (N, D) by layer

    def give(self, name: str, array: Array) -> None:
        self.binding.bind_input(name, *ON_HOST.place(array))

    def take(self, name: str, array: Array) -> None:
        self.binding.bind_output(name, *ON_HOST.place(array))


class PassWays:
    """Learns the times of passes, and which way of reading several sequences is faster.

    The estimate for a pass is the least time measured with the same number of tokens, else with the nearest one. If
    that number is larger, the time is scaled down in proportion, so that a way that may be faster gets tried.

    Args:
        rows: the number of sequences in a pass over all.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._one: dict[int, float] = {}  # seconds of a pass over one sequence, by its number of tokens
        self._all: dict[int, float] = {}  # seconds of a pass over all, by its number of tokens with fillers
        self._decided = 0

    def apart(self, sizes: Sequence[int], fillers: int) -> bool:
        """Whether these sequences should have a separate pass each.

        Args:
            sizes: the number of tokens that each of them reads.
            fillers: the number of other sequences that would read one filler each.
        """
        few = 1 < len(sizes) <= self._rows // 2
        if not few or max(sizes) > WIDEST or not self._all:  # the pass over all is timed first
            return False
        if not self._one:
            return True
        self._decided += 1
        whole = _expected(self._all, sum(sizes) + fillers)
        less = sum(_expected(self._one, size) for size in sizes) < whole
        return less is not (self._decided % AGAIN == 0)

    def took(self, tokens: int, seconds: float, *, alone: bool) -> None:
        """Record the time of a pass.

        Args:
            tokens: the number of tokens read, with fillers.
            seconds: its duration.
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


class OnnxPasses(Passes):
    """`Passes` of an exported graph, over buffers ``(slots, heads, capacity, size)`` that it owns.

    A pass writes in place; a rollback only moves the caller's counter. A pass over one sequence runs the exported
    graph. Passes over several sequences, on a CPU, run a graph from `packed_graph` over all of them; sequences with
    nothing to read then read a filler. Where few sequences have something to read, they are read by separate passes, if
    that is faster (`PassWays`). Where this has been so for long, a graph for fewer sequences reads them. A separate
    graph reads one token of each.

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
            self.rows_bytes = 0 if graph.trees else graph.bytes
        self._vocabulary, self._narrowest, self._apart = vocabulary, graph.narrowest, apart
        # The fewest rows of a sequence that attention reads and appends to the cache.
        self._attended = 2 if graph.twice else graph.narrowest
        self._watched = tuple(watched)
        self._sight = TreeSight()
        self._missed_signals = 0  # passes that wanted signals without a graph that computes them
        self._can_signal = 0 < self.rows_bytes <= SMALL and graph.columns <= vocabulary
        self.capacity = min(CAPACITY, context)
        self._buffers = self._allocated(self.capacity)
        self.token_bytes = sum(int(buffer[:1, :, :1].nbytes) for buffer in self._buffers.values())
        # On a GPU, attention takes ``total`` from the host and ``before`` from the device.
        self._before = _Integers(np.zeros(1, dtype=np.int32), memory)
        self._total = _Integers(np.zeros(1, dtype=np.int32), ON_HOST)
        self._no_bias = ON_HOST.zeros([0], "float32")  # the empty bias of a chain
        self._results: dict[tuple[int | None, int], Any] = {}  # by layer, None for logits, and largest number of rows
        self._bound_one: dict[tuple[int, int, int, tuple[int, ...], bool], _BoundOne] = {}  # by `_Kind`
        # Of several sequences:
        self._sessions = {slots: graph.opened(slots)} if slots > 1 else {}
        # Passes that a smaller graph could have read, by its size.
        self._missed = dict.fromkeys((size for size in SIZES if size < slots), 0)
        self._opens = 0 < self.rows_bytes <= SMALL and not apart  # whether further graphs may be opened
        self._ways = PassWays(slots)
        self._lengths = [0] * slots
        self._made = 0  # number of passes so far
        # The last pass in which each sequence had something to read.
        self._read_at = dict.fromkeys(range(slots), -LATELY)
        self._bound: dict[tuple[tuple[int, ...], tuple[int, ...], bool], _BoundSeveral] = {}

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
        self._lengths[slot] = stop  # fillers are written after these

    def answer(self, request: Request) -> Any:
        return self._one(request) if self.slots == 1 and request.reader is None else super().answer(request)

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        if self.slots == 1:
            return [self._one(request) for request in requests]
        alone = self._narrowest == 1  # otherwise a pass over one sequence rounds differently from one over several
        chosen = self._chosen([request.slot for request in requests])
        if alone and len(requests) == 1:
            return [self._one_of_several(requests[0])]
        if len(requests) > 1 and (self._apart or (alone and self._takes_longer(requests, len(chosen)))):
            passes = ([self._one_of_several(one)] if alone else self._together([one], chosen) for one in requests)
            return [_copied(found) for (found,) in passes]
        return self._together(requests, chosen)

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens of each sequence."""
        if tokens <= self.capacity:
            return
        filled = self.capacity
        # Padding by `FixedWidthPasses` may extend beyond the context.
        capacity = max(tokens, 2 * filled)
        grown = self._allocated(capacity)
        for name, buffer in grown.items():
            buffer[:, :, :filled] = self._buffers[name][:, :, :filled]
        self._buffers, self.capacity = grown, capacity  # only now, since memory may run out before all buffers exist
        self._bound_one.clear()
        self._bound.clear()

    def _allocated(self, capacity: int) -> dict[str, Any]:
        capacity += self._attended - 1
        # Zeros: slots after the sequence are multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: self.memory.zeros((self.slots, heads, capacity, size), self.graph.dtype)
            for name, (heads, size) in self.graph.caches.items()
        }

    def _room(self, layer: int | None, rows: int) -> Any:  # (rows, columns or width)
        """Memory for logits or a layer's states, shared by kinds of passes with about as many rows."""
        size = 1 << (rows - 1).bit_length()
        if (found := self._results.get((layer, size))) is None:
            width = self.graph.columns if layer is None else self.graph.width
            found = self._results[layer, size] = self.memory.zeros((size, width), self.graph.dtype)
        return found[:rows]

    # One sequence

    def _one(self, request: Request) -> Forward:
        """A pass over one sequence; the next one may overwrite numpy's logits and states."""
        slot, after, tokens, keep, hidden, _, _, _, _, parents, before = request
        if len(tokens) > PIECE:
            return self._in_pieces(request)
        layers = tuple(sorted({*self._watched, LAST})) if hidden else self._watched
        signals = self.wants_signals and keep > 0 and not hidden and self._signals()
        seen = None if parents is None else self._sight.grown(parents, before)
        found = self.one(slot, tokens, after, keep, layers, seen, signals)
        logits, states = found.logits[:keep, : self._vocabulary], found.states
        if not isinstance(logits, np.ndarray):
            logits = self._owned(logits, found)
            states = {layer: self._owned(rows, found) for layer, rows in states.items()}
        if not hidden:
            return Forward(logits, None, states or None, self.draft_vocabulary, None, found.signals)
        import torch  # a caller that reads the last states is a torch network

        last = torch.as_tensor(self._owned(states[LAST][len(tokens) - keep :], found))
        watched = {layer: states[layer] for layer in self._watched} if self._watched else None
        return Forward(logits, last, watched, self.draft_vocabulary)

    def _owned(self, rows: Any, found: Results) -> Any:
        return self.memory.copied(rows) if found.shared else rows

    def _in_pieces(self, request: Request) -> Forward:
        tokens, parts = request.tokens, []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            later = len(tokens) - start - len(piece)
            keep = max(0, min(request.keep - later, len(piece)))
            parts.append(self._one(request._replace(after=request.after + start, tokens=piece, keep=keep)))
        return joined(parts)

    def _signals(self) -> bool:
        """Whether a graph computes signals; it is opened after enough passes that wanted it."""
        if self.graph.signals is None:
            self._missed_signals += self._can_signal
            if self._missed_signals <= SIGNALS_WORTH:
                return False
            try:
                with preparing():
                    self.graph.signals = self.graph.opened("signals")
            # A missing package, or no place for the graph: the host keeps computing signals.
            except (ImportError, OSError):
                self._can_signal, self._missed_signals = False, 0
        return self.graph.signals is not None

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
            signals: whether to return signals; there must be a graph that computes them.
        """
        width = len(tokens)
        if after + width > self.capacity:
            self._reserve(after + width)
        kind = slot, width, keep or 1, layers, signals  # onnxruntime takes no empty tensors
        bound = self._bound_one.get(kind) or self._bind_one(_Kind(*kind))
        attended = self._attended
        end = after + (width if width > attended else attended)
        self._before.host[0] = end - 1
        self._total.host[0] = end
        if width == 1:
            bound.ids.host[0, 0] = tokens[0]  # takes half of a slice's time
        else:
            bound.ids.host[0, :width] = tokens
        if bound.positions is not None:
            start = 0 if seen is None else after + width - seen.shape[1]
            placed = range(after, after + width) if seen is None else start + seen.sum(1) - 1
            bound.positions.host[0, :width] = placed
            bound.positions.host[0, width:] = after  # padding may have any valid position
        if self.graph.trees:
            bias = self._bias(width, after, seen)  # referenced until the pass has run
            bound.binding.bind_input("bias", *ON_HOST.place(bias))
        if bound.sent:
            self.memory.send(bound.sent)
        bound.session.run_with_iobinding(bound.binding)
        return bound.results

    def _bind_one(self, kind: _Kind) -> _BoundOne:
        if len(self._bound_one) >= max(MOST_KINDS, MOST_BOUND * self.slots):
            self._bound_one.clear()
        graph, memory = self.graph, self.memory
        session = graph.signals if kind.signals else graph.session
        assert session is not None, "signals are asked of a graph that is open"
        places = np.arange(max(kind.width, self._narrowest), dtype=np.int64)
        ids = _Integers(places[None].copy(), memory)
        fixed = {"rows": _Integers(places[kind.width - kind.rows : kind.width], memory)}
        if graph.twice:
            fixed |= {"attended": _Integers(_repeated([len(places)]), memory), "kept": _Integers(places, memory)}
        changing = {"before": self._before, "ids": ids}
        if graph.placed:
            changing["positions"] = _Integers(places[None].copy(), memory)
        results, states = self._results_of(kind)
        bound = _BoundOne(
            session,
            session.io_binding(),
            ids,
            changing.get("positions"),
            fixed,
            [(one.host, one.there) for one in changing.values() if one.there is not one.host],
            results,
        )
        for name, numbers in {**changing, **fixed, "total": self._total}.items():
            numbers.bind(bound.binding, name)
        for name, buffer in self._buffers.items():
            place = memory.place(buffer[kind.slot : kind.slot + 1])
            bound.binding.bind_input(name, *place)
            bound.binding.bind_output(name.replace("past", "present"), *place)
        bound.binding.bind_output("logits", *memory.place(results.logits[None]))
        for layer, made in states.items():
            bound.binding.bind_output(state_name(layer), *memory.place(made[None]))
        for name, signal in zip(("entropy", "top_prob"), results.signals or (), strict=False):
            bound.binding.bind_output(name, *ON_HOST.place(signal[None]))
        if kind.width <= BOUND_WIDTH:
            self._bound_one[kind] = bound
        return bound

    def _results_of(self, kind: _Kind) -> tuple[Results, dict[int, Any]]:
        """Memory for the results of a kind of pass, shared by narrow ones, and the whole buffers of the states."""
        width, shared = max(kind.width, self._narrowest), kind.width <= BOUND_WIDTH
        if shared:
            logits, states = self._room(None, kind.rows), {layer: self._room(layer, width) for layer in kind.layers}
        else:
            logits = self.memory.zeros((kind.rows, self.graph.columns), self.graph.dtype)
            states = {layer: self.memory.zeros((width, self.graph.width), self.graph.dtype) for layer in kind.layers}
        read = {layer: rows[: kind.width] for layer, rows in states.items()}
        signals = (np.zeros(kind.rows, np.float32), np.zeros(kind.rows, np.float32)) if kind.signals else None
        return Results(logits, read, shared, signals), states

    def _bias(self, width: int, after: int, seen: Seen | None) -> npt.NDArray[np.float32]:
        """``(1, 1, T, S)`` attention bias: hides from each token of a tree the tokens that it does not see; 0
        elsewhere.
        """
        end, width = after + width, max(width, self._narrowest)
        shape = 1, 1, width, after + width
        if seen is not None:
            bias = np.zeros(shape, dtype=np.float32)
            bias[0, 0, : len(seen), end - seen.shape[1] : end] = np.where(seen, np.float32(0), np.finfo(np.float32).min)
            return bias
        if self._no_bias.size < width * (after + width):
            self._no_bias = ON_HOST.zeros([2 * width * (after + width)], "float32")
        return self._no_bias[: width * (after + width)].reshape(shape)

    # Several sequences

    def _one_of_several(self, request: Request) -> Forward:
        """A pass over one of several sequences, timed unless it had to be bound first."""
        bound, began = len(self._bound_one), perf_counter()
        found = self._one(request)
        self._lengths[request.slot] = request.after + len(request.tokens)
        if len(self._bound_one) == bound:
            self._ways.took(len(request.tokens), perf_counter() - began, alone=True)
        return found

    def _takes_longer(self, requests: Sequence[Request], size: int) -> bool:
        """Whether one pass over ``size`` sequences takes longer than separate passes."""
        return self._ways.apart([len(each.tokens) for each in requests], size - len(requests))

    def _chosen(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The sequences of a pass: those with something to read lately, a choice that rarely changes and so stays
        bound.
        """
        self._made += 1
        self._read_at.update(dict.fromkeys(asked, self._made))
        if len(asked) == 1 and self._narrowest == 1:
            return (asked[0],)
        lately = [slot for slot in range(self.slots) if self._made - self._read_at[slot] < LATELY]
        size = self._size_for(len(lately))
        others = (slot for slot in range(self.slots) if slot not in lately)
        return tuple(sorted([*lately, *islice(others, size - len(lately))]))

    def _size_for(self, count: int) -> int:
        """The number of sequences in the pass, at least ``count``."""
        size = next((size for size in self._missed if size >= count), self.slots)
        if size in self._sessions:
            return size
        self._missed[size] += 1
        if not self._opens or self._missed[size] <= SIZE_WORTH:
            return self.slots
        with preparing():
            self._sessions[size] = self.graph.opened(size)
        return size

    def _steps_together(self, chosen: tuple[int, ...], tokens: int) -> bool:
        """Whether adjacent sequences have one token each, and there is a graph for that."""
        return self._opens and 1 < tokens == len(chosen) == 1 + chosen[-1] - chosen[0]

    def _together(self, requests: Sequence[Request], chosen: tuple[int, ...]) -> list[Forward]:
        """A pass over the chosen sequences, with requests for some of them."""
        began = perf_counter()
        asked = {request.slot: request for request in requests}
        tokens: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        sizes: list[int] = []
        ends: list[int] = []
        least = self._attended
        lengths = self._lengths.copy()  # committed only after the pass, since memory may run out before
        for slot in chosen:
            request, length = asked.get(slot), lengths[slot]
            if request is None:
                tokens.append(FILLER)
                places.append(length)
                sizes.append(1)
                ends.append(length + least)
                continue
            after, width = request.after, len(request.tokens)
            tokens += request.tokens
            places += range(after, after + width)
            sizes.append(width)
            ends.append(after + max(width, least))
            lengths[slot] = after + width
            wanted += range(len(tokens) - request.keep, len(tokens))
        self._reserve(max(lengths[slot] + (slot not in asked) for slot in chosen))
        kept = wanted or [0]  # onnxruntime takes no empty tensors
        hidden = any(request.hidden for request in requests)
        layers = tuple(sorted({*self._watched, LAST})) if hidden else self._watched
        steps = self._steps_together(chosen, len(tokens))
        known = self._bound.get((chosen, layers, steps))
        bound = known or self._bind_several(chosen, layers, steps=steps)
        attended = _repeated(sizes)
        if bound.kind != (kind := (len(tokens), len(kept), len(attended))):
            self._resize(bound, *kind, layers)
        bound.ids[:], bound.positions[:], bound.rows[:] = tokens, places, kept
        if self.graph.twice:
            bound.attended[:], bound.kept[:] = attended, np.unique(attended, return_index=True)[1]
        bound.sizes[:], bound.total[:, 0] = [max(size, least) for size in sizes], ends
        np.subtract(bound.total, 1, out=bound.before)
        bound.longest[0] = max(ends)
        bound.session.run_with_iobinding(bound.binding)
        self._lengths = lengths
        if known is not None:
            self._ways.took(len(tokens), perf_counter() - began, alone=False)
        logits = bound.logits[: len(wanted), : self._vocabulary]  # (R, V)
        found: dict[int, Forward] = {}
        start = end = 0
        for slot, width in zip(chosen, sizes, strict=True):
            end += width
            if (request := asked.get(slot)) is None:
                continue
            own = slice(start, start + request.keep)
            found[slot] = Forward(logits[own], None, None, self.draft_vocabulary)
            if layers:
                self._give_states(found[slot], bound, slice(end - width, end), request)
            start = own.stop
        return [found[request.slot] for request in requests]

    def _give_states(self, found: Forward, bound: _BoundSeveral, tokens: slice, request: Request) -> None:
        if self._watched:
            found.states = {layer: bound.states[layer][tokens] for layer in self._watched}
        if request.hidden:
            import torch  # a caller that reads the last states is a torch network

            found.hidden = torch.from_numpy(bound.states[LAST][tokens.stop - request.keep : tokens.stop].copy())

    def _bind_several(self, chosen: tuple[int, ...], layers: tuple[int, ...], *, steps: bool) -> _BoundSeveral:
        """Bind the buffers of some sequences, which takes as long as a pass."""
        if len(self._bound) >= MOST_BOUND:
            self._bound.clear()
        if steps and self.graph.steps is None:
            with preparing():
                self.graph.steps = self.graph.opened(None)
        count = len(chosen)
        session = self.graph.steps if steps else self._sessions[count]
        assert session is not None, "it has been opened"
        before, total = np.zeros((2, count, 1), dtype=np.int32)
        longest = np.zeros(1, dtype=np.int32)
        sizes = np.ones(count, dtype=np.int64)
        bound = _BoundSeveral(session, session.io_binding(), sizes, before, total, longest)
        if steps:  # this graph reads adjacent slots
            parts = [("", slice(chosen[0], chosen[-1] + 1), before[:, 0], longest)]
        else:
            bound.give("sizes", sizes)
            parts = [
                (f".{place}", slice(slot, slot + 1), before[place], total[place]) for place, slot in enumerate(chosen)
            ]
        for end, slots, its_before, its_total in parts:
            bound.give(f"before{end}", its_before)
            bound.give(f"total{end}", its_total)
            for name, buffer in self._buffers.items():
                bound.give(f"{name}{end}", buffer[slots])
                bound.take(f"{name.replace('past', 'present')}{end}", buffer[slots])
        self._bound[chosen, layers, steps] = bound
        return bound

    def _resize(self, bound: _BoundSeveral, width: int, rows: int, attended: int, layers: tuple[int, ...]) -> None:
        """Bind inputs and results for N tokens, R rows of logits and A rows of attention."""
        bound.kind = 0, 0, 0  # until all is bound: memory may run out
        bound.ids, bound.positions, bound.rows = (np.zeros(size, dtype=np.int64) for size in (width, width, rows))
        bound.logits = self._room(None, rows)
        bound.states = {layer: self._room(layer, width) for layer in layers}
        bound.give("ids", bound.ids[None])
        bound.give("rows", bound.rows)
        if self.graph.twice:
            bound.attended, bound.kept = np.zeros(attended, dtype=np.int64), np.zeros(width, dtype=np.int64)
            bound.give("attended", bound.attended)
            bound.give("kept", bound.kept)
        if self.graph.placed:
            bound.give("positions", bound.positions[None])
        bound.take("logits", bound.logits[None])
        for layer, states in bound.states.items():
            bound.take(state_name(layer), states[None])
        bound.kind = width, rows, attended


def _repeated(sizes: Sequence[int]) -> Array:  # (A,)
    """The indices of the rows that attention reads, of sequences with these numbers of tokens: lone ones twice."""
    places = np.arange(sum(sizes), dtype=np.int64)
    return np.repeat(places, np.repeat([2 if size == 1 else 1 for size in sizes], sizes))


def _copied(found: Forward) -> Forward:
    """A copy that the next pass does not overwrite."""
    assert isinstance(found.columns, np.ndarray), "several sequences are read on the host"
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states), found.vocabulary)


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
