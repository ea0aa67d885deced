"""What a draft head is, whether it belongs to its verifier and what it needs, found without loading the verifier."""

from collections.abc import Sequence

from specctl.doctor.model_facts import ModelFacts
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES, locate
from specctl.models.files.skeleton import skeleton
from specctl.models.files.tokenizer import Tokenizer
from specctl.models.loading.draft_heads import needed
from specctl.models.loading.pair_members import require_head_settings
from specctl.models.loading.vocabularies import counts_for, draft_vocabulary, trained_on_few
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.model_config import load_config
from specctl.models.placing.placement import dtype_on, kind_of_device, place
from specctl.models.placing.requirements import weighed
from specctl.profile.schema import DraftTable, Engine, ModelTable
from specctl.profile.wording import short_name


def examine_draft_head(
    head: DraftHeadCheckpoint,
    table: DraftTable,
    verifier: tuple[str, ModelTable],
    devices: Sequence[DeviceMemory],
    engine: Engine,
    facts: ModelFacts,
) -> list[str]:
    """Build a draft head on its verifier's shapes.

    Args:
        head: its files; weights on the hub are not downloaded, and only its configuration is examined.
        table: its profile table.
        verifier: key and table of the model above it.
        devices: those of the machine.
        engine: the one that is to run its verifier.
        facts: filled in.

    Returns:
        Advice.

    Raises:
        ModelError: the head is damaged, of a layout that specctl does not know, or made for another model.
    """
    require_head_settings(head, table)
    facts.trained_on = head.verifier
    advice = []
    key, upper = verifier
    if head.verifier is not None and short_name(head.verifier) != short_name(upper.model):
        advice.append(
            f"{head} was trained on {head.verifier}; the {key} model here is {upper.model}. The text stays the "
            "target's, but less of a draft may be accepted."
        )
    above = locate(upper, key)
    model = skeleton(above, load_config(above, upper.trust_remote_code), upper.trust_remote_code)
    if not head.local:
        return [*advice, f"{head} will be downloaded at first use."]
    network = head.network(model)
    facts.architecture = type(network).__name__
    facts.context = network.context
    facts.reads_layers = list(network.layers)
    facts.draft_tokens = network.draft_vocabulary
    facts.vocabulary = model.config.get_text_config(decoder=True).vocab_size
    need = needed(network)
    if table.dtype == "auto":  # it is loaded in its verifier's
        table = table.model_copy(
            update={"dtype": dtype_on(upper, weighed(above, upper, devices, engine), kind_of_device(upper, devices))}
        )
    placement = place(table, need, devices, head.checkpoint.role)
    facts.parameters, facts.dtype, facts.devices = need.parameters, placement.dtype, placement.shares
    facts.weights_by_dtype = {name: need.weight_bytes(name) for name in ITEM_BYTES if name != "float64"}
    facts.cache_per_1k_tokens = need.cache_bytes(placement.dtype, 1000)
    return advice


def examine_draft_tokens(
    table: DraftTable, facts: ModelFacts, tokenizer: Tokenizer, whole: int, eos: Sequence[int]
) -> None:
    """Add to a draft's facts how many tokens it writes, and which share of those counted they are.

    Args:
        table: the draft's, with ``tokens``.
        facts: of the draft.
        tokenizer: the target's.
        whole: V, the vocabulary that both share.
        eos: ids that end a text.

    Raises:
        ModelError: as of `draft_vocabulary`, or it is a draft head that was trained to write few.
    """
    if facts.draft_head is not None and facts.draft_tokens != facts.vocabulary:
        if table.tokens == "auto":
            return
        raise trained_on_few(table.model, facts.draft_tokens or 0)
    ids = draft_vocabulary(table, tokenizer, whole, eos, facts.vocabulary, facts.output_share)
    facts.draft_tokens = whole if ids is None else len(ids)
    counts = counts_for(table, tokenizer, whole)
    some = range(whole) if ids is None else ids.ids.tolist()
    facts.covered, facts.covers = counts.covered(some), counts.expected(some, whole)
