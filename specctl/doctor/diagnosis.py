"""Facts and problems of a profile's models, found without loading their weights. Sizes are bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

from specctl.errors import AbsentError, ModelError, ProfileError
from specctl.models.draft_heads.checkpoint import DraftHeadCheckpoint
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate, terms_of
from specctl.models.files.plain_config import is_plain
from specctl.models.files.skeleton import skeleton
from specctl.models.files.token_counts import TokenCounts, shipped_texts
from specctl.models.files.tokenizer import Tokenizer, known_ids, one_tokenizer
from specctl.models.loading.assembly import large_draft
from specctl.models.loading.model import load_tokenizer, loading_order, model_tables
from specctl.models.loading.model_check import check_model, kept_check
from specctl.models.loading.model_runners import model_runner
from specctl.models.loading.pair_members import PairMember, find_head, require_head_settings
from specctl.models.loading.vocabularies import counts_for, draft_vocabulary, notice_of, token_map, trained_on_few
from specctl.models.passes.watching import decoder_layers
from specctl.models.placing.absent import bytes_by_name, lacking_devices, size_text
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, working_bytes
from specctl.models.placing.model_config import ModelConfig, generation_config, require_supported_rules
from specctl.models.placing.placement import (
    STRATEGIES,
    Placement,
    after,
    dtype_on,
    kind_of_device,
    named_devices,
    place,
    placed,
    placement_advice,
    weighed,
)
from specctl.models.placing.quantization import Quantization, rounding
from specctl.models.predictors.predictor_checkpoint import locate_predictor, mismatch, on_hub, require_kind
from specctl.models.running.context import ENDLESS
from specctl.models.running.engines import EngineSettings, require_fixed_width
from specctl.models.running.parallel_runner import PARD_TOKENS
from specctl.models.running.rules.generation_rules import prompt_rules_in, rules_in
from specctl.models.translation import TokenMap, agreement
from specctl.plugins import DRAFTER, DRAFTERS
from specctl.policies import POLICIES
from specctl.printable import gib
from specctl.profile.schema import DraftTable, Engine, ModelTable, Profile
from specctl.profile.wording import short_name
from specctl.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a draft with another tokenizer shares with its target.

    Attributes:
        shared: how many of the target's tokens it has.
        whole: how many the target has.
        used: the share of shared ones among the target's tokens of the prompts that come with the package. Other
            tokens cannot be drafted where shared ones are, so that no more of a draft is accepted.
        agreed: the share of these tokens that come out as they were if the draft writes the prompts as text. Others
            are drafted wrongly, so that no more of a draft is accepted then.
        writes_text: whether it does.
    """

    shared: int
    whole: int
    used: float
    agreed: float
    writes_text: bool

    def __str__(self) -> str:
        shared = f"{self.used:.1%} of the tokens in the prompts that come with specctl are shared"
        written = f"{self.agreed:.1%} come out right of text"
        first, other, name = (written, shared, "intersection") if self.writes_text else (shared, written, "text")
        return f'{first}, and no more of a draft can be accepted ({other}: draft.vocabulary = "{name}")'

    @classmethod
    def of(cls, tokens: TokenMap, target: Tokenizer) -> "Overlap":
        """That of two tokenizers."""
        ids, texts = tokens.vocabulary.ids.tolist(), shipped_texts(target)
        agreed = agreement(tokens, texts)
        return cls(len(ids), tokens.target.whole, TokenCounts.of(texts).covered(ids), agreed, tokens.writes_text)


