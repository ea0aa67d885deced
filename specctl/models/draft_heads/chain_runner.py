"""The passes of a chain draft head, over its verifier's states, then its own output."""

from collections.abc import Sequence
from typing import cast

import torch
from transformers import Cache

from specctl.models.draft_heads.chain import ChainHead, ChainPass
from specctl.models.draft_heads.head import DraftHeadPasses
from specctl.models.draft_heads.verifier_states import HeadInputs
from specctl.models.passes.cache import BufferedLayer
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.fixed_buffers import PIECE, SPARE, FixedBufferNetwork, Found, PassKind, width_of
from specctl.models.passes.forward import Forward, TokenReader
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.watching import States
from specctl.models.running.graph import Capturing
from specctl.models.running.passes import Request


class ChainPasses(FixedBufferNetwork, DraftHeadPasses):
    """Passes of a chain head over preallocated buffers, uncompiled or compiled.

    The token at position p is read with the features of position p - 1. Tokens with known features run in one pass.
    Each later one needs its own pass, with the features from the pass before it. A sequence's first token has no
    previous position: it is read with zeros, and in most heads no other token attends to it.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; ids beyond it are padding and are cut off.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    head: ChainHead

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
        self._blank = torch.zeros(1, head.feature_size, device=weights.device, dtype=weights.dtype)  # (1, F)
        with torch.inference_mode():
            self._inputs = HeadInputs(self._blank, self._fused, head.mask_features())
        self._branches = self._blank  # (N, F), the head's own features after the N tokens of the last tree

    def fresh(self) -> "ChainPasses":
        return ChainPasses(self.head, self.vocabulary, compiler=self._compiler)

    @property
    def observed(self) -> int:
        return self._inputs.observed

    def observe_states(self, start: int, states: States) -> None:
        self._inputs.observe_states(start, states)

    def _fused(self, states: States) -> torch.Tensor:  # (T, F)
        with torch.inference_mode():
            return self.head.fuse({layer: torch.as_tensor(states[layer]).to(self._blank) for layer in self.layers})

    def _extend_tree(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        """Like `Slot.extend_tree`, one level at a time: a token is read with the features after its parent."""
        assert max(parents) < before, "a parent has to be read in an earlier pass"
        self._inputs.take_pending()
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            if before == 1:
                self._branches = self._next_rows(1)
            given = self._branches[sent(parents, self.device)]  # (T, F)
            logits, last, own = self._read_tree(tokens, parents, before, hidden, given)
            self._branches = torch.cat([self._branches, own])
        return Forward(logits, last, vocabulary=self.draft_vocabulary)

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:  # noqa: ARG002 - it caches nothing of a tree
        """Roll back to the tokens read with features of the verifier's states."""
        return self.rollback(slot, self._inputs.true)

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        return self._inputs.rollback(length)

    def _extend(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        self._inputs.take_pending()
        self._reserve(self.length + len(tokens))
        logits: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        done = 0
        with torch.inference_mode():
            for some in self._inputs.pieces(self.length, tokens):
                done += len(some)
                part, state, _ = self._read(some, max(0, keep - (len(tokens) - done)), hidden)
                logits.append(part)
                states += [] if state is None else [state]
        last = slice(-keep, None) if keep else slice(0)
        whole = torch.cat(logits) if logits else torch.empty(0, self._columns, device=self.device)
        return Forward(whole[last], torch.cat(states)[last] if hidden else None, None, self.draft_vocabulary)

    def _sample(self, request: Request) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Slot.sample`; the last token has its own pass if its features are unknown."""
        tokens, reader = request.tokens, cast("TokenReader", request.reader)
        self._inputs.take_pending()
        if len(tokens) > max(1, self._inputs.known(self.length)):
            self._extend([int(token) for token in tokens[:-1]], 0, hidden=False)
            tokens = tokens[-1:]
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            kind = PassKind(width_of(tokens), reader.hidden, reader, rows=1)
            features = self._next_rows(len(tokens))
            values, probs, own = self._run(kind, tokens, features, request.about, request.previous)
        self._advance(len(tokens), own)
        return values, probs

    def _next_rows(self, count: int) -> torch.Tensor:  # (count, F)
        """The features to read the next tokens with."""
        features: torch.Tensor = self._inputs.next(self.length, count)
        known = self._inputs.known(self.length) > 0
        return features.clone() if known else features  # a view would be compiled separately

    def _advance(self, count: int, further: torch.Tensor) -> None:
        """See `FixedBufferNetwork`; ``further`` are the head's own features ``(T, F)`` after the tokens."""
        self._inputs.advance(self.length, count, further[-1:])
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
        """See `FixedBufferNetwork`; its further output is the head's own features ``(T, F)``."""
        assert rows is not None, "of `_next_rows`"
        seen = self.head.attended(mask, slots, written)
        found = self.head(ids, rows[None], positions, seen[None, None], self._cache, keep)
        return found.logits[:, : self._columns], found.hidden if kind.hidden else None, found.features


class GraphChainPasses(Capturing, ChainPasses):
    """`ChainPasses` captured as CUDA graphs."""

    multiplies = False


class ChainRounds:
    """Rounds of a chain head, each after a longer prefix of the same text.

    Batched equivalent of `ChainPasses`: the text is read once, with features of the verifier's states. A round attends
    to its own prefix of the text and to its own draft tokens.

    Args:
        head: in eval mode, on one device.
        vocabulary: the pair's shared vocabulary V; logits beyond it are padding and are cut off.
        text: all of its ids.
    """

    def __init__(self, head: ChainHead, vocabulary: int, text: Sequence[int]) -> None:
        self._head, self._vocabulary, self._text = head, vocabulary, text
        weights = next(head.parameters())
        self._device = weights.device
        # The cache holds the tokens of the text read so far, then the rounds' draft tokens.
        self._layers = [BufferedLayer() for _ in range(head.num_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._features = torch.zeros(1, head.feature_size, device=weights.device, dtype=weights.dtype)
        """The known features ``(N, F)`` for the tokens to be read next."""
        self._read = 0
        self._lengths = torch.empty(0, dtype=torch.int64, device=self._device)  # (B,) tokens of each round's prefix
        self._rounds = self._lengths  # (B,) the numbers of the rounds
        self._owners = self._lengths  # by draft token in the cache, the number of its round
        self._places = self._lengths  # by draft token in the cache, its place
        self._own = self._features  # (B, F)
        self._step = 0
        self._begun: ChainPass | None = None  # the pass over the rounds' newest tokens

    def observe_states(self, states: States) -> None:
        """Take the verifier's states of the next T positions, ``(T, D)`` for each of the head's layers."""
        fresh = {layer: torch.as_tensor(states[layer]).to(self._features) for layer in self._head.layers}
        self._features = torch.cat([self._features, self._head.fuse(fresh)])

    def first(self, lengths: Sequence[int], *, hidden: bool = False) -> Forward:
        """Run the rounds' first pass: logits ``(B, V)`` and, if wanted, hidden states ``(B, H)``.

        ``lengths`` are B consecutive numbers of tokens, after which the rounds begin. They continue the previous call's
        numbers or repeat them. The states of all these tokens but the last must have been observed.
        """
        for layer in self._layers:
            layer.crop(len(self._owners))
        end = lengths[-1]
        if self._begun is None or end != self._read:
            while end - self._read > PIECE:  # in pieces that keep masks small; the rounds need only the last one
                self._read_text(min(self._read + PIECE, lengths[0] - 1), 1)
            self._begun = self._read_text(end, len(lengths))
        found = self._begun
        self._lengths = torch.tensor(lengths, device=self._device)
        self._rounds = torch.arange(len(lengths), device=self._device)
        self._owners, self._places, self._step = self._rounds[:0], self._rounds[:0], 0
        return self._forward(found, hidden)

    def further(self, going: Sequence[int], tokens: Sequence[int], *, hidden: bool = False) -> Forward:
        """Run a pass over the newest tokens of some rounds, given their indices in the previous pass."""
        left = torch.tensor(going, device=self._device)
        self._lengths, self._rounds, self._own = self._lengths[left], self._rounds[left], self._own[left]
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
        """Read the text up to ``stop`` tokens; returns the outputs of at least the last ``keep``, if available."""
        count = stop - self._read
        positions = torch.arange(self._read, stop, device=self._device)
        mask = self._head.causal(torch.arange(stop, device=self._device), positions)  # (T, S)
        ids = torch.tensor([self._text[self._read : stop]], device=self._device)
        features, self._features = self._features[:count], self._features[count:]
        found: ChainPass = self._head(ids, features[None], positions, mask[None, None], self._cache, min(keep, count))
        self._read = stop
        return found

    def _forward(self, found: ChainPass, hidden: bool) -> Forward:
        self._own = found.features
        logits = self._head.widened(found.logits)[:, : self._vocabulary]
        return Forward(logits, found.hidden if hidden else None)
