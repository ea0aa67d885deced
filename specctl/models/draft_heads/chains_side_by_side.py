"""Rounds of a chain head that begin at consecutive places of one text, side by side over one shared cache."""

from collections.abc import Sequence

import torch
from transformers import Cache

from specctl.models.draft_heads.chain import ChainHead, ChainPass
from specctl.models.passes.cache import BufferedLayer
from specctl.models.passes.fixed_buffers import PIECE
from specctl.models.passes.watching import States
from specctl.models.running.runner import Forward


class SideBySide:
    """Rounds of a chain head, each after a longer prefix of the same text.

    A `HeadRunner` runs the same passes one round after the other. Here the text is read once, with the rows of the
    verifier's states. A round attends to what was read of its own prefix, and to its own draft tokens.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
        text: all of its ids.
    """

    def __init__(self, head: ChainHead, vocabulary: int, text: Sequence[int]) -> None:
        self._head, self._vocabulary, self._text = head, vocabulary, text
        weights = next(head.parameters())
        self._device = weights.device
        # The cache holds the text as far as it was read, and behind it the draft tokens of the rounds.
        self._layers = [BufferedLayer() for _ in range(head.num_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._rows = torch.zeros(1, head.row_size, device=weights.device, dtype=weights.dtype)
        """``(N, R)`` of the places before the tokens to be read next, as far as they are known."""
        self._read = 0
        self._lengths = torch.empty(0, dtype=torch.int64, device=self._device)  # (B,) tokens of each round's prefix
        self._rounds = self._lengths  # (B,) the numbers of the rounds
        self._owners = self._lengths  # by draft token in the cache, the number of its round
        self._places = self._lengths  # by draft token in the cache, its place
        self._own = self._rows  # (B, R)
        self._step = 0
        self._begun: ChainPass | None = None  # of the pass over the rounds' newest tokens

    def witness(self, states: States) -> None:
        """Take the verifier's states of the next T places, ``(T, D)`` for each of the head's layers."""
        fresh = {layer: torch.as_tensor(states[layer]).to(self._rows) for layer in self._head.layers}
        self._rows = torch.cat([self._rows, self._head.fuse(fresh)])

    def first(self, lengths: Sequence[int], *, hidden: bool = False) -> Forward:
        """The pass behind each round's first token.

        Args:
            lengths: B consecutive numbers of tokens, those that the rounds begin after, which go on where the last
                ones ended, or are the same once more. The states of all but the last of these tokens have been given.
            hidden: whether hidden states are wanted.

        Returns:
            Logits ``(B, V)``, and hidden states ``(B, H)``.
        """
        for layer in self._layers:
            layer.crop(len(self._owners))
        end = lengths[-1]
        if self._begun is None or end != self._read:
            while end - self._read > PIECE:  # in pieces that keep masks small; all that the rounds need is in the last
                self._read_text(min(self._read + PIECE, lengths[0] - 1), 1)
            self._begun = self._read_text(end, len(lengths))
        found = self._begun
        self._lengths = torch.tensor(lengths, device=self._device)
        self._rounds = torch.arange(len(lengths), device=self._device)
        self._owners, self._places, self._step = self._rounds[:0], self._rounds[:0], 0
        return self._forward(found, hidden)

    def further(self, going: Sequence[int], tokens: Sequence[int], *, hidden: bool = False) -> Forward:
        """The pass behind the next token of some rounds, which read their newest token.

        Args:
            going: numbers of B' rounds among those of the pass before; no other goes on.
            tokens: their newest tokens.
            hidden: whether hidden states are wanted.
        """
        kept = torch.tensor(going, device=self._device)
        self._lengths, self._rounds, self._own = self._lengths[kept], self._rounds[kept], self._own[kept]
        self._owners = torch.cat([self._owners, self._rounds])
        slots = torch.arange(self._read, device=self._device)
        positions = self._lengths + self._step
        before = self._head.causal(slots, positions) & (slots < self._lengths[:, None])  # (B', read)
        self._places = torch.cat([self._places, positions])
        own = self._owners == self._rounds[:, None]  # (B', drafted)
        if self._head.window:
            own &= self._head.near(self._places, positions)
        mask = torch.cat([before, own], dim=1)
        ids = torch.tensor([tokens], device=self._device)
        self._step += 1
        return self._forward(self._head(ids, self._own[None], positions, mask[None, None], self._cache), hidden)

    def _read_text(self, stop: int, keep: int) -> ChainPass:
        """Read the text up to ``stop`` tokens; the outputs of at least the last ``keep``, if it has as many."""
        count = stop - self._read
        positions = torch.arange(self._read, stop, device=self._device)
        mask = self._head.causal(torch.arange(stop, device=self._device), positions)  # (T, S)
        ids = torch.tensor([self._text[self._read : stop]], device=self._device)
        rows, self._rows = self._rows[:count], self._rows[count:]
        found: ChainPass = self._head(ids, rows[None], positions, mask[None, None], self._cache, min(keep, count))
        self._read = stop
        return found

    def _forward(self, found: ChainPass, hidden: bool) -> Forward:
        self._own = found.rows
        logits = self._head.widened(found.logits)[:, : self._vocabulary]
        return Forward(logits, found.hidden if hidden else None)
