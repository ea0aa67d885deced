"""The passes of a block draft head: one pass per block, then one row per token."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from transformers import Cache

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.head import DraftHeadPasses
from specctl.models.draft_heads.verifier_states import PendingStates
from specctl.models.passes.cache import BufferedLayer
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.fixed_buffers import SPARE, FixedBuffers, PassKind, width_of
from specctl.models.passes.forward import Foresee, Forward, Token, TokenReader
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.passes.watching import States
from specctl.models.running.graph import Capturing
from specctl.models.running.passes import Request


class BlockHeadPasses(DraftHeadPasses):
    """Passes of a block draft head.

    Tokens with observed states are not read: their keys and values come from the states. After a rollback, the first
    token whose logits are wanted is the block's anchor. Its pass drafts the whole block, and every later token moves to
    the next row. The block cannot attend to earlier positions without an observed state; all others keep their true
    positions.
    """

    head: BlockHead
    no_trees = None
    _remembered = 0  # positions with cached keys and values
    _row = -1  # the block's newest row; -1 before its pass

    @cached_property
    def _pending(self) -> PendingStates:
        """States of the positions after the cached ones."""
        return PendingStates()

    @property
    def observed(self) -> int:
        return self._remembered + self._pending.count

    def observe_states(self, start: int, states: States) -> None:
        self._pending.add(states, self.observed - start)
        if self._pending.full:
            self._remember()

    @abstractmethod
    def _remember(self) -> None:
        """Cache keys and values of the pending states."""

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        """End the block, and roll back to the last observed position within ``length``."""
        self._row = -1
        self._pending.cut(max(0, length - self._remembered))
        self._remembered = min(self._remembered, length)
        return self.observed

    @property
    def marginals(self) -> bool:  # type: ignore[override]
        return self.head.config.markov is None

    def _extend_tree(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        """Like `Slot.extend_tree`, one level at a time: its tokens move to the block's next row without a pass.

        With a sequential head each token has its own next row; without one all tokens share a row.

        Raises:
            ValueError: the block has no further row.
        """
        assert before, "the newest token is read by `extend`, which makes the pass"
        self._move()
        return self._level(tokens, parents, before == 1, hidden)

    @abstractmethod
    def _level(self, tokens: Sequence[int], parents: Sequence[int], first: bool, hidden: bool) -> Forward:
        """The row after each of a level's tokens; ``first`` for tokens below the root."""

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:  # noqa: ARG002 - it caches nothing of a tree
        """Roll back to the observed positions."""
        return self.rollback(slot, self.observed)

    def _fed(self, tokens: Sequence[int], keep: int) -> Sequence[int]:
        """The tokens that advance through a block's rows; before the block, tokens without wanted logits are skipped.

        Raises:
            ValueError: logits of a token before the block's anchor are requested.
        """
        if self._row >= 0:
            return tokens
        if keep > 1:
            raise ValueError("a block draft head gives logits of the newest token only")
        self.length += len(tokens) - keep
        return tokens[len(tokens) - keep :]

    def _move(self) -> None:
        """Go to the next row of the block.

        Raises:
            ValueError: the block has none.
        """
        if self._row + 1 == self.head.block_size:
            raise ValueError(f"the block drafts {self.head.longest} tokens")
        self._row += 1


