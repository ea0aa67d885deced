"""A target that is in memory already, and the drafts that are loaded for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.files.vocabulary import difference
from specctl.models.loading.assembly import Assembled, assemble, own_heads
from specctl.models.loading.fewer_tokens import write_fewer
from specctl.models.loading.model import LoadedModel, eos_ids, load_tokenizer
from specctl.models.loading.profile_models import Level, find_all, load_found
from specctl.models.loading.vocabularies import require_own_tokenizers, translated
from specctl.models.passes.cache import cannot_go_back
from specctl.models.passes.masks import USUAL, WITH_MASKS
from specctl.models.placing.memory import device_memory
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import in_a_row
from specctl.profile.schema import DraftTable, ModelTable

NAMELESS = "the model"


def in_memory(model: PreTrainedModel, role: str) -> LoadedModel:
    """A model that its user has loaded.

    Args:
        model: a causal language model.
        role: ``target`` or ``draft``, for messages.

    Raises:
        ModelError: it is an encoder and decoder, or cannot take back rejected tokens.
    """
    name = model.name_or_path or NAMELESS
    if model.config.is_encoder_decoder:
        raise ModelError(f"The {role} {name!r} has an encoder.", "Speculative decoding here is for decoders alone.")
    if why := cannot_go_back(model.config, type(model)):
        raise ModelError(f"The {role} {name!r} cannot take back rejected tokens: {why}.")
    return LoadedModel.of(model, name)


def form_of(model: PreTrainedModel) -> list[Any]:
    """What runners of a model and its drafts are made for; where it differs from an earlier one they must be made anew.

    It is the model's configuration, the attention that it runs, and each weight's name, shape, dtype and device: so it
    changes where embeddings are resized or a model is moved, and not where weights get other values.
    """
    weights = [(name, weight.shape, weight.dtype, weight.device) for name, weight in model.named_parameters()]
    config = model.config
    attention = getattr(config, "_attn_implementation", None)  # of `WITH_MASKS` a runner itself may choose another
    return [model, config.to_dict(), USUAL if attention in WITH_MASKS else attention, weights]


def assembled(target: LoadedModel, draft: DraftTable, given: PreTrainedModel | None) -> Assembled:
    """Eager runners of a target in memory, with all its output rows, and of its drafts.

    Args:
        target: it is checked once, if its family is not known.
        draft: the table of the draft that it verifies.
        given: a model to use as the only draft; None to load what the table names.

    Raises:
        ModelError: a draft cannot be loaded, has another tokenizer than the target, or its head was trained on another;
            or the target's weights are quantised, and what they compute depends on the width of a pass.
    """
    levels = [Level("target", ModelTable(model=target.name), network=target)]
    if given is not None:
        levels.append(Level("draft", draft, own_heads(draft), network=in_memory(given, "draft")))
    else:
        for table in draft.levels:
            role = ".".join(["draft"] * len(levels))
            here = table if table.device != "auto" else table.model_copy(update={"device": str(target.device)})
            levels.append(Level(role, here, own_heads(table)))
    above = in_a_row(len(levels) - 1)
    levels = find_all(levels, above, device_memory(), "eager")
    for place, (level, table) in enumerate(zip(levels[1:], draft.levels, strict=False), start=1):
        if level.found is not None and level.found.head is not None:
            # Draft heads go where the output layer of their verifier is.
            levels[place] = replace(level, found=replace(level.found, table=table))
    levels = load_found(levels, above, lambda _: None)
    _write_fewer(target, levels)
    for place, level in enumerate(levels[1:], start=1):
        if level.model is not None:
            levels[place] = _translated(level, target, verifies=place - 1 in above)
    require_own_tokenizers(levels, above)
    return assemble(levels, above, target.vocabulary, EngineSettings(engine="eager"))


def _write_fewer(target: LoadedModel, levels: Sequence[Level]) -> None:
    """Cut the output layers of drafts to the tokens that their tables let them write.

    Raises:
        ModelError: one is in memory, and its user's.
    """
    for level in levels[1:]:
        if not isinstance(level.table, DraftTable) or level.table.tokens is None or level.network is None:
            continue
        if level.found is None:
            raise ModelError(
                f"The draft {level.network.name!r} is in memory: draft.tokens would cut its output layer.",
                "Give its folder or its name on the hub, or leave draft.tokens out.",
            )
        tokenizer = load_tokenizer(level.table if level.model is not None else ModelTable(model=target.name))
        whole = min(max(tokenizer.get_vocab().values()) + 1, target.vocabulary)
        write_fewer(level.network, level.table, tokenizer, whole, eos_ids(target.model, tokenizer))


def _translated(level: Level, target: LoadedModel, *, verifies: bool) -> Level:
    """`translated`, where both models' folders or repositories have a tokenizer."""
    assert level.model is not None
    try:
        tables = ModelTable(model=target.name), ModelTable(model=level.model.name)
        ours, theirs = load_tokenizer(tables[0]), load_tokenizer(tables[1] if level.found is None else level.table)
    except ModelError:
        return level  # nothing is known of it
    # A draft with fewer rows than the target may still have one tokenizer with it: the others are padding.
    if difference(ours, theirs) is None:
        return level
    return translated(level, ours, theirs, target.vocabulary, verifies=verifies)
