"""torch passes over preallocated buffers, for one sequence or several."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from specctl.models.passes.cache import cache_argument
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.cuda_kernels import attend_in_groups, fuse_norms
from specctl.models.passes.fixed_buffers import (
    SPARE,
    FixedBufferNetwork,
    Found,
    PassKind,
    RowCursor,
    RowLayer,
    span_class,
    width_of,
)
from specctl.models.passes.forward import Forward
from specctl.models.passes.masks import additive, aligned, mask_obstacle
from specctl.models.passes.rotation import rotated_by, rotation_of
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.trimmed_output import vocabulary_of
from specctl.models.passes.watching import LAST, LayerWatch, joined_states
from specctl.models.passes.weights import Where, device_of
from specctl.models.running.context import ENDLESS, context_length
from specctl.models.running.passes import Passes, Request


def obstacle(model: PreTrainedModel, where: Where | None = None) -> str | None:
    """Why a model cannot run over fixed buffers, as the end of a sentence; None if it can.

    Args:
        model: loaded, or its skeleton.
        where: where its weights are or will be; None to look at the loaded model.
    """
    where = where or Where.of(model)
    if len(where.devices) > 1:
        return "it is spread over several devices"
    if where.quantised == QuantizationMethod.BITS_AND_BYTES.value:
        return "its weights are quantised with bitsandbytes"
    if (rotation := rotation_of(model)) is not None and rotation.each:
        return "it rotates positions again with every token of a long text"
    return mask_obstacle(model)


class StaticPasses(FixedBufferNetwork, Passes):
    """Passes over preallocated buffers.

    Args:
        model: a model without an `obstacle`, in eval mode, on one device.
        vocabulary: as for `EagerPasses`.
        capacity: initial capacity in tokens.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    def __init__(
        self, model: PreTrainedModel, vocabulary: int, *, capacity: int = SPARE, compiler: Compiler | None = None
    ) -> None:
        super().__init__(
            model.config.get_text_config(decoder=True).num_hidden_layers,
            vocabulary,
            context_length(model) or ENDLESS,
            device_of(model),
            capacity=capacity,
            compiler=compiler,
        )
        self._model = model
        if self.device.type == "cuda":
            attend_in_groups(model)
            fuse_norms(model)
        self.no_rows = None
        self.draft_vocabulary = vocabulary_of(model)
        self._watch = LayerWatch(model)
        self._last = LayerWatch(model)  # for passes over several sequences
        self._cached = {cache_argument(type(model)): self._cache}
        self._remembers = False
        self._states = torch.empty(0)  # (1, T, D)
        self._rotation = rotation_of(model)
        with torch.inference_mode(False):  # compiled or captured passes read it in place
            self._rotated_as = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._rotated_to = 0  # the value in this tensor

    def _remember(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._states = given[0].detach()  # as in `LayerWatch`: the hook outlives this runner

    def _begin(self, request: Request) -> None:
        self.length = request.after
        self._reserve(request.after + len(request.tokens))
        if request.rotated_as != self._rotated_to:
            self._rotated_as.fill_(request.rotated_as)
            self._rotated_to = request.rotated_as

    def answer(self, request: Request) -> Any:
        reader: Any = request.reader
        if reader is None:
            return self._answer(request)
        self._begin(request)
        with torch.inference_mode():
            kind = PassKind(width_of(request.tokens), reader.hidden, reader)
            values, probs, _ = self._run(kind, request.tokens, None, request.about, request.previous)
        return values, probs

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        return [self._answer(request)]

    def _answer(self, request: Request) -> Forward:
        self._begin(request)
        tokens, keep, hidden = request.tokens, request.keep, request.hidden
        with torch.inference_mode():
            if request.parents is not None:
                return Forward(*self._read_tree(tokens, request.parents, request.before, hidden), self.draft_vocabulary)
            logits, last, states = self._read(tokens, keep, hidden)
        kept = slice(-keep, None) if keep else slice(0)
        seen = states[0] if len(states) == 1 else joined_states(states)
        return Forward(logits[kept], None if last is None else last[kept], seen, self.draft_vocabulary)

    def over(self, slots: int, width: int | None = None) -> Passes:

        return StaticBatch(self._model, slots, self.vocabulary, self._watch, self._last, width).like(self)

    def watch(self, layers: Iterable[int]) -> None:
        self._watch.watch(layers)

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:  # noqa: ARG002 - there is one
        for layer in self._layers:
            layer.move(start, path)
        return start + len(path)

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        return length

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        if kind.hidden and not self._remembers:
            # The output layer's input: torch.compile cannot trace transformers' own way of returning hidden states.
            head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.register_forward_pre_hook(self._remember)
            self._remembers = True
        return super()._pass(kind, keep)

    def _network(
        self,
        kind: PassKind,
        keep: int,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        slots: torch.Tensor,  # noqa: ARG002 - the mask says it all
        written: torch.Tensor,  # noqa: ARG002
        rows: torch.Tensor | None,  # noqa: ARG002 - a model reads its tokens and nothing else
    ) -> Found:
        """As in `FixedBufferNetwork`; its further output are the states ``(T, D)`` by layer, or None."""
        with rotated_by(self._rotation, self._rotated_as):
            output = self._model(
                input_ids=ids,
                position_ids=positions[None],
                attention_mask=additive(mask, self._model.dtype)[None, None],  # (1, 1, T, S)
                use_cache=True,
                logits_to_keep=keep,
                **self._cached,
            )
        last = self._states[0] if kind.hidden else None
        states = self._watch.take()
        return output.logits[0, :, : self.vocabulary], last, states if kind.reader is None else None


WIDE = 16
"""A sequence with more tokens than this in a pass gets a separate one: padding all others would cost more than it
saves.
"""
TOGETHER = 1024
"""On CUDA such sequences share a pass over at most this many slots, with padding. With few tokens the device waits for
launches, which take as long for any size; beyond that, the caches of long texts would be copied.
"""


BatchOutputs = tuple[torch.Tensor, dict[int, torch.Tensor] | None, torch.Tensor | None]
"""The results of a pass: logits ``(n, keep, V)``; the watched states ``(n, W, D)`` by layer; the last states, if
wanted.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties that requests must share to be in one pass: sequences, tokens of each, slots, logits of each."""

    count: int
    width: int
    span: int
    keep: int


class StaticBatch(Passes):
    """`Passes` of a model of transformers without a `static.obstacle`, over buffers with a row for each sequence.

    Sequences of a pass are padded on the left to the widest one, so that their last tokens are in one column. Padding
    is written to a slot that no token attends to. A sequence without a request is left out, or is padding in a pass
    over all rows, where each sequence has its own row's place and no keys need to be selected. Trees have separate
    passes.

    Args:
        model: in eval mode, on one device.
        slots: the number of sequences.
        vocabulary: as for `EagerPasses`.
        watch: captures the layers with states that every pass returns.
        last: captures the last states, where they are wanted. Both are the runner's own; otherwise each tried number of
            rows would leave hooks in all later passes.
        width: see `Passes.over`. Such passes are over all sequences and read this many tokens of each, with padding for
            those without a request. Sequences with another class of span have separate passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        vocabulary: int,
        watch: LayerWatch,
        last: LayerWatch,
        width: int | None = None,
    ) -> None:
        self._model, self.slots, self._vocabulary = model, slots, vocabulary
        self._ids = vocabulary_of(model)
        self._device = device_of(model)
        self._context = context_length(model) or ENDLESS
        self._capacity = aligned(min(SPARE, self._context))
        self._cursor = RowCursor()
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        # One row more than sequences, and one slot more than any pass attends to, are for padding.
        self._layers = [RowLayer(self._cursor, self._capacity + 1, slots + 1) for _ in range(layers)]
        self._cached = {cache_argument(type(model)): Cache(layers=list(self._layers))}
        self._rotation = rotation_of(model)
        self._watch, self._last = watch, last
        self._width = width
        self._sights = [TreeSight() for _ in range(slots)]

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        found: dict[int, Forward] = {}
        wide: dict[bool, list[Request]] = {False: [], True: []}
        together: dict[tuple[bool, int], list[Request]] = {}
        for request in requests:
            tree = request.parents is not None
            if len(request.tokens) > WIDE:
                wide[tree].append(request)
            else:
                span = 0 if self._width is None else self._span(request.after + len(request.tokens))
                together.setdefault((tree, span), []).append(request)
        for part in (*self._wide(wide[False]), *self._wide(wide[True]), *together.values()):
            found |= self._pass(part)
        return [found[request.slot] for request in requests]

    def _wide(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Separate passes of sequences that are too wide to share one with all others."""
        parts: list[list[Request]] = []
        joined = self._device.type == "cuda" and self._width is None
        for request in sorted(requests, key=lambda one: one.after + len(one.tokens)):
            if joined and parts and (len(parts[-1]) + 1) * (request.after + len(request.tokens)) <= TOGETHER:
                parts[-1].append(request)
            else:
                parts.append([request])
        return parts

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:
        for layer in self._layers:
            layer.copy(source, slot, start, stop)

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        for layer in self._layers:
            layer.move(slot, start, path)
        return start + len(path)

    def _pass(self, requests: Sequence[Request]) -> dict[int, Forward]:
        """One pass; returns each row's results."""
        hidden = any(request.hidden for request in requests)
        ends = [request.after + len(request.tokens) for request in requests]
        trees = requests[0].parents is not None
        shape = self._tree_shape(requests, max(ends)) if trees else self._shape(requests, max(ends))
        self._reserve(shape.span)
        if hidden:
            self._last.watch([LAST])
        packed = self._packed(requests, shape)
        if trees:
            logits, states, last = self._network(
                shape, sent(packed, self._device), hidden, self._trees(requests, shape)
            )
        else:
            logits, states, last = self._results(shape, packed, hidden)
        found = {}
        for number, request in enumerate(requests):
            place = request.slot if self._whole(shape) else number
            kept = slice(shape.keep - request.keep, shape.keep)
            own = slice(shape.width - len(request.tokens), shape.width)
            seen = None if states is None else {layer: rows[place, own] for layer, rows in states.items()}
            state = last[place, shape.width - request.keep :] if request.hidden and last is not None else None
            found[request.slot] = Forward(logits[place, kept], state, seen, self._ids)
        return found

    def _shape(self, requests: Sequence[Request], longest: int) -> Shape:
        """The shape of a pass with ``longest`` tokens in the longest sequence afterwards."""
        width = max(len(request.tokens) for request in requests)
        keep = max(1, *(request.keep for request in requests))
        if self._width is None:
            return Shape(len(requests), width, aligned(longest), keep)
        if width > self._width:
            return Shape(1, width, self._span(longest), keep)
        return Shape(self.slots, self._width, self._span(longest), self._width)

    def _tree_shape(self, requests: Sequence[Request], longest: int) -> Shape:
        """The shape of a pass over trees. It is never captured, since trees have too many sizes."""
        width = max(len(request.tokens) for request in requests)
        return Shape(len(requests), width, aligned(longest), width)

    def _trees(self, requests: Sequence[Request], shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """The lengths ``(n, 1)`` before the trees, and ``(n, W, N)`` which of a tree's N tokens each token sees."""
        grown = [self._sights[request.slot].grown(request.parents or (), request.before) for request in requests]
        seen = np.zeros((shape.count, shape.width, max(sight.shape[1] for sight in grown)), dtype=bool)
        seen[:, :, 0] = True  # for padding
        starts = [0] * shape.count
        for number, (request, sight) in enumerate(zip(requests, grown, strict=True)):
            place = request.slot if self._whole(shape) else number
            seen[place, shape.width - len(sight) :, : sight.shape[1]] = sight
            starts[place] = request.after - request.before
        return sent(starts, self._device)[:, None], sent(torch.from_numpy(seen), self._device)

    def _span(self, slots: int) -> int:
        """The class of a number of slots."""
        return min(span_class(slots), max(aligned(self._context), aligned(slots)))

    def _packed(self, requests: Sequence[Request], shape: Shape) -> list[int]:
        """``(n, 2 W + 2)``: for each sequence its ids, their slots, its rotation length, and its row."""
        padding_row = [*[0] * shape.width, *[self._capacity] * shape.width, 0, self.slots]
        found = [padding_row] * shape.count
        for number, request in enumerate(requests):
            padding, last = shape.width - len(request.tokens), request.after + len(request.tokens)
            slots = [*[self._capacity] * padding, *range(request.after, last)]
            place = request.slot if self._whole(shape) else number
            found[place] = [*[0] * padding, *request.tokens, *slots, request.rotated_as, request.slot]
        return [value for one in found for value in one]

    def _whole(self, shape: Shape) -> bool:
        """Whether a pass is over all rows, so that each sequence has its own row's place."""
        return shape.count == self.slots

    def _results(self, shape: Shape, packed: Sequence[int], hidden: bool) -> BatchOutputs:
        return self._network(shape, sent(packed, self._device), hidden)

    def _network(
        self,
        shape: Shape,
        packed: torch.Tensor,
        hidden: bool,
        trees: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> BatchOutputs:
        width = shape.width
        numbers = packed.view(shape.count, 2 * width + 2)
        slots = numbers[:, width : 2 * width]  # (n, W)
        self._cursor.rows, self._cursor.slots, self._cursor.span = numbers[:, -1], slots, shape.span
        self._cursor.whole = self._whole(shape)
        every = torch.arange(shape.span, device=self._device)
        if trees is None:
            positions = slots.masked_fill(slots == self._capacity, 0)
            seen = every <= positions[:, :, None]  # (n, W, S)
        else:
            starts, own = trees
            positions = starts + own.sum(-1) - 1
            place = (every - starts)[:, None]  # (n, 1, S) index in the tree; negative in the sequence before it
            within = place.clamp(0, own.shape[2] - 1).expand(-1, width, -1)
            seen = (place < 0) | ((place < own.shape[2]) & own.gather(2, within))
        with rotated_by(self._rotation, numbers[:, -2:-1]):  # (n, 1)
            output = self._model(
                input_ids=numbers[:, :width],
                position_ids=positions,
                attention_mask=additive(seen, self._model.dtype)[:, None],  # (n, 1, W, S)
                use_cache=True,
                logits_to_keep=shape.keep,
                **self._cached,
            )
        last = self._last.take_all() if hidden else None
        return output.logits[:, :, : self._vocabulary], self._watch.take_all(), last[LAST] if last else None

    def _reserve(self, slots: int) -> None:
        """Make room for a number of tokens of each sequence.

        Raises:
            torch.OutOfMemoryError: the cache is unchanged; the next pass continues where this one stopped.
        """
        if slots <= self._capacity:
            return
        capacity = aligned(max(slots, min(2 * self._capacity, self._context)))
        for layer in self._layers:
            layer.grow(capacity + 1, self._capacity)
        self._capacity = capacity  # only once every layer has grown