class BlockPasses(FixedBuffers, BlockHeadPasses):
    """`BlockHeadPasses` over preallocated buffers, uncompiled or compiled.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    def __init__(
        self, head: BlockHead, vocabulary: int, *, capacity: int = SPARE, compiler: Compiler | None = None
    ) -> None:
        weight = head.fc.weight
        super().__init__(head.num_layers, vocabulary, head.context, weight.device, capacity=capacity, compiler=compiler)
        self._run_head(head, vocabulary)
        # cached positions for the block to attend to
        self._attended = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._ahead = torch.ones(1, device=weight.device)
        self._none_ahead = torch.zeros(1, device=weight.device)
        self._logits = weight.new_empty(0)  # (B, D) of the block
        self._hidden = weight.new_empty(0)  # (B, H)
        self._memory = head.blank()
        self._branches = self._memory[None]  # (N, R), the memories after the N tokens of the last tree

    def fresh(self) -> "BlockPasses":
        return BlockPasses(self.head, self.vocabulary, compiler=self._compiler)

    def _remember(self) -> None:
        start, count = self._remembered, self._pending.count
        if (states := self._pending.take()) is None:
            return
        fresh = {layer: torch.as_tensor(states[layer]).to(self.head.fc.weight) for layer in self.layers}
        fed, self.length = self.length, start  # passes begin at `length`
        self._reserve(self.length + count)
        with torch.inference_mode():
            rows = self.head.context_rows(fresh)  # (T, H)
            kind = PassKind(0, rows=1)
            if count <= WIDEST:
                ids = [0] * count
                self._run(PassKind(width_of(ids), rows=1), ids, rows)
            else:
                for piece, positions, slots in self._pieces(count):
                    self._pass(kind)(self._slots[None, :0], positions, slots, rows[piece])
        self.length, self._remembered = fed, start + count

    def _extend(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        """As `Slot.extend`.

        Raises:
            ValueError: the block has no further row, or logits of a token before its anchor are asked for.
        """
        fed = self._fed(tokens, keep)
        logits, states = [self._hidden.new_empty(0, self._columns)], [self._hidden.new_empty(0, self.head.width)]
        with torch.inference_mode():
            for token in fed:
                base, row = self._next_row(token)
                given = torch.full((), token, dtype=torch.int64, device=self.device)
                found, self._memory = self.head.row(base, row, given, self._memory)
                logits.append(found[None, : self._columns])
                states.append(row[None])
        kept = slice(-keep, None) if keep else slice(0)
        last = torch.cat(states)[kept] if hidden else None
        return Forward(torch.cat(logits)[kept], last, None, self.draft_vocabulary)

    def _level(self, tokens: Sequence[int], parents: Sequence[int], first: bool, hidden: bool) -> Forward:
        base, row = self._logits[self._row], self._hidden[self._row]
        with torch.inference_mode():
            if self.marginals:
                logits = base[None]
            else:
                count = len(tokens)
                branches = self._memory[None] if first else self._branches
                given = branches[sent(parents, self.device)]
                ids = sent(tokens, self.device)
                logits, own = self.head.row(base.expand(count, -1), row.expand(count, -1), ids, given)
                self._branches = torch.cat([branches, own])
        return Forward(logits[:, : self._columns], row[None] if hidden else None, None, self.draft_vocabulary)

    @property
    def widest_sample(self) -> int:
        """Any number: tokens before the anchor are not read, and each later one moves to the next row."""
        return WIDEST

    def _sample(self, request: Request) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Slot.sample`.

        Raises:
            ValueError: the block has no further row.
        """
        tokens, reader = request.tokens, cast("TokenReader", request.reader)
        if len(tokens) > 1:
            self._extend([int(token) for token in tokens[:-1]], 0, hidden=False)
        token = tokens[-1]
        with torch.inference_mode():
            base, row = self._next_row(token)
            last = self._row + 1 == len(self._hidden)
            ahead = (row, self._none_ahead) if last else (self._hidden[self._row + 1], self._ahead)
            kind = PassKind(1, reader.hidden, reader)
            self._reserve(self.length + 1)
            given = (base, row, self._memory, *ahead, request.about, request.previous)
            values, probs, self._memory = self._run(kind, [token], *given)
        return values, probs

    @property
    def foresee(self) -> Foresee | None:
        return self._next_accept_prob if self.head.config.confidence else None

    def _next_accept_prob(self, token: torch.Tensor) -> torch.Tensor:
        """The predicted acceptance ``()`` of the token that is drafted after ``token``, sampled from the newest row.

        It assumes that all earlier tokens are accepted. 0 after the last row, where nothing can be drafted.
        """
        if self._row + 1 == len(self._hidden):
            return torch.zeros((), device=self.device)
        with torch.inference_mode():
            return self.head.accept_prob(self._hidden[self._row + 1], token)

    def _next_row(self, token: Token) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance by one token: its row's logits ``(D,)`` before the sequential head, and its hidden state ``(H,)``."""
        head = self.head
        if self._row < 0:
            self._remember()
            self._reserve(self.length + head.block_size)
            self._attended.fill_(min(self.observed, self.length))
            block = [token, *[head.config.mask_token] * (head.block_size - 1)]
            self._logits, self._hidden, _ = self._run(PassKind(0, hidden=True), block, self._attended)
            self._row, self._memory = head.config.first_row, head.blank()
        else:
            self._move()
        self.length += 1
        return self._logits[self._row], self._hidden[self._row]

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:  # noqa: ARG002 - all rows are wanted
        """See `FixedBuffers`: a pass of a block's row with a reader, of context rows, or of a block."""
        head, reader = self.head, kind.reader
        if reader is not None:

            def reading_of(
                ids: torch.Tensor,
                positions: torch.Tensor,  # noqa: ARG001 - every pass is given them
                slots: torch.Tensor,  # noqa: ARG001
                base: torch.Tensor,
                row: torch.Tensor,
                memory: torch.Tensor,
                ahead: torch.Tensor,
                is_ahead: torch.Tensor,
                uniform: torch.Tensor | None,
                previous: torch.Tensor | None,
            ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
                """``ahead`` is the hidden state ``(H,)`` of the row after this one, ``is_ahead`` ``(1,)`` 0 if none."""
                logits, memory = head.row(base, row, ids[0, 0], memory)

                def foresee(token: torch.Tensor) -> torch.Tensor:
                    return head.accept_prob(ahead, token) * is_ahead[0]

                state = row if kind.hidden else None
                known = foresee if head.config.confidence else None
                values, probs = reader(logits[: self._columns], uniform, state, previous, known)
                return values, probs, memory

            return reading_of
        if kind.rows:

            def remembered(
                ids: torch.Tensor,  # noqa: ARG001 - every pass is given them
                positions: torch.Tensor,
                slots: torch.Tensor,
                rows: torch.Tensor,
            ) -> tuple[None, None, None]:
                self._cursor.positions, self._cursor.span = positions, slots.shape[0]
                head.remember(rows[None], positions, self._cache)
                return None, None, None

            return remembered

        def block_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, known: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, None]:
            self._cursor.positions, self._cursor.span = positions, slots.shape[0]
            offset = slots - positions[0]
            mask = (slots < known) | ((offset >= 0) & (offset < head.block_size))  # (S,)
            found = head(ids, positions, mask[None, None, None], self._cache, slots)
            return found.logits, found.hidden, None

        return block_of


