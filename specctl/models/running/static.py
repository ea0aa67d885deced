"""A runner over a KV cache at fixed addresses, whose passes can be compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from specctl.models.running.cache import Cursor, FixedLayer
from specctl.models.running.compilation import Compiler
from specctl.models.running.masks import WIDEST, attends_to_everything, takes_masks
from specctl.models.running.runner import Forward, TokenReader

SPARE = 256
PIECE = 512
"""Tokens of a prompt that go through the model at once."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """What tells passes apart that need code of their own.

    Attributes:
        width: tokens in the pass; 0 for any number above 1, which compiled code does not tell apart.
        hidden: whether hidden states are wanted.
        reader: reads a pass of one token within it; None where logits themselves are wanted.
    """

    width: int
    hidden: bool = False
    reader: TokenReader | None = None


def obstacle(model: PreTrainedModel) -> str | None:
    """Why a model cannot run over fixed buffers, as the end of a sentence; None where it can."""
    spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
    if spread or len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is spread over several devices"
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
        compiler: turns each kind of pass into faster code when it is first met; None for none.
    """

    _slack = 0  # places beyond a sequence's end that a pass may write to

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
        # A place more than any pass looks at: passes over a whole buffer would be compiled for by themselves.
        self._layers = [FixedLayer(self._cursor, self._capacity + 1) for _ in range(text.num_hidden_layers)]
        self._cache = Cache(layers=list(self._layers))
        self._places = self._numbered()
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
        """Whether the first pass of each kind takes long."""
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
            reader: the same one for the whole of a sequence, or a pass is compiled for each.
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
        """One short pass; compiled where there is a compiler, and a first pass has made the buffers.

        ``given`` are the reader's arrivals and what came before, where there is a reader.
        """
        ids = torch.tensor([tokens], device=self.device)  # (1, T)
        end = self.length + len(tokens)
        # A copy, for compiled code tells views that begin at 0 from others.
        return self._best(kind, ids, self._places[self.length : end].clone(), self._places[:end], *given)

    def _best(
        self,
        kind: PassKind,
        ids: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        *more: torch.Tensor | None,
    ) -> Any:
        given = (ids, positions, places, *more)
        kind = replace(kind, width=1 if kind.width == 1 else 0)
        # Sizes of 1 would be compiled for by themselves: a sequence's first token is not worth it.
        if self._compiler is None or not self._layers[0].is_initialized or len(places) == 1:
            return self._pass(kind)(*given)
        step = self._compiled.get(kind)
        if step is None:
            buffers = [buffer for layer in self._layers for buffer in (layer.keys, layer.values)]
            step = self._compiled[kind] = self._compiler.compiled(self._pass(kind), given, buffers, kind.width == 1)
        return step(*given)

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """The pass itself as a function of ids ``(1, T)``, positions ``(T,)`` and places ``(S,)`` from 0 on.

        With a reader, of its arrivals and of what came before too. It may be repeated: it writes what it wrote before.
        Gives logits of the last ``keep`` tokens, or of all for 0.
        """

        def logits_of(
            ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            self._cursor.positions, self._cursor.span = positions, places.shape[0]
            # Padding, where there is any, may stand beyond what learned position embeddings know.
            known = positions.clamp_max(self.context - 1) if self._slack else positions
            output = self._model(
                input_ids=ids,
                position_ids=known[None],
                attention_mask=(places <= positions[:, None])[None, None],  # (1, 1, T, S)
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            return output.logits[0, :, : self.vocabulary], self._states[0] if kind.hidden else None

        if kind.hidden and not self._watched:
            # What the output layer is given: torch.compile cannot see through transformers' own way of keeping states.
            head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.register_forward_pre_hook(self._remember)
            self._watched = True
        reader = kind.reader
        if reader is None:
            return logits_of

        def reading_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            places: torch.Tensor,
            arrivals: torch.Tensor | None,
            previous: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            logits, states = logits_of(ids, positions, places)
            return reader(logits[0], arrivals, None if states is None else states[0], previous)

        return reading_of

    def _prompt(self, tokens: Sequence[int], keep: int, hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A long pass as it is, in pieces that keep masks small; logits and hidden states of at least the last one."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            after = len(tokens) - start - len(piece)
            begin, end = self.length + start, self.length + start + len(piece)
            step = self._pass(PassKind(0, hidden), keep=max(1, min(keep - after, len(piece))))
            ids = torch.tensor([piece], device=self.device)
            part = step(ids, self._places[begin:end], self._places[:end])
            if keep > after or not after:
                found.append(part)
        logits = torch.cat([part for part, _ in found])
        return logits, torch.cat([states for _, states in found if states is not None]) if hidden else None

    def _reserve(self, tokens: int) -> None:
        """Make room for so many tokens."""
        if tokens + self._slack <= self._capacity:
            return
        self._capacity = tokens + max(SPARE, tokens // 2) + self._slack
        for layer in self._layers:
            layer.grow(self._capacity + 1, self.length)
        self._places = self._numbered()

    def _numbered(self) -> torch.Tensor:  # (capacity,)
        # In inference mode they would be of another kind than the first ones, and passes be compiled anew for them.
        with torch.inference_mode(False):
            return torch.arange(self._capacity, device=self.device)