@dataclass(slots=True)
class ModelFacts:
    """One model or draft head of the profile; unknown facts are None or empty.

    Of a draft head, ``draft_head`` is its kind, ``reads_layers`` the layers of its verifier whose states it reads,
    and ``trained_on`` the model that its files name. ``draft_tokens`` is how many of the vocabulary's tokens a draft
    can write where those are not all, ``covered`` which share they are of the tokens that were counted, and
    ``covers`` which share is expected of other texts. ``output_share`` is the output layer's of the weights that a
    pass reads.
    ``adapter`` names a LoRA adapter with its rank and the model that it was trained on.
    ``overlap`` is that of a draft with another tokenizer than the target's.
    ``about`` is how large a model that is not here is in 16 bits, by its name.
    ``layers`` is how many of its layers go to each device; of one that is split within layers, how many each has a part
    of. Empty where it was not asked.
    ``checked`` is of a target whether it is known to make the same of a text in whatever passes it reads it.
    ``without_files`` is what copies from the text or is registered by another distribution.
    """

    key: str
    model: str
    found: str = NOT_FOUND
    folder: str | None = None
    adapter: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    context: int | None = None
    vocabulary: int | None = None
    weights_by_dtype: dict[str, int] = field(default_factory=dict)
    cache_per_1k_tokens: int | None = None
    eos_ids: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    licence: str | None = None
    gated: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    devices: dict[str, int] = field(default_factory=dict)
    draft_head: str | None = None
    reads_layers: list[int] = field(default_factory=list)
    draft_tokens: int | None = None
    covered: float | None = None
    covers: float | None = None
    output_share: float = 0.0
    trained_on: str | None = None
    without_files: bool = False
    overlap: Overlap | None = None
    checked: bool | None = None
    about: int | None = None
    layers: dict[str, int] = field(default_factory=dict)


MOSTLY = 0.5


def graph_advice(checkpoint: Checkpoint, making: int, room: int) -> list[str]:
    """Where making its graph takes more than what it leaves; both in bytes."""
    if making <= room:
        return []
    told = f"{gib(room)} free, but making its graph for onnxruntime, once, takes up to {gib(making)}."
    return [f"{checkpoint} leaves {told}"]


def room_advice(checkpoint: Checkpoint, work: int, room: int, tokens: int, *, on_cuda: bool) -> list[str]:
    """Where a text takes more than what it leaves.

    Args:
        checkpoint: of the model.
        work: bytes that a text takes.
        room: bytes that it leaves.
        tokens: of the text.
        on_cuda: whether it goes to a CUDA device, where more than the cache takes memory.
    """
    if work <= room:
        return []
    takes = "s, CUDA's context and working memory take" if on_cuda else "s takes"
    told = f"{gib(room)} free, but the cache of {tokens} token{takes} {gib(work)}"
    return [f"{checkpoint} leaves {told}: use short prompts or a device with more memory."]


def quantization_advice(checkpoint: Checkpoint, parameters: int, quantization: Quantization) -> list[str]:
    """Where few of its weights, of so many in all, are quantised."""
    share = quantization.weights / parameters
    if share >= MOSTLY:
        return []
    return [
        f"{checkpoint}: quantize covers {share:.0%} of its weights; embeddings, the output layer and what is not in "
        "linear layers of a size that fits stay as they are."
    ]