class GraphBlockPasses(Capturing, BlockPasses):
    """`BlockPasses` captured as CUDA graphs."""

    multiplies = False


class BlockRounds:
    """Rounds of a block head, each after a longer prefix of the same text.

    Batched equivalent of `BlockPasses`: each block attends to the verifier's states of its own prefix and to itself.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
        text: all of its ids.
    """

    def __init__(self, head: BlockHead, vocabulary: int, text: Sequence[int]) -> None:
        self._head, self._vocabulary, self._text = head, vocabulary, text
        self._weight = head.fc.weight
        self._layers = [BufferedLayer() for _ in range(head.num_layers)]
        self._cache = Cache(layers=list(self._layers))  # between passes it holds observed positions only
        self._observed = 0
        self._logits = self._hidden = self._memory = self._weight[:0]  # (B, K, D), (B, K, H) and (B, R)
        self._row = 0  # the blocks' newest row

    def observe_states(self, states: States) -> None:
        """Take the verifier's states of the next T positions, ``(T, D)`` for each of the head's layers."""
        fresh = {layer: torch.as_tensor(states[layer]).to(self._weight) for layer in self._head.layers}
        rows = self._head.context_rows(fresh)
        positions = self._observed + torch.arange(len(rows), device=self._weight.device)
        self._head.remember(rows[None], positions, self._cache)
        self._observed += len(rows)

    def first(self, lengths: Sequence[int]) -> Forward:
        """Run the pass over each round's block; returns the logits ``(B, V)`` of its first row.

        ``lengths`` are B consecutive numbers of tokens, after which the rounds begin. The states of all but the last of
        these tokens have been given.
        """
        anchors = torch.tensor(lengths, device=self._weight.device) - 1  # (B,), the positions of the newest tokens
        newest = torch.tensor([self._text[length - 1] for length in lengths], device=anchors.device)
        self._logits, self._hidden = self._head.from_anchors(newest, anchors, self._observed, self._cache)
        for layer in self._layers:
            layer.crop(len(lengths) * self._head.block_size)
        self._memory = self._head.blank().expand(len(lengths), -1)
        self._row = self._head.config.first_row
        return self._given(newest, hidden=False)

    def further(self, going: Sequence[int], tokens: Sequence[int], *, hidden: bool = False) -> Forward:
        """The next row of some blocks, given their indices in the previous row and their newest tokens."""
        left = torch.tensor(going, device=self._weight.device)
        self._logits, self._hidden, self._memory = self._logits[left], self._hidden[left], self._memory[left]
        self._row += 1
        return self._given(torch.tensor(tokens, device=left.device), hidden=hidden)

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The predicted acceptance of the next tokens after ``tokens`` ``(B,)``, of heads that predict it: ``(B,)``
        float32.
        """
        if not self._head.config.confidence:
            return None
        if self._row + 1 == self._head.block_size:
            return torch.zeros(len(tokens), device=self._weight.device)
        return self._head.accept_prob(self._hidden[:, self._row + 1], tokens)

    def _given(self, tokens: torch.Tensor, *, hidden: bool) -> Forward:
        """Each block's row, given the previous token."""
        row = self._hidden[:, self._row]
        logits, self._memory = self._head.row(self._logits[:, self._row], row, tokens, self._memory)
        return Forward(self._head.widened(logits)[:, : self._vocabulary], row if hidden else None)
