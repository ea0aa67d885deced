"""Rotary position embeddings that depend on the text's length (LongRoPE, dynamic NTK scaling), as in transformers'
`generate`.

Most rotary embeddings rotate a key or query by its position alone. These two also depend on the text's length, which
transformers takes from the largest position of the pass. So a token's keys depend on how the text was cut into passes,
and a text read in blocks would differ from one generated token by token.
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
"""Families, by ``model_type``, that reread the text: their `prepare_inputs_for_generation` drops the cache when the
text grows longer than ``original_max_position_embeddings``.
"""


class Rotation:
    """How a model's rotation depends on the text's length.

    `generate` reads the P tokens of the prompt in one pass, and then one token per pass. Up to the `border` all lengths
    rotate alike. Beyond it, prompt tokens are rotated for length P, and a later token at position i for length i + 1. A
    family that rereads rotates all tokens of a longer text for that text's length.

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
        """A representative of all lengths that rotate like this one; 0 for those up to the border."""
        if length <= self.border:
            return 0
        return length if self.each else self.border + 1

    def hook(self, model: "PreTrainedModel") -> None:
        """Let the model's rotary embeddings follow `by`; outside of it they behave as in transformers."""
        if self._hooked:
            return
        self._hooked = True
        for part in _rotary(model):
            part.register_forward_hook(self._rotated, with_kwargs=True)

    @contextmanager
    def by(self, least: "torch.Tensor | int") -> Iterator[None]:
        """A context for passes with the token at position i rotated as in a text of ``max(i + 1, least)`` tokens.

        Args:
            least: one length, or ``(B, 1)`` int64, one for each sequence of the pass.
        """
        self._least = least
        try:
            yield
        finally:
            self._least = None

    def _rotated(self, part: "nn.Module", given: tuple[Any, ...], named: dict[str, Any], _: Any) -> Any:
        """The cosines and sines ``(B, T, D)`` of a pass for its tokens' lengths; None to leave them unchanged."""
        if self._least is None:
            return None
        asked = dict(zip(("x", "position_ids", "layer_type"), given, strict=False)) | named
        kind = _kind(part, asked.get("layer_type"))
        if not _moves(kind):
            return None
        positions = asked["position_ids"]  # (B, T)
        lengths = (positions + 1).clamp_min(self._least)

        def turned(placed: torch.Tensor, length: int) -> Any:
            """The embedding of positions below a length, as in a text of at least that length."""
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
            # It rotates for the longest text since the last short one.
            part.forward(**asked | {"position_ids": positions.new_zeros(1, 1)})
            rows = turned(positions.clamp_max(length - 1), length)
            found = rows if found is None else _either((lengths == length)[..., None], rows, found)
        return found


def rotated_by(rotation: Rotation | None, least: "torch.Tensor | int") -> AbstractContextManager[None]:
    """`Rotation.by` for a model that may rotate by position alone."""
    return nullcontext() if rotation is None else rotation.by(least)


_KNOWN: "WeakKeyDictionary[PreTrainedModel, Rotation | None]" = WeakKeyDictionary()


def rotation_of(model: "PreTrainedModel") -> Rotation | None:
    """How a model's rotation depends on the text's length, always the same object; None if it does not.

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
    """transformers' name for a rotary embedding's kind of rotation, for layers of one type where there are several."""
    kinds: Any = part.rope_type
    return str(kinds if layer_type is None or not isinstance(kinds, dict) else kinds.get(layer_type))


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _border(part: "nn.Module", layer_type: str | None) -> int:
    """Up to how many tokens a length-dependent rotary embedding rotates alike."""
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
