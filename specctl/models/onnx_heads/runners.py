"""Passes of draft heads by onnxruntime: chains and blocks. No torch here, except where a caller reads states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockHeadPasses
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head import DraftHeadPasses
from specctl.models.draft_heads.verifier_states import HeadInputs
from specctl.models.onnx.graph import ON_HOST, Array, element_type, open_session
from specctl.models.onnx.passes import BOUND_WIDTH, CAPACITY, PIECE
from specctl.models.onnx.store import GRAPH, HEAD_CHAINS
from specctl.models.passes.forward import Forward
from specctl.models.passes.inference import HOST

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.forward import Foresee
    from specctl.models.passes.watching import States

PAST, PRESENT = "past.", "present."  # Prefixes of a cache's names before and after a pass


@dataclass(frozen=True, slots=True)
class SizedPass:
    """A pass with fixed sizes."""

    given: Mapping[str, Array]  # its inputs by name, to be filled before it runs
    found: Mapping[str, Array]  # its results by name; the next pass of the same sizes overwrites them
    _session: onnxruntime.InferenceSession
    _binding: onnxruntime.IOBinding

    def run(self) -> Mapping[str, Array]:
        """Run the pass and return its results."""
        self._session.run_with_iobinding(self._binding)
        return self.found


class SizedGraph:
    """A graph on the CPU, over its own cache if it has one: inputs ``past.*`` ``(1, heads, capacity, size)``.

    Args:
        session: from `open_session`; several graphs may share it.
        capacity: tokens to make room for at first.

    Attributes:
        caches: the buffers that passes write to, by input name.
        capacity: the number of tokens that fit.
    """

    def __init__(self, session: onnxruntime.InferenceSession, capacity: int = 0) -> None:
        self._session = session
        self._inputs = {one.name: one for one in self._session.get_inputs()}
        self._outputs = {one.name: one for one in self._session.get_outputs()}
        self.capacity = capacity
        self.caches = self._allocated(capacity)
        self._passes: dict[tuple[int, ...], SizedPass] = {}

    def reads(self, name: str) -> bool:
        """Whether it has an input of this name."""
        return name in self._inputs

    def makes(self, name: str) -> bool:
        """Whether it has an output of this name."""
        return name in self._outputs

    def reserve(self, tokens: int, filled: int) -> None:
        """Make room for a number of tokens; the first ``filled`` are cached."""
        if tokens <= self.capacity:
            return
        capacity = max(tokens, 2 * self.capacity)
        grown = self._allocated(capacity)
        for name, buffer in grown.items():
            buffer[:, :, :filled] = self.caches[name][:, :, :filled]
        self.caches, self.capacity = grown, capacity  # only now, since memory may run out before all buffers exist
        self._passes.clear()

    def _allocated(self, capacity: int) -> dict[str, Array]:
        # Zeros: slots after the sequence are multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: ON_HOST.zeros((1, one.shape[1], capacity, one.shape[3]), element_type(one.type))
            for name, one in self._inputs.items()
            if name.startswith(PAST)
        }

    def sized(self, **sizes: int) -> SizedPass:
        """The pass with these sizes of its dimensions, always passed in the same order."""
        key = tuple(sizes.values())
        return self._passes.get(key) or self._bound(key, sizes)

    def _bound(self, key: tuple[int, ...], sizes: Mapping[str, int]) -> SizedPass:
        binding = self._session.io_binding()

        def room(one: onnxruntime.NodeArg) -> Array:
            shape = [size if isinstance(size, int) else sizes[size] for size in one.shape]
            return ON_HOST.zeros(shape, element_type(one.type))

        given = {name: self.caches[name] if name in self.caches else room(one) for name, one in self._inputs.items()}
        found = {
            name: self.caches[PAST + name.removeprefix(PRESENT)] if name.startswith(PRESENT) else room(one)
            for name, one in self._outputs.items()
        }
        for name, array in given.items():
            binding.bind_input(name, *ON_HOST.place(array))
        for name, array in found.items():
            binding.bind_output(name, *ON_HOST.place(array))
        made = SizedPass(given, found, self._session, binding)
        if max(key, default=0) <= BOUND_WIDTH:
            self._passes[key] = made
        return made


PASS, FUSE, REMEMBER, ROW, CONFIDENCE = GRAPH, "fuse.onnx", "remember.onnx", "row.onnx", "confidence.onnx"
"""Their files; every head has the first, and the others as it needs them."""


@dataclass(frozen=True, slots=True)
class HeadGraphs:
    """The graphs of a draft head."""

    folder: Path  # the folder with their files
    threads: int  # the number of threads of their passes
    seconds: float | None = None  # wall time spent on making them; None if they existed
    _sessions: dict[str, onnxruntime.InferenceSession] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def has(self, name: str) -> bool:
        """Whether the head needs this one."""
        return (self.folder / name).exists()

    def opened(self, name: str, capacity: int = 0) -> SizedGraph:
        """Open one of the graphs, with an initial cache capacity of ``capacity`` tokens; weights are loaded once."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = open_session(self.folder / name, HOST, self.threads)
        return SizedGraph(session, capacity)