CACHE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why the models cannot run, and how to fix it.

    Attributes:
        where: names the models, such as ``draft``.
        message, hint: as of an error.
        absent: whether it is that files are not here and cannot be fetched now.
    """

    where: str
    message: str
    hint: str
    absent: bool = False


@dataclass(slots=True)
class Diagnosis:
    """The whole report; with ``problems`` the models cannot run, with ``advice`` they can.

    ``here`` is whether ``devices`` are this machine's.
    """

    versions: dict[str, str]
    devices: list[DeviceMemory]
    models: list[ModelFacts] = field(default_factory=list)
    shared_vocabulary: int | None = None
    problems: list[Problem] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    here: bool = True

    @property
    def ready(self) -> bool:
        return not self.problems

    @property
    def placed(self) -> bool:
        """Whether every model has a place, though its weights or its tokenizer may be missing."""
        return all(one.without_files or one.draft_head is not None or one.dtype is not None for one in self.models)


def diagnose(profile: Profile, *, tries: bool = False, machine: Sequence[DeviceMemory] | None = None) -> Diagnosis:
    """Examine every model of a profile: its files, the devices it would be placed on, its tokenizer and its head.

    Args:
        profile: names the models.
        tries: whether to load a target of no ordinary family whose weights are here, where it is not known yet that it
            makes the same of a text in whatever passes it reads it.
        machine: the devices of another machine than this one, to ask about that; None for this one.
    """
    report = Diagnosis(versions(), device_memory() if machine is None else [*machine], here=machine is None)
    report.advice += [f"{why}." for why in (*POLICIES.broken.values(), *DRAFTERS.broken.values())]
    try:
        engine_named(profile.engine).require()
    except ModelError as error:
        report.problems.append(Problem("engine", error.message, error.hint))
    free = report.devices
    read: dict[str, Checkpoint] = {}
    tables = loading_order(model_tables(profile))
    sizes = bytes_by_name(tables)
    for number, (key, table) in enumerate(tables):
        facts = ModelFacts(key, table.model, without_files=not table.has_files)
        report.models.insert(0, facts)
        if table.is_lookup:
            facts.found = "copies from the text"
            continue
        if table.is_registered:
            facts.found = f"of {DRAFTERS.origin(table.model.removeprefix(DRAFTER).partition(':')[0])}"
            continue
        try:
            if isinstance(table, DraftTable) and (head := find_head(key, table, tables[number + 1])) is not None:
                facts.found = _found(head.checkpoint)
                facts.licence, facts.gated = terms_of(head.checkpoint)
                facts.draft_head = head.kind
                report.advice += examine_draft_head(head, table, tables[number + 1], free, profile.engine, facts)
                continue
            checkpoint = read[key] = locate(table, key)
            placement = _examine(checkpoint, table, facts, free, report, profile)
            free = after(free, placement)
        except ModelError as error:
            absent = isinstance(error, AbsentError)
            report.problems.append(Problem(key, error.message, error.hint, absent=absent))
            if absent:
                facts.about = None if (size := sizes.get(key)) is None else round(size)
                report.advice += lacking_devices([(key, table)], (device.name for device in report.devices))
    tokenizers = _tokenizers(report, read, dict(tables))
    _compare(report, tokenizers, dict(tables))
    lowest = read.get(report.models[-1].key)
    masks = PARD_TOKENS - 1 if lowest is not None and "pard_token" in lowest.settings() else 0
    report.advice += _short_contexts(report.models, masks)
    for key, table in tables:
        if _is_cut(table) and "target" in tokenizers:
            _examine_tokens(key, table, tokenizers["target"], report)
    for (key, table), verifier in pairwise(tables):
        if isinstance(table, DraftTable) and table.head is not None:
            _examine_predictor(key, table, verifier, table.head, report)
    if not report.here:
        room = sum(device.free for device in report.devices if device.name != "cpu") or report.devices[-1].free
        there = f"--memory describes {size_text(room)}"
        report.advice += [
            f"By its name {one.model} takes about {size_text(one.about)} in 16 bits; {there}."
            for one in report.models
            if one.about is not None
        ]
    if report.placed and not report.here:
        report.advice.append("All weights fit on the devices that --memory describes.")
    if report.ready and report.here:
        try:
            _check_target(read["target"], profile, report.models[0], tries=tries)
        except ModelError as error:
            report.models[0].checked = None
            report.problems.append(Problem("target", error.message, error.hint))
    return report


def _check_target(checkpoint: Checkpoint, profile: Profile, facts: ModelFacts, *, tries: bool) -> None:
    """Add to the target's facts whether it is known to make the same of a text in whatever passes it reads it.

    Where onnxruntime is to quantise it, its graph is made too, and where that cannot be used torch's form is checked.

    Raises:
        ModelError: it does not, or cannot be loaded.
    """
    assert facts.dtype is not None, "a target without problems has a place"
    if not checkpoint.has_weights():
        facts.checked = False
        return
    table = profile.target
    form = rounding(table, profile.engine)
    kind = next(iter(facts.devices)).partition(":")[0]
    known = kept_check(checkpoint, table, kind, facts.dtype, None if form is not None else table.quantize)
    if known is not None:
        known.require(table.model)
    ordinary = is_plain(checkpoint.settings()) and checkpoint.adapter is None and table.quantize is None
    facts.checked = known is not None and form is None
    if not facts.checked and tries and not ordinary and not table.splits:
        target = PairMember("target", table).found(None, device_memory(named_devices(table)), profile.engine).load()
        network = target.torch_model
        assert network is not None, "a target is not a draft head"
        check_model(network, target, network.vocabulary)
        if form is not None:
            as_run, _ = model_runner(target, network, network.vocabulary, EngineSettings.of(profile))
            if as_run is not network:
                check_model(as_run, target, as_run.vocabulary)
        facts.checked = True


def _tokenizers(
    report: Diagnosis, read: Mapping[str, Checkpoint], tables: Mapping[str, ModelTable]
) -> dict[str, Tokenizer]:
    """Each model's tokenizer by its key, as far as it can be read; their ends of sequence are added to the facts."""
    found: dict[str, Tokenizer] = {}
    one = None if any(map(_is_cut, tables.values())) else one_tokenizer([*read.values()])
    for key in read:
        try:
            found[key] = load_tokenizer(tables[key], role=key) if one is None else one
        except ModelError as error:
            if (problem := Problem(key, error.message, error.hint)) not in report.problems:
                report.problems.append(problem)
    for facts in report.models:
        if facts.key in found:
            facts.eos_ids = sorted({*facts.eos_ids, *_ids(found[facts.key].eos_token_id)})
    return found


