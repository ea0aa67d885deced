"""Precomputed positions and attention masks, so that a model does not compute them at every step."""

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from specctl.models.passes.tree_sight import LARGEST_TREE, WIDEST, WINDOWS, Seen
from specctl.models.passes.weights import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL = "sdpa"  # transformers' name for torch's scaled dot-product attention
GROUPED = "specctl_grouped"  # The name of `cuda_kernels.grouped` in transformers
WITH_MASKS = (USUAL, GROUPED)  # Attentions that accept a precomputed mask ``(1, 1, T, S)``
ALIGNMENT = 8
"""CUDA's attention reads masks with rows aligned to this many numbers, and copies others in every layer."""


def aligned(slots: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-slots // ALIGNMENT) * ALIGNMENT


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask in the form that is added to attention scores; otherwise each layer would convert it again."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def attends_to_everything(model: "PreTrainedModel") -> bool:
    """Whether every layer stores plain keys and values and sees the whole sequence, without windows or recurrent
    states.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def takes_masks(model: "PreTrainedModel") -> bool:
    """Whether a model accepts positions and a precomputed ``(1, 1, T, S)`` mask.

    True for decoders without windows that use torch's scaled dot-product attention. Others read the mask differently
    (additive in the models' own attention, ``(1, S)`` in flash attention), or need one for each kind of layer. Models
    that derive positions from the mask (OPT, Bloom) take no positions or ignore them. Dory copies the layers of a cache
    for its loops.
    """
    known = inspect.signature(model.forward).parameters
    return (
        "position_ids" in known
        and "logits_to_keep" in known
        and model.config.model_type not in {"bloom", "dory", "falcon", "mpt", "opt", "xglm"}
        and getattr(model.config, "_attn_implementation", None) in WITH_MASKS
        and attends_to_everything(model)
    )


_UNFIT: "WeakKeyDictionary[PreTrainedModel, str]" = WeakKeyDictionary()


def rule_out_masks(model: "PreTrainedModel", why: str) -> None:
    """After a failed trial: let `mask_obstacle` give this reason from now on."""
    _UNFIT[model] = why


def mask_obstacle(model: "PreTrainedModel") -> str | None:
    """Why a model accepts no mask over single tokens, as the end of a sentence; None if it does."""
    if (why := _UNFIT.get(model)) is not None:
        return why
    if not attends_to_everything(model):
        return WINDOWS
    if not takes_masks(model):
        return "its attention takes no ready-made mask"
    return None


def aligned_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # (T, S) -> (T, S)
    """`additive` with rows aligned to multiples of `ALIGNMENT`."""
    count = seen.shape[1]
    return additive(torch.nn.functional.pad(seen, (0, aligned(count) - count)), dtype)[:, :count]


def tree_rows(seen: Seen) -> torch.Tensor:  # (T, B + T) -> (T, LARGEST_TREE)
    """`TreeSight.grown` with rows of the same length for all trees, for passes of fixed shapes."""
    return torch.nn.functional.pad(torch.from_numpy(seen), (0, LARGEST_TREE - seen.shape[1]))


def placed_in_tree(
    written: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # (T,), (T, S)
    """The positions of a tree's tokens, and the cache slots that each of them sees.

    Args:
        written: ``(T,)``, the slots that the tokens are written to.
        slots: ``(S,)`` from 0 on.
        rows: of `tree_rows`.
    """
    # The last token that the first token sees is itself, so its index equals the number of tokens before it.
    before = torch.where(rows[0], torch.arange(LARGEST_TREE, device=rows.device), 0).amax()
    start = written[0] - before
    place = slots - start  # (S,) index in the tree; negative in the sequence before it
    own = rows[:, place.clamp(0, LARGEST_TREE - 1)] & (place < LARGEST_TREE)  # (T, S)
    return start + rows.sum(-1) - 1, own | (place < 0)


class MaskMaker:
    """Precomputed arguments for passes over a cached prefix.

    Args:
        model: on its device or devices; a model that accepts no precomputed masks computes its own.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        # Some models (Bamba) count from 0 in every pass without given positions.
        self._positions = "position_ids" in inspect.signature(model.forward).parameters
        self._masks = takes_masks(model)
        # A pipeline stage cannot ask its first layer's cache for the text's length, since another stage may hold that
        # layer.
        self._widths = range(1, 1 << 31) if hasattr(model, "_pp_stage") else range(2, WIDEST + 1)
        self._dtype = model.dtype
        self._slots = torch.arange(0, device=device_of(model))

    def arguments(self, length: int, width: int) -> dict[str, Any]:
        """``position_ids`` and ``attention_mask`` for ``width`` tokens after ``length`` cached ones, where the model
        accepts them.
        """
        if not self._positions:
            return {}
        end = length + width
        if end > len(self._slots):
            self._slots = torch.arange(2 * end, device=self._slots.device)
        positions = self._slots[length:end]
        found: dict[str, Any] = {"position_ids": positions[None]}  # (1, T)
        if self._masks and width in self._widths:
            mask = aligned_mask(self._slots[:end] <= positions[:, None], self._dtype)
            found["attention_mask"] = mask[None, None]  # (1, 1, T, S)
        return found
