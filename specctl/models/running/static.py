"""A runner over a KV cache at fixed addresses, so that its passes can be compiled."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from specctl.models.passes.compilation import Compiler
from specctl.models.passes.fixed_buffers import SPARE, FixedBufferRunner, PassKind, width_of
from specctl.models.passes.masks import WIDEST, TreeSight, additive, mask_obstacle, placed_in_tree, tree_rows
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.token_reader import Token, TokenReader
from specctl.models.passes.watching import LayerWatch, States, joined_states
from specctl.models.passes.weights import device_of
from specctl.models.running.context import ENDLESS, context_length
from specctl.models.running.runner import Forward, Runner


def obstacle(model: PreTrainedModel) -> str | None:
    """Why a model cannot run over fixed buffers, as the end of a sentence; None if it can."""
    spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
    if spread or len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is spread over several devices"
    if getattr(model, "quantization_method", None) == QuantizationMethod.BITS_AND_BYTES:
        return "its weights are quantised with bitsandbytes"
    return mask_obstacle(model)


class StaticRunner(FixedBufferRunner, Runner):
    """A `Runner` over preallocated buffers.

    Args:
        model: one without an `obstacle`, in eval mode, on one device.
        vocabulary: as for `EagerRunner`.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    no_trees = None

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
        self._watch = LayerWatch(model)
        self._remembers = False
        self._states = torch.empty(0)  # (1, T, D)
        self._sight = TreeSight()
        self._tree = 0  # the length before the last tree

    def _remember(self, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._states = given[0]

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            if len(tokens) > WIDEST:
                logits, last, states = self._prompt(tokens, keep, hidden)
            else:
                run = self._run if keep else self._run_once
                logits, last, states = run(PassKind(width_of(tokens), hidden), tokens)
        self.length += len(tokens)
        kept = slice(-keep, None) if keep else slice(0)
        return Forward(logits[kept], None if last is None else last[kept], states)

    def read(
        self,
        tokens: Sequence[Token],
        reader: TokenReader,
        uniform: float | None,
        previous: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._reserve(self.length + len(tokens))
        with torch.inference_mode():
            values, probs, _ = self._run(PassKind(width_of(tokens), reader.hidden, reader), tokens, uniform, previous)
        self.length += len(tokens)
        return values, probs

    def watch(self, layers: Iterable[int]) -> None:
        self._watch.watch(layers)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        self._reserve(self.length + len(tokens))
        rows = sent(tree_rows(self._sight.grown(parents, before)), self.device)
        with torch.inference_mode():
            logits, last, states = self._run(PassKind(0, hidden, rows=1), tokens, rows)
        self._tree = self.length - before
        self.length += len(tokens)
        return Forward(logits, last, states)

    def keep_path(self, path: Sequence[int]) -> None:
        for layer in self._layers:
            layer.move(self._tree, path)
        self.length = self._tree + len(path)

    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """As in `FixedBufferRunner`; the third result is the states ``(T, D)`` by layer, or None."""

        def masked(
            ids: torch.Tensor, written: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None, States | None]:
            """A pass that writes to the slots ``written`` ``(T,)`` and sees those of ``mask`` ``(T, S)``, boolean."""
            self._cursor.positions, self._cursor.span = written, mask.shape[1]
            # Padding may have positions beyond the range of learned position embeddings.
            known = positions.clamp_max(self.context - 1) if self._slack else positions
            output = self._model(
                input_ids=ids,
                position_ids=known[None],
                attention_mask=additive(mask, self._model.dtype)[None, None],  # (1, 1, T, S)
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            last = self._states[0] if kind.hidden else None
            return output.logits[0, :, : self.vocabulary], last, self._watch.take()

        def logits_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None, States | None]:
            return masked(ids, positions, positions, slots <= positions[:, None])

        def tree_of(
            ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None, States | None]:
            """``rows`` of `tree_rows`."""
            known, mask = placed_in_tree(positions, slots, rows)
            return masked(ids, positions, known, mask)

        if kind.hidden and not self._remembers:
            # The output layer's input: torch.compile cannot trace transformers' own way of keeping hidden states.
            head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.register_forward_pre_hook(self._remember)
            self._remembers = True
        reader = kind.reader
        if reader is None:
            return tree_of if kind.rows else logits_of

        def reading_of(
            ids: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
            uniform: torch.Tensor | None,
            previous: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
            logits, states, _ = logits_of(ids, positions, slots)
            values, probs = reader(logits[-1], uniform, None if states is None else states[-1], previous)
            return values, probs, None

        return reading_of

    def _prompt(
        self, tokens: Sequence[int], keep: int, hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, States | None]:
        """A long pass, uncompiled, in pieces that keep masks small; logits of at least the last token."""
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        states: list[States | None] = []
        for piece, positions, slots in self._pieces(len(tokens)):
            ids = sent(tokens[piece], self.device)[None]
            after = len(tokens) - piece.stop
            wanted = max(1, min(keep - after, ids.shape[1]))
            logits, last, seen = self._pass(PassKind(0, hidden), keep=wanted)(ids, positions, slots)
            states.append(seen)
            if keep > after or not after:
                found.append((logits, last))
        last_states = torch.cat([last for _, last in found if last is not None]) if hidden else None
        return torch.cat([logits for logits, _ in found]), last_states, joined_states(states)
