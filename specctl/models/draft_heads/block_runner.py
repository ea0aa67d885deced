"""A block draft head as a runner: one pass for a block, then a row of it for each token drawn."""

from collections.abc import Mapping, Sequence

import torch
from transformers import Cache

from specctl.models.draft_heads.block import BlockHead, BlockPass
from specctl.models.running.cache import Cursor, FixedLayer
from specctl.models.running.runner import Forward, TokenReader

SPARE = 256


class BlockRunner:
    """Runs a `BlockHead` as a draft model over one sequence.

    Tokens of places whose states were witnessed are not read: the keys and values of these places come from the states.
    The last token of the first `extend` after a rollback, or a token that is read first, is the block's anchor; its
    pass drafts the whole block, and every token fed after it moves to the next row. A place before the anchor without a
    witnessed state is missing from what the block attends to, and all other places keep their true positions.

    Buffers stay at their addresses until a sequence outgrows them: slots 0 to B - 1 hold the block, slot B + p place p.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared real vocabulary V; logits beyond it are cut off.
        capacity: places to make room for at first.

    Attributes:
        length: tokens fed.
        witnessed: places whose states were given.
        layers, longest, context: as of the head.
        foresees: whether `next_accept_prob` may be asked.
    """

    engine = "block"

    def __init__(self, head: BlockHead, vocabulary: int, *, capacity: int = SPARE) -> None:
        self.length = 0
        self.witnessed = 0
        self.vocabulary = vocabulary
        self.layers: tuple[int, ...] = head.layers
        self.longest: int | None = head.longest
        self.context = head.context
        self.device = head.fc.weight.device
        self.foresees = head.config.confidence
        self._head = head
        self._cursor = Cursor()
        self._capacity = capacity
        self._cache_layers = [FixedLayer(self._cursor, head.block_size + capacity) for _ in range(head.num_layers)]
        self._cache = Cache(layers=list(self._cache_layers))
        with torch.inference_mode(False):
            self._places = torch.arange(capacity + head.block_size, device=self.device)
            self._ids = torch.full((1, head.block_size), head.config.mask_token, device=self.device)
            self._token = torch.zeros((), dtype=torch.int64, device=self.device)
        self._block: BlockPass | None = None
        self._row = 0  # of the block, the last one given

    def witness(self, start: int, states: Mapping[int, torch.Tensor]) -> None:
        """Take the verifier's states of places ``start``, ``start + 1``, ...; those it has already are ignored.

        Args:
            start: at most ``witnessed``.
            states: ``(T, H)`` of each of ``layers``.

        Raises:
            ValueError: places between are missing.
        """
        if start > self.witnessed:
            raise ValueError(f"states from place {start} on, but those from {self.witnessed} on are missing")
        new = {layer: states[layer][self.witnessed - start :] for layer in self.layers}
        count = len(new[self.layers[0]])
        if not count:
            return
        end = self.witnessed + count
        self._reserve(end)
        block, weight = self._head.block_size, self._head.fc.weight
        with torch.inference_mode():
            rows = self._head.context_rows({layer: part.to(weight) for layer, part in new.items()})
            self._cursor.positions = self._places[block + self.witnessed : block + end]
            self._cursor.span = block + end
            self._head.remember(rows[None], self._places[self.witnessed : end], self._cache)
        self.witnessed = end

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """Feed tokens; see the class.

        Raises:
            ValueError: a row beyond the block, or logits of a token before the anchor, are asked for.
        """
        drawn = self._block is not None
        if not drawn and keep > 1:
            raise ValueError("a block draft head gives the logits of the newest token only")
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode():
            if drawn:
                rows = [self._fed(token) for token in tokens]
            else:
                self.length += len(tokens) - min(keep, 1)
                if keep:
                    rows.append(self._fed(tokens[-1]))
        kept = rows[-keep:] if keep else []
        blank = self._head.norm.weight.new_empty(0, self._head.width)
        states = torch.stack([state for _, state in kept]) if kept else blank
        logits = torch.stack([row for row, _ in kept]) if kept else blank.new_empty(0, self.vocabulary)
        return Forward(logits, states if hidden else None)

    def read(
        self, token: int, reader: TokenReader, arrivals: torch.Tensor | None, previous: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed one token and read its row.

        Args:
            token: the id.
            reader: given `next_accept_prob` where the head foresees.
            arrivals: ``(V,)`` for the reader, or None.
            previous: ``(S,)`` for the reader, or None.

        Raises:
            ValueError: the block has no further row.
        """
        with torch.inference_mode():
            logits, state = self._fed(token)
            foresee = {"foresee": self.next_accept_prob} if self.foresees else {}
            return reader(logits, arrivals, state if reader.hidden else None, previous, **foresee)

    def next_accept_prob(self, token: torch.Tensor) -> torch.Tensor:
        """The predicted probability ``()`` float32 that the token drafted after ``token`` is accepted if it is too.

        0 behind the last row, where nothing can be drafted.

        Args:
            token: ``()`` int64, drawn from the newest row.
        """
        if self._block is None:
            raise ValueError("no row was read")
        if self._row + 1 == self._head.block_size:
            return torch.zeros((), device=self.device)
        return self._head.confidence_logit(self._block.hidden[self._row + 1], token).float().sigmoid()

    def rollback(self, length: int) -> None:
        """End the block, and go back to at most ``length`` tokens, all of them with witnessed states."""
        self._block = None
        self.witnessed = min(self.witnessed, length)
        self.length = min(self.length, self.witnessed)

    def _fed(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed one token: the logits ``(V,)`` of its row and the row's hidden state ``(H,)``."""
        head = self._head
        if self._block is None:
            self._block = self._drafted(token)
            self._row = head.config.first_row
            self._memory = head.blank()
        elif self._row + 1 == head.block_size:
            raise ValueError(f"the block drafts {head.longest} tokens")
        else:
            self._row += 1
        self.length += 1
        self._token.fill_(token)  # no copy from the host
        state = self._block.hidden[self._row]
        logits, self._memory = head.row(self._block.logits[self._row], state, self._token, self._memory)
        return logits[: self.vocabulary], state

    def _drafted(self, anchor: int) -> BlockPass:
        """The pass over a block whose anchor is the token at place ``length``."""
        head, block = self._head, self._head.block_size
        self._reserve(self.length + block)
        self._ids[0, 0].fill_(anchor)
        # Places before the anchor only: a block does not attend to its anchor's own state.
        self._cursor.positions = self._places[:block]
        self._cursor.span = block + min(self.witnessed, self.length)
        found: BlockPass = head(self._ids, self._places[self.length : self.length + block], None, self._cache)
        return found

    def _reserve(self, places: int) -> None:
        """Grow the buffers to hold this many places."""
        if places <= self._capacity:
            return
        block = self._head.block_size
        self._capacity = places + max(SPARE, places // 2)
        for layer in self._cache_layers:
            layer.grow(block + self._capacity, block + self.witnessed)
        with torch.inference_mode(False):
            self._places = torch.arange(self._capacity + block, device=self.device)
