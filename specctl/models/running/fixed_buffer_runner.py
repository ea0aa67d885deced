"""A runner over preallocated buffers that reads tokens one after the other, or as a tree."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from specctl.models.passes.fixed_buffers import FixedBuffers, PassKind, width_of
from specctl.models.passes.masks import placed_in_tree, tree_rows
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.token_reader import Token, TokenReader
from specctl.models.passes.tree_sight import WIDEST, TreeSight

Found = tuple[torch.Tensor, torch.Tensor | None, Any]
"""Logits ``(R, V)`` of a pass, the hidden states of the same tokens if they are wanted, and what else it gives."""


class FixedBufferRunner(FixedBuffers):
    """A `Slot` over preallocated buffers; what is its own is the network.

    Args:
        layers, vocabulary, context, device, capacity, compiler: as for `FixedBuffers`.
    """

    no_trees: str | None = None

    @cached_property
    def _sight(self) -> TreeSight:
        return TreeSight()

    @abstractmethod
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
        """Run the network, with the buffers as its cache.

        Args:
            kind, keep: as of `_pass`.
            ids: ``(1, T)``.
            positions: ``(T,)``, the tokens' places in their text.
            mask: ``(T, S)`` boolean, the slots that each of them sees.
            slots: ``(S,)``, from 0 on.
            written: ``(T,)``, the slots that the pass writes to.
            rows: ``(T, H)`` of `_next_rows`.
        """

    def _next_rows(self, count: int) -> torch.Tensor | None:  # noqa: ARG002 - a model reads its tokens and nothing else
        """What the network reads of the next tokens besides the tokens ``(count, H)``; None for nothing."""
        return None

    def _advance(self, count: int, further: Any) -> None:  # noqa: ARG002 - for those that keep it
        """Count tokens as read; ``further`` is what else the network gave for them."""
        self.length += count

    def read(
        self,
        tokens: Sequence[Token],
        reader: TokenReader,
        uniform: float | None,
        previous: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            rows = self._next_rows(len(tokens))
            kind = PassKind(width_of(tokens), reader.hidden, reader, rows=int(rows is not None))
            values, probs, further = self._run(kind, tokens, rows, uniform, previous)
        self._advance(len(tokens), further)
        return values, probs

    def _read(self, tokens: Sequence[int], keep: int, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Read tokens for which there is room.

        Returns:
            Logits, and hidden states if they are wanted, of at least the last ``keep`` tokens; and by piece what else
            the network gave.
        """
        rows = self._next_rows(len(tokens))
        kind = PassKind(width_of(tokens) if len(tokens) <= WIDEST else 0, hidden, rows=int(rows is not None))
        if len(tokens) <= WIDEST:
            run = self._run if keep and self.length else self._run_once  # widths of prompts are too many to capture
            logits, last, further = run(kind, tokens, *([] if rows is None else [rows]))
            self._advance(len(tokens), further)
            return logits, last, [further]
        # A prompt runs uncompiled, in pieces that keep masks small.
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        more = []
        for piece, positions, slots in self._pieces(len(tokens)):
            ids = sent(tokens[piece], self.device)[None]
            after = len(tokens) - piece.stop
            wanted = max(1, min(keep - after, ids.shape[1]))
            step = self._pass(kind, keep=wanted)
            logits, last, further = step(ids, positions, slots, None if rows is None else rows[piece])
            more.append(further)
            if keep > after or not after:
                found.append((logits, last))
        self._advance(len(tokens), more[-1])
        states = torch.cat([last for _, last in found if last is not None]) if hidden else None
        return torch.cat([logits for logits, _ in found]), states, more

    def _read_tree(
        self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool, *rows: torch.Tensor
    ) -> Found:
        """A pass of `extend_tree` for which there is room; ``rows`` as of `_network`, if it takes any."""
        sight = sent(tree_rows(self._sight.grown(parents, before)), self.device)
        found: Found = self._run(PassKind(0, hidden, rows=1 + len(rows), tree=True), tokens, sight, *rows)
        self.length += len(tokens)
        return found

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """As in `FixedBuffers`; the third result is what else the network gives."""

        def masked(
            ids: torch.Tensor,
            written: torch.Tensor,
            slots: torch.Tensor,
            positions: torch.Tensor,
            mask: torch.Tensor,
            rows: torch.Tensor | None,
        ) -> Found:
            self._cursor.positions, self._cursor.span = written, slots.shape[0]
            # Padding may have positions beyond the range of learned position embeddings.
            known = positions.clamp_max(self.context - 1) if self._slack else positions
            return self._network(kind, keep, ids, known, mask, slots, written, rows)

        def logits_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor | None = None
        ) -> Found:
            return masked(ids, positions, slots, positions, slots <= positions[:, None], rows)

        def tree_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            sight: torch.Tensor,
            rows: torch.Tensor | None = None,
        ) -> Found:
            """``sight`` of `tree_rows`."""
            return masked(ids, positions, slots, *placed_in_tree(positions, slots, sight), rows)

        reader = kind.reader
        if reader is None:
            return tree_of if kind.tree else logits_of

        def reading_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            rows: torch.Tensor | None,
            uniform: torch.Tensor | None,
            previous: torch.Tensor | None,
        ) -> Found:
            logits, hidden, further = logits_of(ids, positions, slots, rows)
            values, probs = reader(logits[-1], uniform, None if hidden is None else hidden[-1], previous)
            return values, probs, further

        return reading_of