def _is_cut(table: ModelTable) -> TypeGuard[DraftTable]:
    """Whether a draft is to write only some of the target's tokens, which are counted with its whole tokenizer."""
    return isinstance(table, DraftTable) and table.tokens is not None


def _examine(
    checkpoint: Checkpoint,
    table: ModelTable,
    facts: ModelFacts,
    free: list[DeviceMemory],
    report: Diagnosis,
    profile: Profile,
) -> Placement:
    facts.folder = str(checkpoint.folder)
    facts.found = _found(checkpoint)
    facts.licence, facts.gated = terms_of(checkpoint)
    facts.adapter = None if checkpoint.adapter is None else checkpoint.adapter.told
    config = ModelConfig.read(checkpoint, table.trust_remote_code)
    facts.architecture = config.architecture
    facts.context = config.context
    facts.vocabulary = config.vocabulary
    facts.eos_ids = _eos_ids(checkpoint, config)
    need = weighed(checkpoint, table, free, profile.engine)
    if facts.key == "target" and profile.deterministic:
        require_fixed_width(skeleton(checkpoint, table.trust_remote_code))
    if facts.key == "target" and profile.generation_config:
        require_supported_rules(checkpoint)
        found = generation_config(checkpoint)
        told = {} if found is None else {**rules_in(found), **prompt_rules_in(found)}
        facts.rules = [f"{name} = {value}" for name, value in told.items()]
    facts.parameters = need.parameters
    output = config.vocabulary * config.hidden_size
    facts.output_share = output / max(need.parameters - (0 if config.ties else output), output)
    facts.weights_by_dtype = _sizes(table, need, free)
    if need.unread and not report.here:  # what fits is known without them
        report.advice.append(f"{need.unread.message} What they take is known from its configuration.")
    elif need.unread:
        absent = checkpoint.source == "hub"
        report.problems.append(Problem(checkpoint.role, need.unread.message, need.unread.hint, absent=absent))
    elif not checkpoint.has_weights():
        report.advice.append(f"{checkpoint} will be downloaded at first use: {gib(need.stored_bytes)}.")
    if table.shards is not None:
        report.advice += placement_advice(checkpoint, table, need, free, CACHE_TOKENS)
    placement = placed(checkpoint, table, need, free, here=report.here)
    facts.dtype, facts.devices = placement.dtype, placement.shares
    if not report.here or len(placement.shares) > 1:
        facts.layers = _layers(checkpoint, table, placement)
    facts.cache_per_1k_tokens = need.cache_bytes(placement.dtype, 1000)
    facts.quantize = table.quantize
    if need.quantization is not None:
        report.advice += quantization_advice(checkpoint, need.parameters, need.quantization)
    room = sum(device.free for device in free if device.name in placement.shares) - sum(placement.shares.values())
    on_cuda = any(name.startswith("cuda") for name in placement.shares)
    first = on_cuda and not any(set(other.devices) & set(placement.shares) for other in report.models[1:])
    engine = profile.engine
    work = working_bytes(need, placement.dtype, CACHE_TOKENS, engine, on_cuda=on_cuda, first=first)
    report.advice += room_advice(checkpoint, work, room, CACHE_TOKENS, on_cuda=on_cuda)
    if making := engine_named(engine).making:
        report.advice += graph_advice(checkpoint, int(making * need.weight_bytes(placement.dtype)), room)
    return placement


