"""Rotation of positions by the length of the text (LongRoPE, dynamic NTK scaling), as transformers' `generate` has it.

The rotary embedding of most models turns a key or query by its position alone. These two turn it by the length of the
text as well, for which transformers takes the largest position of the pass. So a token's keys depend on how the text
was cut into passes, and a text that is read in blocks would differ from one that is written token by token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

REREADING = frozenset({"phi3", "phi4_multimodal", "phimoe"})
"""Families, by ``model_type``, whose `prepare_inputs_for_generation` drops the cache when the text grows longer than
``original_max_position_embeddings``, so that the whole text is read again."""


class Rotation:
    """How a model rotates by the length of the text.

    `generate` reads the P tokens of the prompt in one pass and then one token a pass. Up to the `border` all lengths
    rotate alike. Beyond it a token of the prompt is rotated by P, and the token at position i after it by i + 1; a
    family that reads again rotates all tokens of a longer text by its length.

    Args:
        border: tokens up to which all lengths rotate alike.
        each: whether every length beyond the border has a rotation of its own (dynamic); otherwise all of them have the
            same one (LongRoPE).
        rereads: whether the whole text is read again when it grows longer than the border.
    """

    def __init__(self, border: int, *, each: bool, rereads: bool) -> None:
        self.border, self.each, self.rereads = border, each, rereads
        self._least: torch.Tensor | int | None = None
        self._hooked = False

    def regime(self, length: int) -> int:
        """A length that stands for all those that rotate as this one does; 0 for those up to the border."""
        if length <= self.border:
            return 0
        return length if self.each else self.border + 1

    def hook(self, model: "PreTrainedModel") -> None:
        """Let the model's rotary embeddings follow `by`; outside of it they do as transformers has them."""
        if self._hooked:
            return
        self._hooked = True
        for part in _rotary(model):
            part.register_forward_hook(self._rotated, with_kwargs=True)

    @contextmanager
    def by(self, least: "torch.Tensor | int") -> Iterator[None]:
        """Passes in which the token at position i is rotated as in a text of ``max(i + 1, least)`` tokens.

        Args:
            least: one length, or ``(B, 1)`` int64, one for each sequence of the pass.
        """
        self._least = least
        try:
            yield
        finally:
            self._least = None

    def _rotated(self, part: "nn.Module", given: tuple[Any, ...], named: dict[str, Any], _: Any) -> Any:
        """The cosines and sines ``(B, T, D)`` of a pass by the lengths that its tokens have; None as they are."""
        if self._least is None:
            return None
        asked = dict(zip(("x", "position_ids", "layer_type"), given, strict=False)) | named
        kind = _kind(part, asked.get("layer_type"))
        if not _moves(kind):
            return None
        positions = asked["position_ids"]  # (B, T)
        lengths = (positions + 1).clamp_min(self._least)

        def turned(placed: torch.Tensor, length: int) -> Any:
            """Of tokens at positions below it, as in a text of at least that length."""
            last = placed.new_full((*placed.shape[:-1], 1), length - 1)
            rows = part.forward(**asked | {"position_ids": torch.cat([placed, last], -1)})
            return _each(rows, lambda each: each[..., :-1, :])

        border = _border(part, asked.get("layer_type"))
        if "dynamic" not in kind:
            short = part.forward(**asked | {"position_ids": positions.clamp_max(border - 1)})
            return _either((lengths > border)[..., None], turned(positions, border + 1), short)
        lengths = lengths.clamp_min(border)
        found = None
        for length in sorted(set(lengths.flatten().tolist())):
            # It rotates by the longest text that it has seen since the last short one.
            part.forward(**asked | {"position_ids": positions.new_zeros(1, 1)})
            rows = turned(positions.clamp_max(length - 1), length)
            found = rows if found is None else _either((lengths == length)[..., None], rows, found)
        return found


def rotated_by(rotation: Rotation | None, least: "torch.Tensor | int") -> AbstractContextManager[None]:
    """`Rotation.by`, of a model that may rotate by position alone."""
    return nullcontext() if rotation is None else rotation.by(least)


_KNOWN: "WeakKeyDictionary[PreTrainedModel, Rotation | None]" = WeakKeyDictionary()


def rotation_of(model: "PreTrainedModel") -> Rotation | None:
    """How a model rotates by the length of the text, the same object each time; None where position alone decides.

    Args:
        model: loaded, or its skeleton.
    """
    if model not in _KNOWN:
        _KNOWN[model] = _found(model)
    return _KNOWN[model]


def _found(model: "PreTrainedModel") -> Rotation | None:
    borders, each = set[int](), False
    for part in _rotary(model):
        kinds = part.rope_type
        for layer_type in kinds if isinstance(kinds, dict) else (None,):
            if _moves(kind := _kind(part, layer_type)):
                borders.add(_border(part, layer_type))
                each |= "dynamic" in kind
    if not borders:
        return None
    family = model.config.get_text_config(decoder=True).model_type
    return Rotation(min(borders), each=each or len(borders) > 1, rereads=family in REREADING)


def _rotary(model: "PreTrainedModel") -> "list[nn.Module]":
    return [part for part in model.modules() if isinstance(getattr(part, "rope_type", None), str | dict)]


def _kind(part: "nn.Module", layer_type: str | None) -> str:
    """What transformers calls the rotation of a rotary embedding, in layers of one type where it has several."""
    kinds: Any = part.rope_type
    return str(kinds if layer_type is None or not isinstance(kinds, dict) else kinds.get(layer_type))


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _border(part: "nn.Module", layer_type: str | None) -> int:
    """Tokens up to which a rotary embedding that moves rotates alike."""
    if "dynamic" in _kind(part, layer_type):
        return int(part.original_max_seq_len)  # type: ignore[arg-type]
    told: Any = part.config.rope_parameters  # type: ignore[union-attr]
    return int((told if layer_type is None else told[layer_type])["original_max_position_embeddings"])


def _each(found: Any, change: Any) -> Any:
    return tuple(map(change, found)) if isinstance(found, tuple) else change(found)


def _either(mask: torch.Tensor, where: Any, other: Any) -> Any:
    if isinstance(where, tuple):
        return tuple(torch.where(mask, one, two) for one, two in zip(where, other, strict=True))
    return torch.where(mask, where, other)
