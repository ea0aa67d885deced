"""Captures the hidden states of a model's layers while it runs."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

States = Mapping[int, Any]
"""``(T, D)`` for each watched layer: i is the input of decoder layer i, -1 the last state after the final norm. They
are numpy arrays where logits are, and the runner's next pass may overwrite those; else tensors.
"""
LAST = -1


class LayerWatch:
    """Captures the inputs of a model's decoder layers, and the output of the last one after the final norm.

    The stored states are detached: otherwise they would keep the graph of a pass outside of inference mode alive.

    It hooks into the layers, since the hidden states that transformers returns on request belong to different layers in
    different versions, and torch.compile cannot trace them.

    Args:
        model: with decoder layers; other models can be watched only at -1.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._model = model
        self._caught: dict[int, torch.Tensor] = {}  # (B, T, D) each
        self._layers: set[int] = set()

    def watch(self, layers: Iterable[int]) -> None:
        """Capture these layers too, from the next pass on.

        Raises:
            IndexError: the model has no such layer.
        """
        for layer in sorted(set(layers) - self._layers):
            if layer == LAST:
                decoder(self._model).register_forward_hook(self._keep_last)
            else:
                decoder_layers(self._model)[layer].register_forward_pre_hook(
                    partial(self._keep, layer), with_kwargs=True
                )
            self._layers.add(layer)

    @property
    def layers(self) -> frozenset[int]:
        """The captured layers."""
        return frozenset(self._layers)

    def take(self) -> "dict[int, torch.Tensor] | None":
        """The states ``(T, D)`` of all tokens of the last pass, by layer; None if no layer is watched."""
        return {layer: states[0] for layer, states in self._caught.items()} if self._layers else None

    def take_all(self) -> "dict[int, torch.Tensor] | None":
        """`take` for each of the B sequences of the pass, ``(B, T, D)``."""
        return {**self._caught} if self._layers else None

    def _keep(self, layer: int, _: "nn.Module", given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = given[0] if given else named["hidden_states"]
        self._caught[layer] = states.detach()

    def _keep_last(self, _: "nn.Module", __: Any, output: Any) -> None:
        self._caught[LAST] = output[0].detach()  # from the decoder's tuple or output record


def decoder(model: "PreTrainedModel") -> "nn.Module":
    """The part of a causal language model between its embeddings and its output layer, both norms included."""
    found = model.get_decoder()  # type: ignore[no-untyped-call]
    return found if found is not None and found is not model else model.base_model


def decoder_layers(model: "PreTrainedModel") -> "nn.ModuleList":
    """A model's decoder layers in order.

    Raises:
        IndexError: the model has no separate list of them.
    """
    from torch import nn

    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    for part in decoder(model).modules():
        if isinstance(part, nn.ModuleList) and len(part) == depth:
            return part
    raise IndexError(f"{type(model).__name__} has no list of its {depth} decoder layers")


def joined_states(parts: Sequence[States | None]) -> dict[int, Any] | None:
    """The states of consecutive passes, concatenated; None where a pass has none."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    if all(isinstance(rows, np.ndarray) for part in known for rows in part.values()):
        return {layer: np.concatenate([part[layer] for part in known]) for layer in known[0]}
    import torch

    return {layer: torch.cat([torch.as_tensor(part[layer]) for part in known]) for layer in known[0]}


def kept_states(states: States | None) -> States | None:
    """A copy of the states that the next pass does not overwrite."""
    if states is None:
        return None
    return {layer: rows.copy() if isinstance(rows, np.ndarray) else rows for layer, rows in states.items()}


def cut_states(states: States | None, rows: slice | list[int]) -> States | None:
    """The states of a slice of the tokens."""
    if states is None:
        return None
    if isinstance(rows, slice) and rows.stop == next(iter(states.values())).shape[0] and not rows.start:
        return states  # of a round without a draft; the copy would count in its time
    return {layer: rows_of[rows] for layer, rows_of in states.items()}
