"""The longest sequence that a model can hold, and the reusable prefix of the last one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specctl.models.passes.watching import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ENDLESS = 1 << 31  # The context of a model without a limit
NAMES = ("max_position_embeddings", "max_seq_len", "max_target_positions", "n_positions")
"""The names of the limit in configurations, besides those that transformers' ``attribute_map`` maps to the first."""
TABLES = frozenset({"embed_positions", "position_embeddings", "positions_embed", "wpe"})
"""The names of models' position embeddings."""

WHOLE = ("llama3", "longrope", "su")
"""Kinds of rotation with ``max_position_embeddings`` already extended, as in vLLM."""

WORTH_KEEPING = 32
"""The shortest common prefix that is reused. One or two first tokens that all prompts share save nothing, and would
make the rounding of each text depend on the one before.
"""


def context_length(model: "PreTrainedModel | PreTrainedConfig") -> int | None:
    """The most tokens of a sequence: the size of the model's position table, else the limit in its configuration.

    Args:
        model: or its configuration alone, where there are no weights yet.

    Returns:
        None without a limit, as with relative positions or a recurrent state.
    """
    from torch import nn

    config: Any = model
    if isinstance(model, nn.Module):
        for name, part in decoder(model).named_modules():
            if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in TABLES:
                return part.num_embeddings - int(
                    getattr(part, "offset", 0)
                )  # OPT's first rows do not stand for positions
        config = model.config
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, name, None) for name in NAMES)
    found = next((int(limit) for limit in limits if limit is not None and limit > 0), None)
    return found and extended(found, getattr(text, "rope_parameters", None), text.model_type)


def extended(limit: int, rotation: Mapping[str, Any] | None, family: str) -> int:
    """The most tokens of a sequence, where scaled rotary embeddings extend the configuration's limit.

    As in vLLM (``_get_and_verify_max_len`` in its ``config/model.py``), this is the limit times the ``factor``, for
    YaRN ``original_max_position_embeddings`` times the factor. Gemma 3's configuration has its extended context
    already.

    Args:
        limit: the limit in the configuration.
        rotation: ``rope_parameters`` or ``rope_scaling``, possibly by type of layer; None without one.
        family: ``model_type`` of the text model.
    """
    told = rotation or {}
    if all(each is None or isinstance(each, Mapping) for each in told.values()):
        parts = [each for each in told.values() if each is not None]
    else:
        parts = [told]
    if "gemma3" in family:
        return limit
    factor, start = 1.0, limit
    for part in parts:
        kind = part.get("rope_type", part.get("type", "default"))
        more = part.get("factor")
        if kind in WHOLE or not isinstance(more, int | float):
            continue
        factor = more
        if kind == "yarn":
            start = part.get("original_max_position_embeddings") or start
    return int(start * factor)


def common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of two texts' common prefix; 0 if it is shorter than `WORTH_KEEPING`."""
    if list(first[:WORTH_KEEPING]) != list(second[:WORTH_KEEPING]):
        return 0
    most = min(len(first), len(second))
    shared = next((n for n in range(most) if first[n] != second[n]), most)
    return shared if shared >= WORTH_KEEPING else 0
