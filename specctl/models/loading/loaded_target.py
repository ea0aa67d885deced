"""A target that is in memory already, and the drafts that are loaded for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.files.tokenizer import difference, known_ids
from specctl.models.loading.assembly import Assembled, assemble, own_heads
from specctl.models.loading.fewer_tokens import write_fewer
from specctl.models.loading.model import LoadedModel, load_tokenizer
from specctl.models.loading.pair_members import PairMember, eos_of, find_all, load_found
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
    members = [PairMember("target", ModelTable(model=target.name), network=target)]
    if given is not None:
        members.append(PairMember("draft", draft, own_heads(draft), network=in_memory(given, "draft")))
    else:
        for table in draft.levels:
            role = ".".join(["draft"] * len(members))
            here = table if table.device != "auto" else table.model_copy(update={"device": str(target.device)})
            members.append(PairMember(role, here, own_heads(table)))
    above = in_a_row(len(members) - 1)
    members = find_all(members, above, device_memory(), "eager")
    for place, (member, table) in enumerate(zip(members[1:], draft.levels, strict=False), start=1):
        if member.head is not None:
            members[place] = replace(member, table=table)  # draft heads go where their verifier's output layer is
    members = load_found(members, above, lambda _: None)
    _write_fewer(target, members)
    for place, member in enumerate(members[1:], start=1):
        if member.torch_model is not None:
            members[place] = _translated(member, target, verifies=place - 1 in above)
    require_own_tokenizers(members, above)
    return assemble(members, above, target.vocabulary, EngineSettings(engine="eager"))


def _write_fewer(target: LoadedModel, members: Sequence[PairMember]) -> None:
    """Cut the output layers of drafts to the tokens that their tables let them write.

    Raises:
        ModelError: a draft is in memory, and so is its user's.
    """
    for draft in members[1:]:
        if not isinstance(draft.table, DraftTable) or draft.table.tokens is None or draft.network is None:
            continue
        if draft.checkpoint is None:
            raise ModelError(
                f"The draft {draft.name!r} is in memory: draft.tokens would cut its output layer.",
                "Give its folder or its name on the hub, or leave draft.tokens out.",
            )
        tokenizer = load_tokenizer(draft.table if draft.head is None else ModelTable(model=target.name))
        whole = known_ids(tokenizer, target.vocabulary)
        write_fewer(draft, tokenizer, whole, eos_of(target, tokenizer))


def _translated(draft: PairMember, target: LoadedModel, *, verifies: bool) -> PairMember:
    """`translated`, where both models' folders or repositories have a tokenizer."""
    assert draft.torch_model is not None
    try:
        ours = load_tokenizer(ModelTable(model=target.name))
        own = ModelTable(model=draft.torch_model.name) if draft.checkpoint is None else draft.table
        theirs = load_tokenizer(own)
    except ModelError:
        return draft  # nothing is known of it
    # A draft with fewer rows than the target may still have the same tokenizer: the others are padding.
    if difference(ours, theirs) is None:
        return draft
    return translated(draft, ours, theirs, target.vocabulary, verifies=verifies)
