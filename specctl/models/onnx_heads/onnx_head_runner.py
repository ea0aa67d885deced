"""A chain head whose passes are onnxruntime's."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head import DraftHeadRunner
from specctl.models.draft_heads.verifier_states import WitnessedRows
from specctl.models.onnx.runner import CAPACITY, PIECE
from specctl.models.onnx.store import HEAD_CHAINS
from specctl.models.onnx_heads.head_graphs import FUSE, PASS, HeadGraphs
from specctl.models.onnx_heads.sized_graph import Array
from specctl.models.passes.host_device import HOST
from specctl.models.running.runner import Forward

if TYPE_CHECKING:
    from specctl.models.passes.watching import States


class OnnxHeadRunner(DraftHeadRunner):
    """As `HeadRunner`, by graphs of the head: what reads each token is the same.

    The token at place p goes to slot p - 1 of the cache, so that each attends to all slots before its own: but for the
    first token of a sequence no token attends to the first one, which is read by itself, if it is read at all. Of a
    head whose tokens attend to the first one too, slots are places.

    Args:
        head: in eval mode, on the CPU.
        graphs: of it.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.

    Attributes:
        threads: of its passes.
    """

    head: ChainHead
    engine = "onnx"
    no_trees = HEAD_CHAINS
    length = 0
    multiplies = True
    threads: int

    def __init__(self, head: ChainHead, graphs: HeadGraphs, vocabulary: int) -> None:
        self._run_head(head, vocabulary)
        self._graphs = graphs
        self.context, self.device = head.context, HOST
        self.threads, self._seconds = graphs.threads, graphs.seconds
        self._pass = graphs.opened(PASS, min(CAPACITY, head.context))
        self._fusing = graphs.opened(FUSE) if graphs.has(FUSE) else None
        self._blank = np.zeros((1, head.row_size), dtype=np.float32)
        self._rows = WitnessedRows(self._blank, self._fused)
        self._skipped = 0 if head.sees_first else 1  # how many tokens are before the one in the first slot
        self._placed = self._pass.reads("positions")
        self._shows = self._pass.reads("places")  # whether other slots hold what rows bring in
        self._written = "row" if self._pass.makes("row") else "hidden"

    def fresh(self) -> "OnnxHeadRunner":
        return OnnxHeadRunner(self.head, self._graphs, self.vocabulary)

    @property
    def preparing_seconds(self) -> float | None:
        return self._seconds

    @property
    def witnessed(self) -> int:
        return self._rows.witnessed

    def witness(self, start: int, states: "States") -> None:
        self._rows.witness(start, states)

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

    def rollback(self, length: int) -> None:
        self.length = self._rows.rollback(length)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._rows.take_waiting()
        logits: list[Array] = []
        states: list[Array] = []
        left = len(tokens)
        for some in self._rows.pieces(self.length, tokens):
            for part in self._parts(some):
                left -= len(part)
                wanted = min(max(0, keep - left), len(part))
                if not (wanted or self.length) and self._skipped and len(some) > 1:
                    self._rows.advance(0, 1, self._blank)  # nobody attends to the first token
                    self.length = 1
                    continue
                found = self._read(part, wanted)
                if wanted:
                    rows = found["logits"][0, :wanted, : self._columns]
                    logits.append(rows.copy() if left else rows)  # another pass would overwrite them
                    states += [found["hidden"][0, :wanted].copy()] if hidden else []
        rows = logits[0] if len(logits) == 1 else np.concatenate([*logits, np.zeros((0, self._columns), np.float32)])
        if not hidden:
            return Forward(rows, vocabulary=self.draft_vocabulary)
        import torch  # whoever reads states is a network

        last = torch.from_numpy(np.concatenate([*states, np.zeros((0, self.head.width), np.float32)]))
        return Forward(rows, last, None, self.draft_vocabulary)

    def _parts(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """Tokens in passes that are not too wide; the first of a sequence in one of its own."""
        first = min(1, len(tokens)) if not self.length else 0
        starts = range(first, len(tokens), PIECE)
        return [*([tokens[:1]] if first else []), *(tokens[start : start + PIECE] for start in starts)]

    def _read(self, tokens: Sequence[int], keep: int) -> Mapping[str, Array]:
        """A pass, and its results for at least one token."""
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
            # A row that the head wrote brings in nothing, so the newest that was witnessed is brought in again.
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
