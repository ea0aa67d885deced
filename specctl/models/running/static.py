"""A runner over a KV cache at fixed addresses, so that its passes can be compiled."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from specctl.models.passes.cache import cache_argument
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.fixed_buffers import SPARE, PassKind, width_of
from specctl.models.passes.forward import Forward
from specctl.models.passes.masks import additive, mask_obstacle
from specctl.models.passes.rotation import rotated_by, rotation_of
from specctl.models.passes.token_reader import TokenReader
from specctl.models.passes.trimmed_output import vocabulary_of
from specctl.models.passes.watching import LayerWatch, joined_states
from specctl.models.passes.weights import device_of
from specctl.models.running.context import ENDLESS, context_length
from specctl.models.running.engines import Where
from specctl.models.running.fixed_buffer_runner import FixedBufferRunner, Found
from specctl.models.running.fused_norms import fuse_norms
from specctl.models.running.grouped_attention import attend_in_groups
from specctl.models.running.passes import Passes, Request


def obstacle(model: PreTrainedModel, where: Where | None = None) -> str | None:
    """Why a model cannot run over fixed buffers, as the end of a sentence; None if it can.

    Args:
        model: loaded, or its skeleton.
        where: its weights are or will be; None for where those of a loaded model are.
    """
    where = where or Where.of(model)
    if len(where.devices) > 1:
        return "it is spread over several devices"
    if where.quantised == QuantizationMethod.BITS_AND_BYTES.value:
        return "its weights are quantised with bitsandbytes"
    if (rotation := rotation_of(model)) is not None and rotation.each:
        return "it rotates positions anew with every token of a long text"
    return mask_obstacle(model)


class StaticPasses(FixedBufferRunner, Passes):
    """Passes over preallocated buffers.

    Args:
        model: one without an `obstacle`, in eval mode, on one device.
        vocabulary: as for `EagerPasses`.
        capacity: tokens to make room for at first.
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
        self._last = LayerWatch(model)  # of passes over several sequences
        self._cached = {cache_argument(type(model)): self._cache}
        self._remembers = False
        self._states = torch.empty(0)  # (1, T, D)
        self._rotation = rotation_of(model)
        with torch.inference_mode(False):  # passes that are compiled or captured read it where it is
            self._rotated_as = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        self._rotated_to = 0  # what it holds

    def _remember(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._states = given[0].detach()  # as `LayerWatch` does: the hook outlives this runner

    def _begin(self, request: Request) -> None:
        self.length = request.after
        self._reserve(request.after + len(request.tokens))
        if request.rotated_as != self._rotated_to:
            self._rotated_as.fill_(request.rotated_as)
            self._rotated_to = request.rotated_as

    def answer(self, request: Request) -> Any:
        if request.reader is None:
            return self._answer(request)
        reader = cast("TokenReader", request.reader)
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
        from specctl.models.running.row_passes.fixed_rows import FixedRows

        return FixedRows(self._model, slots, self.vocabulary, self._watch, self._last, width).like(self)

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
            # The output layer's input: torch.compile cannot trace transformers' own way of keeping hidden states.
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
        slots: torch.Tensor,  # noqa: ARG002 - the mask tells all of them
        written: torch.Tensor,  # noqa: ARG002
        rows: torch.Tensor | None,  # noqa: ARG002 - a model reads its tokens and nothing else
    ) -> Found:
        """As in `FixedBufferRunner`; what else it gives are the states ``(T, D)`` by layer, or None."""
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
