"""A runner over a KV cache at fixed addresses, so that its passes can be compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from specctl.models.running.cache import Cursor, FixedLayer
from specctl.models.running.compilation import Compiler
from specctl.models.running.masks import WIDEST, attends_to_everything, takes_masks
from specctl.models.running.runner import Forward, TokenReader

SPARE = 256
PIECE = 512
"""Tokens of a prompt that go through the model at once."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes need different compiled code.

    Attributes:
        width: tokens in the pass; 0 for any number above 1, which one compiled pass covers.
        hidden: whether hidden states are wanted.
        reader: reads one token's pass within it; None for a pass that gives logits.
    """

    width: int
    hidden: bool = False
    reader: TokenReader | None = None


def obstacle(model: PreTrainedModel) -> str | None:
    """Why a model cannot run over fixed buffers, as the end of a sentence; None if it can."""
    spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
    if spread or len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is spread over several devices"
    if getattr(model, "quantization_method", None) == QuantizationMethod.BITS_AND_BYTES:
        return "its weights are quantised with bitsandbytes"
    if not attends_to_everything(model):
        return "it has layers with a sliding window or with a state of their own"
    if not takes_masks(model):
        return "its attention takes no ready-made mask"
    return None


class StaticRunner:
    """A `Runner` over preallocated buffers: a step writes in place, a rollback moves a counter, addresses stay.

    Addresses change only when a sequence outgrows the buffers.

    Args:
        model: one without an `obstacle`, in eval mode, on one device.
        vocabulary: as for `EagerRunner`.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    _slack = 0  # slots beyond a sequence's end that a pass may write to

    def __init__(
        self, model: PreTrainedModel, vocabulary: int, *, capacity: int = SPARE, compiler: Compiler | None = None
    ) -> None:
        text = model.config.get_text_config(decoder=True)
        self.vocabulary = vocabulary
        self.length = 0
        self.context = int(getattr(text, "max_position_embeddings", 1 << 31))
        self.device = next(model.parameters()).device
        self._model = model
        self._compiler = compiler
        self._compiled: dict[PassKind, Callable[..., Any]] = {}
        self._cursor = Cursor()
        self._capacity = min(capacity, self.context) + self._slack
        # One slot more than any pass attends to: a pass over the whole buffer would be compiled separately.
        self._layers = [FixedLayer(self._cursor, self._capacity + 1) for _ in range(text.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._slots = self._numbered()
        self._watched = False
        self._states = torch.empty(0)  # (1, T, D)

    def _remember(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._states = given[0]

    @property
    def engine(self) -> str:
        return "static" if self._compiler is None else "static, compiled"

    @property
    def preparing_seconds(self) -> float:
        """Wall time spent on compiling so far."""
        return 0.0 if self._compiler is None else self._compiler.seconds

    @property
    def prepares(self) -> bool:
        """Whether the first pass of each kind is compiled."""
        return self._compiler is not None

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        width = len(tokens)
        self._reserve(self.length + width)
        with torch.inference_mode():
            if width > WIDEST:
                logits, states = self._prompt(tokens, keep, hidden)
            else:
                logits, states = self._run(PassKind(1 if width == 1 else 0, hidden), tokens)
        self.length += width
        kept = slice(-keep, None) if keep else slice(0)
        return Forward(logits[kept], None if states is None else states[kept])

    def read(
        self, token: int, reader: TokenReader, arrivals: torch.Tensor | None, previous: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Extend by one token and read it in the same pass.

        Args:
            token: the id.
            reader: the same one for a whole sequence, because each reader has a pass compiled for it.
            arrivals: ``(V,)`` for the reader, or None.
            previous: ``(S,)`` for the reader, or None; of one S for the whole of a sequence.

        Returns:
            The reader's numbers ``(F,)`` float64, and its distribution ``(V,)`` if it gives one.
        """
        self._reserve(self.length + 1)
        with torch.inference_mode():
            values, probs = self._run(PassKind(1, reader.hidden, reader), [token], arrivals, previous)
        self.length += 1
        return values, probs

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)

    def _run(self, kind: PassKind, tokens: Sequence[int], *given: torch.Tensor | None) -> Any:
        """One short pass, compiled if there is a compiler and an earlier pass has made the buffers.

        ``given`` are a reader's arrivals and previous numbers; nothing without a reader.
        """
        ids = torch.tensor([tokens], device=self.device)  # (1, T)
        end = self.length + len(tokens)
        # A copy, because a view that begins at 0 would be compiled separately.
        return self._best(kind, ids, self._slots[self.length : end].clone(), self._slots[:end], *given)

    def _best(
        self,
        kind: PassKind,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *more: torch.Tensor | None,
    ) -> Any:
        given = (ids, positions, slots, *more)
        kind = replace(kind, width=1 if kind.width == 1 else 0)
        # A size of 1 would be compiled separately, which a sequence's first token is not worth.
        if self._compiler is None or not self._layers[0].is_initialized or len(slots) == 1:
            return self._pass(kind)(*given)
        step = self._compiled.get(kind)
        if step is None:
            buffers = [buffer for layer in self._layers for buffer in (layer.keys, layer.values)]
            step = self._compiled[kind] = self._compiler.compiled(self._pass(kind), given, buffers, kind.width == 1)
        return step(*given)

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """A function of ids ``(1, T)``, positions ``(T,)``, slots ``(S,)`` from 0 on, and a reader's arguments.

        Repeating it has no further effect, since it writes the same entries again. Without a reader it gives logits of
        the last ``keep`` tokens, or of all for 0, and their hidden states or None.
        """

        def logits_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            self._cursor.positions, self._cursor.span = positions, slots.shape[0]
            # Padding may have positions beyond the range of learned position embeddings.
            known = positions.clamp_max(self.context - 1) if self._slack else positions
            output = self._model(
                input_ids=ids,
                position_ids=known[None],
                attention_mask=(slots <= positions[:, None])[None, None],  # (1, 1, T, S)
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            return output.logits[0, :, : self.vocabulary], self._states[0] if kind.hidden else None

        if kind.hidden and not self._watched:
            # The output layer's input: torch.compile cannot trace transformers' own way of keeping hidden states.
            head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.register_forward_pre_hook(self._remember)
            self._watched = True
        reader = kind.reader
        if reader is None:
            return logits_of

        def reading_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            arrivals: torch.Tensor | None,
            previous: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            logits, states = logits_of(ids, positions, slots)
            return reader(logits[0], arrivals, None if states is None else states[0], previous)

        return reading_of

    def _prompt(self, tokens: Sequence[int], keep: int, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A long pass, uncompiled, in pieces that keep masks small; outputs of at least the last token."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            after = len(tokens) - start - len(piece)
            begin, end = self.length + start, self.length + start + len(piece)
            step = self._pass(PassKind(0, hidden), keep=max(1, min(keep - after, len(piece))))
            ids = torch.tensor([piece], device=self.device)
            part = step(ids, self._slots[begin:end], self._slots[:end])
            if keep > after or not after:
                found.append(part)
        logits = torch.cat([part for part, _ in found])
        return logits, torch.cat([states for _, states in found if states is not None]) if hidden else None

    def _reserve(self, tokens: int) -> None:
        """Grow the buffers to hold this many tokens."""
        if tokens + self._slack <= self._capacity:
            return
        self._capacity = tokens + max(SPARE, tokens // 2) + self._slack
        for layer in self._layers:
            layer.grow(self._capacity + 1, self.length)
        self._slots = self._numbered()

    def _numbered(self) -> torch.Tensor:  # (capacity,)
        # Inference tensors differ from the first, normal ones, and passes would be compiled again for them.
        with torch.inference_mode(False):
            return torch.arange(self._capacity, device=self.device)
