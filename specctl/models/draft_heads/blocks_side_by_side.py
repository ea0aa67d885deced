"""Rounds of a block head that begin at consecutive places of one text: their blocks go through one pass."""

from collections.abc import Sequence

import torch
from transformers import Cache

from specctl.models.draft_heads.block import BlockHead
from specctl.models.passes.cache import BufferedLayer
from specctl.models.passes.watching import States
from specctl.models.running.runner import Forward


class BlocksSideBySide:
    """Rounds of a block head, each after a longer prefix of the same text.

    A `specctl.models.draft_heads.block_runner.BlockRunner` runs the same passes one block after the other. Here a block
    attends to the verifier's states of its own prefix, and to itself.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
        text: all of its ids.
    """

    def __init__(self, head: BlockHead, vocabulary: int, text: Sequence[int]) -> None:
        self._head, self._vocabulary, self._text = head, vocabulary, text
        self._weight = head.fc.weight
        self._layers = [BufferedLayer() for _ in range(head.num_layers)]
        self._cache = Cache(layers=list(self._layers))  # between passes it holds the witnessed places alone
        self._witnessed = 0
        self._logits = self._hidden = self._memory = self._weight[:0]  # (B, K, D), (B, K, H) and (B, R)
        self._row = 0  # of the blocks, the one given last

    def witness(self, states: States) -> None:
        """Take the verifier's states of the next T places, ``(T, D)`` for each of the head's layers."""
        fresh = {layer: torch.as_tensor(states[layer]).to(self._weight) for layer in self._head.layers}
        rows = self._head.context_rows(fresh)
        positions = self._witnessed + torch.arange(len(rows), device=self._weight.device)
        self._head.remember(rows[None], positions, self._cache)
        self._witnessed += len(rows)

    def first(self, lengths: Sequence[int]) -> Forward:
        """The pass over the block of each round, and its first row.

        Args:
            lengths: B consecutive numbers of tokens, those that the rounds begin after. The states of all but the last
                of these tokens have been given.

        Returns:
            Logits ``(B, V)``.
        """
        config, device, count = self._head.config, self._weight.device, len(lengths)
        anchors = torch.tensor(lengths, device=device) - 1  # (B,), the places of the newest tokens
        newest = torch.tensor([self._text[length - 1] for length in lengths], device=device)
        places = anchors[:, None] + torch.arange(config.block_size, device=device)  # (B, block)
        ids = torch.full_like(places, config.mask_token)
        ids[:, 0] = newest
        before = torch.arange(self._witnessed, device=device) < anchors[:, None]  # (B, W)
        own = torch.eye(count, dtype=torch.bool, device=device).repeat_interleave(config.block_size, 1)
        mask = torch.cat([before, own], 1).repeat_interleave(config.block_size, 0)  # (B block, W + B block)
        keys = torch.cat([torch.arange(self._witnessed, device=device), places.flatten()])
        found = self._head(ids.flatten()[None], places.flatten(), mask[None, None], self._cache, keys)
        for layer in self._layers:
            layer.crop(ids.numel())
        self._logits, self._hidden = (part.unflatten(0, ids.shape) for part in (found.logits, found.hidden))
        self._memory = self._head.blank().expand(count, -1)
        self._row = config.first_row
        return self._given(newest, hidden=False)

    def further(self, going: Sequence[int], tokens: Sequence[int], *, hidden: bool = False) -> Forward:
        """The next row of some blocks, given their newest tokens.

        Args:
            going: numbers of B' rounds among those of the row before; no other goes on.
            tokens: their newest tokens.
            hidden: whether hidden states are wanted.
        """
        kept = torch.tensor(going, device=self._weight.device)
        self._logits, self._hidden, self._memory = self._logits[kept], self._hidden[kept], self._memory[kept]
        self._row += 1
        return self._given(torch.tensor(tokens, device=kept.device), hidden=hidden)

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Of heads that predict it, `BlockRunner.next_accept_prob` of each round's token ``(B,)``: ``(B,)`` float32."""
        if not self._head.config.confidence:
            return None
        if self._row + 1 == self._head.block_size:
            return torch.zeros(len(tokens), device=self._weight.device)
        return self._head.accept_prob(self._hidden[:, self._row + 1], tokens)

    def _given(self, tokens: torch.Tensor, *, hidden: bool) -> Forward:
        """The row of each block, given the token before it."""
        row = self._hidden[:, self._row]
        logits, self._memory = self._head.row(self._logits[:, self._row], row, tokens, self._memory)
        return Forward(self._head.widened(logits)[:, : self._vocabulary], row if hidden else None)
