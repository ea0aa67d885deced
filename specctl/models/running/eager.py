"""Any causal language model of transformers with a KV cache, for one sequence."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specctl.models.passes.cache import BufferedLayer, cache_argument, empty_cache, trims_from
from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.masks import MaskMaker, aligned_mask, attends_to_everything, mask_obstacle
from specctl.models.passes.recurrent_state import (
    RecurrentState,
    has_recurrent_state,
    reads_prompts_whole,
    step_through_blocks,
)
from specctl.models.passes.rotation import rotated_by, rotation_of
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.trimmed_output import vocabulary_of
from specctl.models.passes.watching import LAST, LayerWatch
from specctl.models.passes.weights import device_of
from specctl.models.running.context import ENDLESS, context_length
from specctl.models.running.passes import Passes, Request

REREAD = 16
"""The most accepted tokens that a model with a recurrent state rereads together with a draft. More of them are read by
a separate pass, after which the state is saved.
"""


class EagerPasses(Passes):
    """Any causal LM of transformers, over a cache that grows with the sequence.

    A recurrent state cannot go back token by token. A rollback restores the last state saved before that point, and the
    caller's next pass reads the accepted tokens again.

    Args:
        model: in eval mode, on its device or devices.
        vocabulary: the pair's shared real vocabulary V; logits beyond it are padding and are cut off.
    """

    engine = "eager"
    length = 0

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        step_through_blocks(model)
        self._model = model
        self._vocabulary = vocabulary
        self.draft_vocabulary = vocabulary_of(model)
        self._cache_argument = cache_argument(type(model))
        self._recurrent = has_recurrent_state(model)
        self._begin()
        self._trims_from = trims_from(self._cache)
        self._masks = MaskMaker(model)
        self._watch = LayerWatch(model)
        self._last = LayerWatch(model)
        self._sight = TreeSight()
        self._rotation = rotation_of(model)
        self._rotated_as = 0
        self.holds_everything = attends_to_everything(model)
        self.no_trees = mask_obstacle(model)
        self.no_rows = self._no_rows(model)
        self.whole_prompts = reads_prompts_whole(model)
        self.context = context_length(model) or ENDLESS
        # Over several devices, accelerate's hooks move inputs to the first device and return the logits to it.
        self.device = device_of(model)

    @staticmethod
    def _no_rows(model: PreTrainedModel) -> str | None:
        from specctl.models.running.static import obstacle

        return obstacle(model)

    def over(self, slots: int, width: int | None = None) -> Passes:
        from specctl.models.running.static import StaticBatch

        return StaticBatch(self._model, slots, self._vocabulary, self._watch, self._last, width).like(self)

    @property
    def model(self) -> PreTrainedModel:
        """The network."""
        return self._model

    def _begin(self) -> None:
        self._cache = empty_cache(self._model.config, recurrent=self._recurrent)
        self._state = RecurrentState(self._cache, self._recurrent)
        self._fresh = True  # whether no pass has run since the last rollback
        self._saved = False  # whether the recurrent state was saved since then
        self._floor = 0  # trimmed layers cannot go back further than this
        self.length = 0

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        if request.after < self.length:
            self.rollback(0, request.after)
        assert self.length == request.after, "the cache cannot go back that far"
        self._rotated_as = request.rotated_as
        if request.parents is not None:
            return [self._read_tree(request.tokens, request.parents, request.before, request.hidden)]
        return [self._read(request.tokens, request.keep, request.hidden)]

    def _read(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        parts: list[Forward] = []
        # A pass with at most one row of logits, right after a rollback, reads tokens that stay; later ones may be
        # rolled back.
        if self._recurrent and not self._saved and not (self._fresh and keep <= 1):
            # A prompt that must be read whole includes its last token, to compute its logits.
            behind = keep - 1 if self.whole_prompts and not self.length else keep
            stay = max(len(tokens) - behind, 1 - self.length) if self._fresh else 0
            if stay > (REREAD if self.length else 0):
                behind = len(tokens) - stay
                parts.append(self._pass(tokens[:stay], max(keep - behind, 0), hidden))
                tokens, keep = tokens[stay:], min(keep, behind)
            self._state.save(self.length)
            self._saved = True
        parts.append(self._pass(tokens, keep, hidden))
        self._fresh = False
        return parts[0] if len(parts) == 1 else joined(parts)

    def _pass(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        ids = sent(tokens, self.device)[None]  # (1, T)
        more: dict[str, Any] = self._masks.arguments(self.length, len(tokens))
        if hidden:
            self._last.watch([LAST])
        more[self._cache_argument] = self._cache
        with rotated_by(self._rotation, self._rotated_as):
            output = self._model(
                input_ids=ids,
                use_cache=True,
                logits_to_keep=max(keep, 1),  # 0 would mean all of them
                **more,
            )
        self._state.after_pass()
        self.length += len(tokens)
        kept = slice(-keep, None) if keep else slice(0)
        logits = output.logits[0, kept, : self._vocabulary]
        last = self._last_states(kept) if hidden else None
        return Forward(logits, last, self._watch.take(), self.draft_vocabulary)

    def _last_states(self, kept: slice) -> torch.Tensor:
        """The states ``(keep, D)`` after the final norm in the last pass; a model on several devices has them on its
        last one.

        transformers' own hidden states would move those of every layer to the first device.
        """
        found = self._last.take()
        assert found is not None
        return found[LAST][kept].to(self.device)

    def watch(self, layers: Iterable[int]) -> None:
        self._watch.watch(layers)

    def masked_pass(
        self, tokens: Sequence[int], positions: torch.Tensor, seen: torch.Tensor, *, hidden: bool = False
    ) -> Forward:
        if hidden:
            self._last.watch([LAST])
        with rotated_by(self._rotation, self._rotated_as):
            output = self._model(
                input_ids=sent(tokens, self.device)[None],
                position_ids=positions[None],
                attention_mask=aligned_mask(seen, self._model.dtype)[None, None],  # (1, 1, T, S)
                use_cache=True,
                **{self._cache_argument: self._cache},
            )
        self.length += len(tokens)
        last = self._last_states(slice(None)) if hidden else None
        logits = output.logits[0, :, : self._vocabulary]
        return Forward(logits, last, self._watch.take(), self.draft_vocabulary)

    def _read_tree(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        own = sent(torch.from_numpy(self._sight.grown(parents, before)), self.device)  # (T, B + T)
        start = self.length - before
        prefix = own.new_ones(len(tokens), start)
        return self.masked_pass(tokens, start + own.sum(1) - 1, torch.cat([prefix, own], 1), hidden=hidden)

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        for layer in self._cache.layers:
            assert isinstance(layer, BufferedLayer), self.no_trees
            layer.move(start, path)
        return self.rollback(slot, start + len(path))

    def plain_cache(self, text: Sequence[int]) -> DynamicCache:
        """A cache of transformers' own layers that holds exactly this text, already cached here.

        Full-attention layers are copied. Others may have dropped entries, so for them the text is read again.
        """
        cache = DynamicCache(config=self._model.config)
        if all(isinstance(layer, BufferedLayer) for layer in self._cache.layers) and not self._recurrent:
            for number, layer in enumerate(self._cache.layers):
                assert isinstance(layer, BufferedLayer), "asked above"
                cache.update(layer.keys[:, :, : len(text)], layer.values[:, :, : len(text)], number)
        else:
            arguments: dict[str, Any] = {self._cache_argument: cache, "logits_to_keep": 1}
            with rotated_by(self._rotation, self._rotated_as):
                self._model(input_ids=torch.tensor([list(text)], device=self.device), use_cache=True, **arguments)
        return cache

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        self._fresh, self._saved = True, False
        kept = min(self.length, length)
        if kept < self.length and self._recurrent:
            kept = self._state.nearest(kept)
        if kept < max(self._floor, 1):
            self._begin()
            return 0
        self._state.crop(self.length - kept)  # even with nothing to remove, since this trims too
        if kept < self.length and self._recurrent:
            self._state.restore(kept)
        if self._trims_from is not None and self.length >= self._trims_from:
            self._floor = kept
        self.length = kept
        return kept