class OnnxChainPasses(DraftHeadPasses):
    """`ChainPasses` with the head's graphs; each token reads the same as there.

    The token at position p goes to slot p - 1 of the cache, and each token attends to all slots up to its own. No other
    token attends to the sequence's first token, so that is read in a separate pass, if at all. For a head whose tokens
    do attend to the first one, slot and position are equal.

    Args:
        head: in eval mode, on the CPU.
        graphs: the head's graphs.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
    """

    head: ChainHead
    engine = "onnx"
    no_trees = HEAD_CHAINS
    threads: int  # of its passes

    def __init__(self, head: ChainHead, graphs: HeadGraphs, vocabulary: int) -> None:
        self._run_head(head, vocabulary)
        self._graphs = graphs
        self.context, self.device = head.context, HOST
        self.threads, self._seconds = graphs.threads, graphs.seconds
        self._pass = graphs.opened(PASS, min(CAPACITY, head.context))
        self._fusing = graphs.opened(FUSE) if graphs.has(FUSE) else None
        self._blank = np.zeros((1, head.feature_size), dtype=np.float32)
        self._rows = HeadInputs(self._blank, self._fused)
        self._skipped = 0 if head.sees_first else 1  # number of tokens before the first slot
        self._placed = self._pass.reads("positions")
        self._shows = self._pass.reads("places")  # whether other slots hold the observed rows
        self._written = "row" if self._pass.makes("row") else "hidden"

    def fresh(self) -> "OnnxChainPasses":
        return OnnxChainPasses(self.head, self._graphs, self.vocabulary)

    @property
    def preparing_seconds(self) -> float | None:
        return self._seconds

    @property
    def observed(self) -> int:
        return self._rows.observed

    def observe_states(self, start: int, states: "States") -> None:
        self._rows.observe_states(start, states)

    def _fused(self, states: "States") -> Array:  # (T, R)
        given = [np.asarray(states[layer]) for layer in self.layers]
        if self._fusing is None:
            return given[0]
        rows = []
        for begin in range(0, len(given[0]), PIECE):
            count = min(PIECE, len(given[0]) - begin)
            fusing = self._fusing.sized(tokens=count)
            for index, part in enumerate(given):
                fusing.given[f"states.{index}"][:] = part[begin : begin + count]
            rows.append(fusing.run()["rows"].copy())
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        return self._rows.rollback(length)

    def _extend(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        self._rows.take_pending()
        logits: list[Array] = []
        states: list[Array] = []
        left = len(tokens)
        for some in self._rows.pieces(self.length, tokens):
            for part in self._parts(some):
                left -= len(part)
                wanted = min(max(0, keep - left), len(part))
                if not (wanted or self.length) and self._skipped and len(some) > 1:
                    self._rows.advance(0, 1, self._blank)  # no token attends to the first one
                    self.length = 1
                    continue
                found = self._read(part, wanted)
                if wanted:
                    rows = found["logits"][0, :wanted, : self._columns]
                    logits.append(rows.copy() if left else rows)  # copied, since another pass would overwrite them
                    states += [found["hidden"][0, :wanted].copy()] if hidden else []
        rows = logits[0] if len(logits) == 1 else np.concatenate([*logits, np.zeros((0, self._columns), np.float32)])
        if not hidden:
            return Forward(rows, vocabulary=self.draft_vocabulary)
        import torch  # a caller that reads states is a torch network

        last = torch.from_numpy(np.concatenate([*states, np.zeros((0, self.head.width), np.float32)]))
        return Forward(rows, last, None, self.draft_vocabulary)

    def _parts(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Splits tokens into passes of limited width; a sequence's first token gets its own pass."""
        first = min(1, len(tokens)) if not self.length else 0
        starts = range(first, len(tokens), PIECE)
        return [*([tokens[:1]] if first else []), *(tokens[start : start + PIECE] for start in starts)]

    def _read(self, tokens: Sequence[int], keep: int) -> Mapping[str, Array]:
        """A pass with results for at least one token."""
        count, slot = len(tokens), max(0, self.length - self._skipped)
        self._pass.reserve(slot + count, slot)
        step = self._pass.sized(tokens=count, rows=max(keep, 1))
        given = step.given
        given["ids"][0] = tokens
        given["rows"][:] = range(count - max(keep, 1), count)
        if self._placed:
            given["positions"][0] = range(slot, slot + count)
        given["before"][0], given["total"][0] = slot + count - 1, slot + count
        rows = self._rows.next(self.length, count)
        if self._shows:
            # A row that the head itself computed adds nothing, so the newest observed row is added again.
            place = self.length - 1
            if self._rows.known(self.length) <= 0 and self._rows.count:
                place = self._rows.count - 1
                rows = self._rows.of(place, 1)
            shown = max(place, 0) + count
            given["places"][0] = range(place, place + count)
            given["shown.before"][0], given["shown.total"][0] = shown - 1, shown
        given["given"][0] = rows
        found = step.run()
        self._rows.advance(self.length, count, self._blank if self._shows else found[self._written][0, -1:])
        self.length += count
        return found


class OnnxBlockPasses(BlockHeadPasses):
    """`BlockPasses` with the head's graphs; inputs and attention are the same as there.

    Args:
        head: in eval mode, on the CPU.
        graphs: the head's graphs.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
    """

    engine = "onnx"
    threads: int  # of its passes

    def __init__(self, head: BlockHead, graphs: HeadGraphs, vocabulary: int) -> None:
        self._run_head(head, vocabulary)
        self._graphs = graphs
        self.context, self.device = head.context, HOST
        self.threads, self._seconds = graphs.threads, graphs.seconds
        self._pass = graphs.opened(PASS, min(CAPACITY, head.context + head.block_size))
        self._block = self._pass.sized()
        self._remembering = graphs.opened(REMEMBER)
        self._row_step = graphs.opened(ROW).sized() if graphs.has(ROW) else None
        self._branches: list[Array] = []  # the memories (1, R) after the tokens of the last tree
        self._confidence = graphs.opened(CONFIDENCE).sized() if graphs.has(CONFIDENCE) else None

    def fresh(self) -> "OnnxBlockPasses":
        return OnnxBlockPasses(self.head, self._graphs, self.vocabulary)

    @property
    def preparing_seconds(self) -> float | None:
        return self._seconds

    def _remember(self) -> None:
        if (states := self._pending.take()) is None:
            return
        given = [np.asarray(states[layer]) for layer in self.layers]  # (T, D)
        end = self._remembered + len(given[0])
        self._reserve(end)
        for begin in range(self._remembered, end, PIECE):
            stop = min(begin + PIECE, end)
            step = self._remembering.sized(tokens=stop - begin)
            for index, part in enumerate(given):
                step.given[f"states.{index}"][:] = part[begin - end : len(part) + stop - end]
            step.given["positions"][0] = range(begin, stop)
            found = step.run()
            for name, buffer in self._pass.caches.items():
                buffer[:, :, begin:stop] = found[name.replace("past", "kept")]
        self._remembered = end

    def _reserve(self, places: int) -> None:
        """Make room for a number of positions and a block after them."""
        capacity = self._pass.capacity
        self._pass.reserve(places + self.head.block_size, self._remembered)
        if self._pass.capacity > capacity:
            self._block = self._pass.sized()

    def _extend(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        """Feed tokens; see `BlockHeadPasses`.

        Raises:
            ValueError: the block has no further row, or logits of a token before its anchor are asked for.
        """
        fed = self._fed(tokens, keep)
        logits = np.empty((keep, self._columns), dtype=np.float32)
        states = np.empty((keep, self.head.width), dtype=np.float32)
        for index, token in enumerate(fed, start=keep - len(fed)):
            self._feed(token)
            row = self._logits(token)[: self._columns]
            if index >= 0:
                logits[index], states[index] = row, self._block.found["hidden"][self._row]
        if not hidden:
            return Forward(logits, vocabulary=self.draft_vocabulary)
        import torch  # a caller that reads states is a torch network

        return Forward(logits, torch.from_numpy(states), None, self.draft_vocabulary)

    def _feed(self, token: int) -> None:
        """Go to the next row of the block, or write a new block after an anchor."""
        head = self.head
        if self._row < 0:
            self._remember()
            known, end = min(self.observed, self.length), self.length + head.block_size
            self._reserve(known)
            given = self._block.given
            given["ids"][0] = head.config.mask_token
            given["ids"][0, 0] = token
            given["positions"][0] = range(self.length, end)
            given["before"][0], given["total"][0] = known + head.block_size - 1, known + head.block_size
            self._block.run()
            self._row = head.config.first_row
            if self._row_step is not None:
                self._row_step.given["memory"][:] = 0
        else:
            self._move()
        self.length += 1

    def _logits(self, token: int) -> Array:  # (V,)
        """The row's logits, given the token before it."""
        base: Array = self._block.found["logits"][self._row]
        step = self._row_step
        if step is None:
            return base
        step.given["base"][0], step.given["hidden"][0] = base, self._block.found["hidden"][self._row]
        step.given["token"][0] = token
        found = step.run()
        step.given["memory"][:] = found["next"]
        logits: Array = found["logits"][0]
        return logits

    def _level(self, tokens: Sequence[int], parents: Sequence[int], first: bool, hidden: bool) -> Forward:
        step, state = self._row_step, self._block.found["hidden"][self._row]
        if step is None:
            logits = self._block.found["logits"][self._row][None, : self._columns].copy()
        else:
            if first:
                self._branches = [step.given["memory"].copy()]
            logits = np.empty((len(tokens), self._columns), dtype=np.float32)
            for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                step.given["memory"][:] = self._branches[parent]
                logits[index] = self._logits(token)[: self._columns]
                self._branches.append(step.given["memory"].copy())
        if not hidden:
            return Forward(logits, vocabulary=self.draft_vocabulary)
        import torch  # a caller that reads states is a torch network

        return Forward(logits, torch.from_numpy(state[None].copy()), None, self.draft_vocabulary)

    @property
    def foresee(self) -> "Foresee | None":
        return None if self._confidence is None else self._next_accept_prob

    def _next_accept_prob(self, token: "torch.Tensor") -> "torch.Tensor":
        """See `BlockPasses`."""
        import torch

        step = self._confidence
        if step is None or self._row + 1 == self.head.block_size:
            return torch.zeros(())
        step.given["hidden"][0] = self._block.found["hidden"][self._row + 1]
        step.given["token"][0] = int(token)
        return torch.from_numpy(step.run()["prob"])[0]
