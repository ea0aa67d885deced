"""A chain head as a runner: it reads its verifier's states, and its own output where there are none yet."""

from collections.abc import Sequence

import torch

from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.head import DraftHeadRunner
from specctl.models.draft_heads.witnessed_rows import WitnessedRows
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.fixed_buffers import SPARE, PassKind
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.token_reader import Token, TokenReader
from specctl.models.passes.watching import States
from specctl.models.running.fixed_buffer_runner import FixedBufferRunner, Found
from specctl.models.running.graph import Capturing
from specctl.models.running.runner import Forward


class HeadRunner(FixedBufferRunner, DraftHeadRunner):
    """A draft head's `Runner` over preallocated buffers, uncompiled or compiled.

    The token at position p is read with the row of place p - 1. Tokens whose rows are known run in one pass; each
    token after them takes a pass of its own, over the row that the pass before it gave. The first token of a sequence
    has no place before it: it is read with zeros, and most heads let no other token attend to it.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; ids beyond it are padding and are cut off.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    head: ChainHead
    multiplies = True

    def __init__(
        self, head: ChainHead, vocabulary: int, *, capacity: int = SPARE, compiler: Compiler | None = None
    ) -> None:
        weights = next(head.parameters())
        super().__init__(
            head.num_layers, vocabulary, head.context, weights.device, capacity=capacity, compiler=compiler
        )
        self._run_head(head, vocabulary)
        if head.window:
            self.no_trees = "it has a sliding window"
        self._blank = torch.zeros(1, head.row_size, device=weights.device, dtype=weights.dtype)  # (1, R)
        with torch.inference_mode():
            self._rows = WitnessedRows(self._blank, self._fused, head.mask_row())
        self._branches = self._blank  # (N, R), the rows that the head wrote after the N tokens of the last tree

    def fresh(self) -> "HeadRunner":
        return HeadRunner(self.head, self.vocabulary, compiler=self._compiler)

    @property
    def witnessed(self) -> int:
        return self._rows.witnessed

    def witness(self, start: int, states: States) -> None:
        self._rows.witness(start, states)

    def _fused(self, states: States) -> torch.Tensor:  # (T, R)
        with torch.inference_mode():
            return self.head.fuse({layer: torch.as_tensor(states[layer]).to(self._blank) for layer in self.layers})

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """As in `Runner`, a level at a time: a token is read with the row that the head wrote after its parent."""
        assert max(parents) < before, "a parent has to be read in an earlier pass"
        self._rows.take_waiting()
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            if before == 1:
                self._branches = self._next_rows(1)
            given = self._branches[sent(parents, self.device)]  # (T, H)
            logits, last, own = self._read_tree(tokens, parents, before, hidden, given)
            self._branches = torch.cat([self._branches, own])
        return Forward(logits, last, vocabulary=self.draft_vocabulary)

    def keep_path(self, path: Sequence[int]) -> None:  # noqa: ARG002 - the signature of `Runner`
        """Go back to what was read with rows of the verifier's states."""
        self.rollback(self._rows.true)

    def rollback(self, length: int) -> None:
        self.length = self._rows.rollback(length)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._rows.take_waiting()
        self._reserve(self.length + len(tokens))
        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        done = 0
        with torch.inference_mode():
            for some in self._rows.pieces(self.length, tokens):
                done += len(some)
                part, last, _ = self._read(some, max(0, keep - (len(tokens) - done)), hidden)
                logits.append(part)
                states += [] if last is None else [last]
        kept = slice(-keep, None) if keep else slice(0)
        whole = torch.cat(logits) if logits else torch.empty(0, self._columns, device=self.device)
        return Forward(whole[kept], torch.cat(states)[kept] if hidden else None, None, self.draft_vocabulary)

    def read(
        self,
        tokens: Sequence[Token],
        reader: TokenReader,
        uniform: float | None,
        previous: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in `Runner`; the last token in a pass of its own if the row for it is not known before."""
        self._rows.take_waiting()
        if len(tokens) > max(1, self._rows.known(self.length)):
            self.extend([int(token) for token in tokens[:-1]], keep=0)
            tokens = tokens[-1:]
        return super().read(tokens, reader, uniform, previous)

    def _next_rows(self, count: int) -> torch.Tensor:  # (count, R)
        """The rows to read the next tokens with."""
        rows: torch.Tensor = self._rows.next(self.length, count)
        return rows.clone() if self._rows.known(self.length) > 0 else rows  # a view would be compiled separately

    def _advance(self, count: int, further: torch.Tensor) -> None:
        """As in `FixedBufferRunner`; ``further`` are the rows ``(T, R)`` that the head wrote after the tokens."""
        self._rows.advance(self.length, count, further[-1:])
        self.length += count

    def _network(
        self,
        kind: PassKind,
        keep: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        slots: torch.Tensor,
        written: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Found:
        """As in `FixedBufferRunner`; what else it gives are the rows ``(T, R)`` that the head wrote."""
        assert rows is not None, "of `_next_rows`"
        seen = self.head.attended(mask, slots, written)
        found = self.head(ids, rows[None], positions, seen[None, None], self._cache, keep)
        return found.logits[:, : self._columns], found.hidden if kind.hidden else None, found.rows


class GraphHeadRunner(Capturing, HeadRunner):
    """A `HeadRunner` with its passes captured."""

    multiplies = False
