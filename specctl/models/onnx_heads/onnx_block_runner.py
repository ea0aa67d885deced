"""A block draft head whose passes are onnxruntime's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockHeadRunner
from specctl.models.onnx.runner import CAPACITY, PIECE
from specctl.models.onnx_heads.head_graphs import CONFIDENCE, PASS, REMEMBER, ROW, HeadGraphs
from specctl.models.onnx_heads.sized_graph import Array
from specctl.models.passes.host_device import HOST
from specctl.models.running.runner import Forward

if TYPE_CHECKING:
    import torch

    from specctl.models.passes.token_reader import Foresee


class OnnxBlockRunner(BlockHeadRunner):
    """As `BlockRunner`, by graphs of the head: what is fed and what is attended to is the same.

    Args:
        head: in eval mode, on the CPU.
        graphs: of it.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.

    Attributes:
        threads: of its passes.
    """

    engine = "onnx"
    multiplies = True
    threads: int

    def __init__(self, head: BlockHead, graphs: HeadGraphs, vocabulary: int) -> None:
        self._run_head(head, vocabulary)
        self._graphs = graphs
        self.context, self.device = head.context, HOST
        self.threads, self._seconds = graphs.threads, graphs.seconds
        self._pass = graphs.opened(PASS, min(CAPACITY, head.context + head.block_size))
        self._block = self._pass.sized()
        self._remembering = graphs.opened(REMEMBER)
        self._row_step = graphs.opened(ROW).sized() if graphs.has(ROW) else None
        self._branches: list[Array] = []  # the memories (1, R) behind the tokens of the last tree
        self._confidence = graphs.opened(CONFIDENCE).sized() if graphs.has(CONFIDENCE) else None

    def fresh(self) -> "OnnxBlockRunner":
        return OnnxBlockRunner(self.head, self._graphs, self.vocabulary)

    @property
    def preparing_seconds(self) -> float | None:
        return self._seconds

    def _remember(self) -> None:
        if (states := self._waiting.take()) is None:
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
        """Make room for so many places and a block behind them."""
        capacity = self._pass.capacity
        self._pass.reserve(places + self.head.block_size, self._remembered)
        if self._pass.capacity > capacity:
            self._block = self._pass.sized()

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """Feed tokens; see `BlockHeadRunner`.

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
        import torch  # whoever reads states is a network

        return Forward(logits, torch.from_numpy(states), None, self.draft_vocabulary)

    def _feed(self, token: int) -> None:
        """Move to the next row of the block, or write a block behind an anchor."""
        head = self.head
        if self._row < 0:
            self._remember()
            known, end = min(self.witnessed, self.length), self.length + head.block_size
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
        """Those of the row, given the token before it."""
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
        import torch  # whoever reads states is a network

        return Forward(logits, torch.from_numpy(state[None].copy()), None, self.draft_vocabulary)

    @property
    def foresee(self) -> "Foresee | None":
        return None if self._confidence is None else self._next_accept_prob

    def _next_accept_prob(self, token: "torch.Tensor") -> "torch.Tensor":
        """As of `BlockRunner`."""
        import torch

        step = self._confidence
        if step is None or self._row + 1 == self.head.block_size:
            return torch.zeros(())
        step.given["hidden"][0] = self._block.found["hidden"][self._row + 1]
        step.given["token"][0] = int(token)
        return torch.from_numpy(step.run()["prob"])[0]
