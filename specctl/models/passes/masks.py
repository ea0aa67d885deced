"""Ready-made positions and attention masks, so that a model does not compute them at every step."""

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from specctl.models.passes.tree_sight import LARGEST_TREE, WIDEST, WINDOWS, Seen
from specctl.models.passes.weights import device_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USUAL = "sdpa"  # transformers' name of torch's own scaled dot-product attention
GROUPED = "specctl_grouped"  # The name under which a model of transformers knows `cuda_kernels.grouped`
WITH_MASKS = (USUAL, GROUPED)  # Attentions that take a ready-made mask ``(1, 1, T, S)``
ALIGNMENT = 8
"""CUDA's attention takes masks whose rows begin at multiples of this many numbers, and copies others in every layer."""


def aligned(slots: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-slots // ALIGNMENT) * ALIGNMENT


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of what is seen, as attention adds it to its scores: each layer would make it of a boolean one again."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def attends_to_everything(model: "PreTrainedModel") -> bool:
    """Whether every layer keeps plain keys and values and sees the whole sequence: no windows, no recurrent state."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def takes_masks(model: "PreTrainedModel") -> bool:
    """Whether a model takes a ready-made ``(1, 1, T, S)`` mask, and positions.

    It is so for decoders without windows that go through torch's scaled dot-product attention. Others read the mask
    differently (additive in the models' own attention, ``(1, S)`` in flash attention) or need one for each kind of
    layer; models that count the ones of a mask to find positions (OPT, Bloom) take no positions or ignore them, and
    Dory copies the layers of a cache for its loops.
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
    """Let `mask_obstacle` say from now on why this model cannot, as the end of a sentence: it was tried."""
    _UNFIT[model] = why


def mask_obstacle(model: "PreTrainedModel") -> str | None:
    """Why a model takes no mask of which tokens see which, as the end of a sentence; None if it takes one."""
    if (why := _UNFIT.get(model)) is not None:
        return why
    if not attends_to_everything(model):
        return WINDOWS
    if not takes_masks(model):
        return "its attention takes no ready-made mask"
    return None


def aligned_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # (T, S) -> (T, S)
    """`additive`, with rows that begin at multiples of `ALIGNMENT`."""
    count = seen.shape[1]
    return additive(torch.nn.functional.pad(seen, (0, aligned(count) - count)), dtype)[:, :count]


def tree_rows(seen: Seen) -> torch.Tensor:  # (T, B + T) -> (T, LARGEST_TREE)
    """`TreeSight.grown` as rows of one length for all trees, which passes of fixed shapes read."""
    return torch.nn.functional.pad(torch.from_numpy(seen), (0, LARGEST_TREE - seen.shape[1]))


def placed_in_tree(
    written: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # (T,), (T, S)
    """The positions of tokens of a tree, and which slots of the cache each of them sees.

    Args:
        written: ``(T,)``, the slots that the tokens are written to.
        slots: ``(S,)`` from 0 on.
        rows: of `tree_rows`.
    """
    # The last token that the first one sees is itself, so its place is the number before it.
    before = torch.where(rows[0], torch.arange(LARGEST_TREE, device=rows.device), 0).amax()
    start = written[0] - before
    place = slots - start  # (S,) in the tree; below 0 in the sequence before it
    own = rows[:, place.clamp(0, LARGEST_TREE - 1)] & (place < LARGEST_TREE)  # (T, S)
    return start + rows.sum(-1) - 1, own | (place < 0)


class MaskMaker:
    """Ready-made arguments for passes over a cached prefix.

    Args:
        model: on its device or devices; one that takes no ready-made masks computes its own.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        # Some models (Bamba) count from 0 in every pass without given positions.
        self._positions = "position_ids" in inspect.signature(model.forward).parameters
        self._masks = takes_masks(model)
        # A stage of a pipeline cannot ask its first layer's cache how long the text is: another stage may hold that.
        self._widths = range(1, 1 << 31) if hasattr(model, "_pp_stage") else range(2, WIDEST + 1)
        self._dtype = model.dtype
        self._slots = torch.arange(0, device=device_of(model))

    def arguments(self, length: int, width: int) -> dict[str, Any]:
        """``position_ids`` and ``attention_mask`` of ``width`` tokens after ``length`` cached ones, where taken."""
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