def _layers(checkpoint: Checkpoint, table: ModelTable, placement: Placement) -> dict[str, int]:
    """How many layers go to each device."""
    import torch

    model = skeleton(checkpoint, table.trust_remote_code)
    return layer_places(model.to(getattr(torch, placement.dtype)), placement)


def _sizes(table: ModelTable, need: Estimate, devices: list[DeviceMemory]) -> dict[str, int]:
    """Bytes of the weights by dtype; of weights that are or will be quantised, in that form only."""
    if need.quantised:
        return {"as stored": need.stored_bytes}
    if need.quantization is not None:
        dtype = dtype_on(table, need, kind_of_device(table, devices))
        return {need.quantization.name: need.weight_bytes(dtype)}
    return {dtype: need.weight_bytes(dtype) for dtype in ITEM_BYTES if dtype != "float64"}


def _examine_tokens(key: str, table: DraftTable, tokenizer: Tokenizer, report: Diagnosis) -> None:
    """Add to a draft's facts which tokens it can write."""

    target, draft = report.models[0], next(facts for facts in report.models if facts.key == key)
    rows = max(tokenizer.get_vocab().values()) + 1
    whole = report.shared_vocabulary or min(rows, target.vocabulary or rows)
    try:
        examine_draft_tokens(table, draft, tokenizer, whole, target.eos_ids)
    except ModelError as error:
        report.problems.append(Problem(f"{key}.tokens", error.message, error.hint))


def _examine_predictor(
    key: str, table: DraftTable, verifier: tuple[str, ModelTable], name: str, report: Diagnosis
) -> None:
    """Check that a draft's head exists, has the draft's hidden size, and was trained on the draft's weights.

    A bad head is only advice if the draft's policy does not read it; then its weights are not read here either.
    """
    needed = table.policy.setting.needs_predictor
    if on_hub(name):
        report.advice.append(f"The acceptance head {name!r} will be downloaded at first use.")
        return
    try:
        head = locate_predictor(name)
        require_kind(head, table.policy)
        drafting = find_head(key, table, verifier)
        draft = locate(table, key) if drafting is None else drafting.checkpoint
        if not needed:
            head.require_weights()
        elif drafting is None:  # the width of a draft head's states is known once it is built
            head.load(ModelConfig.read(draft, table.trust_remote_code).hidden_size)
        if draft.has_weights() and (reason := mismatch(head, draft)):
            raise ModelError(f"{reason}.", "Train a head on this draft with `specctl train-head`.")
    except ModelError as error:
        if not needed:
            report.advice.append(f"{error.message} {error.hint}")
        elif error.message not in {problem.message for problem in report.problems}:
            report.problems.append(Problem(f"{key}.head", error.message, error.hint))


def _compare(report: Diagnosis, tokenizers: Mapping[str, Tokenizer], tables: Mapping[str, ModelTable]) -> None:
    """Compare each draft's tokenizer with the target's, and the models' sizes with each other."""
    target, *drafts = [facts for facts in report.models if facts.draft_head is None and not facts.without_files]
    sizes = [target.vocabulary] if target.vocabulary and target.key in tokenizers else []
    for draft in drafts:
        if draft.key not in tokenizers or not sizes or not target.vocabulary or not draft.vocabulary:
            sizes = []
            break
        try:
            pair = tokenizers[target.key], tokenizers[draft.key]
            whole = known_ids(pair[0], target.vocabulary)
            table = tables[draft.key]
            needs_law = isinstance(table, DraftTable) and (table.draft or table.head) is not None
            tokens = token_map(table, *pair, whole, draft.vocabulary, needs_law=needs_law)
            if tokens is None:
                sizes.append(whole)
            else:
                draft.overlap = Overlap.of(tokens, pair[0])
                report.advice.append(f"{notice_of(draft.key, table, tokens)}; {draft.overlap}.")
        except (ModelError, ProfileError) as error:
            report.problems.append(Problem(f"target and {draft.key}", error.message, error.hint))
            sizes = []
            break
    if sizes and drafts and not any(draft.overlap for draft in drafts):
        report.shared_vocabulary = min(sizes)
    for larger, smaller in pairwise(report.models):
        if larger.parameters and smaller.parameters:
            sizes_of = (larger.key, larger.parameters), (smaller.key, smaller.parameters)
            report.advice += filter(None, [large_draft(*sizes_of)])


def _short_contexts(models: Sequence[ModelFacts], masks: int) -> Iterator[str]:
    """Where drafts stop drafting because their context ends before that of the model they draft for.

    One with another tokenizer goes on with the end of the text in its place.

    Args:
        models: from the target down.
        masks: how many the lowest reads behind a text, for which its context needs room too.
    """
    whole = models[0].context
    reached = ENDLESS if whole is None else whole
    for draft in models[1:]:
        if draft.context is None or draft.overlap is not None:
            continue
        holds = draft.context - (masks if draft is models[-1] else 0)
        if holds >= reached:
            continue
        reached = holds
        end = "of any number" if whole is None else f"of {whole:,}"
        told = f"{draft.key} drafts until token {reached:,} {end}"
        yield f"{told}: its context ends there, and the text goes on without it."


def _found(checkpoint: Checkpoint) -> str:
    if checkpoint.source != "hub":
        return {"embedded": "ships with specctl", "folder": "local folder"}[checkpoint.source]
    return "cached" if checkpoint.has_weights() else "on the hub"


def _eos_ids(checkpoint: Checkpoint, config: ModelConfig) -> list[int]:
    settings = generation_config(checkpoint)
    return sorted(_ids(config.eos if settings is None else getattr(settings, "eos_token_id", None)))


def _ids(ids: int | list[int] | None) -> set[int]:
    return {ids} if isinstance(ids, int) else set(ids or ())


def layer_places(model: "PreTrainedModel", placement: Placement) -> dict[str, int]:
    """How many layers go to each device; of one that is split within layers, how many each device has a part of.

    Args:
        model: a `skeleton`, in the dtype of the placement.
        placement: of that model.
    """
    layers = decoder_layers(model)
    name, count = next(name for name, part in model.named_modules() if part is layers), len(layers)
    devices = placement.devices
    if placement.sharded == "tensor":
        return dict.fromkeys(devices, count)
    if placement.sharded == "pipeline":
        least, more = divmod(count, len(devices))
        return {device: least + (number < more) for number, device in enumerate(devices)}
    where = placement.device_map
    if isinstance(where, str) and where in STRATEGIES:
        where = _accelerates(model, f"{name}.0", where, placement)
    elif isinstance(where, str):
        return {where: count}
    found: dict[str, int] = {}
    for number in range(count):
        layer = f"{name}.{number}"
        keys = [key for key in where if key == "" or layer == key or layer.startswith(f"{key}.")]
        inside = [key for key in where if key.startswith(f"{layer}.")]
        if keys or inside:
            device = where[max(keys, key=len) if keys else inside[0]]
            label = f"cuda:{device}" if isinstance(device, int) else str(device)
            found[label] = found.get(label, 0) + 1
    return found


def _accelerates(model: "PreTrainedModel", layer: str, strategy: str, placement: Placement) -> dict[str, Any]:
    """The map that accelerate makes for a strategy, as transformers asks it when the weights are loaded."""
    import torch
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    whole = [type(model.get_submodule(layer)).__name__]
    dtype = getattr(torch, placement.dtype)
    memory: dict[Any, Any] = dict(placement.max_memory or {})
    model.tie_weights()
    if strategy != "sequential":
        low = strategy == "balanced_low_0"
        memory = get_balanced_memory(model, memory, no_split_module_classes=whole, dtype=dtype, low_zero=low)
    found: dict[str, Any] = infer_auto_device_map(model, memory, no_split_module_classes=whole, dtype=dtype)
    return found


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
    from specctl.models.loading.draft_heads import needed

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
    model = skeleton(above, upper.trust_remote_code)
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
