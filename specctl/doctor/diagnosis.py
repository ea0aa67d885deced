"""Facts and problems of a profile's models, found without loading their weights. Sizes are bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeGuard

from specctl.doctor.memory_advice import graph_advice, quantization_advice, room_advice
from specctl.doctor.model_facts import ModelFacts, Overlap
from specctl.errors import AbsentError, ModelError, ProfileError
from specctl.models.files.checkpoint import ITEM_BYTES, Checkpoint, locate, terms_of
from specctl.models.files.plain_config import is_plain
from specctl.models.files.skeleton import skeleton
from specctl.models.files.tokenizer import Tokenizer, known_ids, one_tokenizer
from specctl.models.loading.assembly import large_draft
from specctl.models.loading.model import load_tokenizer, loading_order, model_tables
from specctl.models.loading.model_check import check_model, kept_check
from specctl.models.loading.model_runners import model_runner
from specctl.models.loading.pair_members import PairMember, find_head
from specctl.models.loading.vocabularies import notice_of, token_map
from specctl.models.placing.absent import bytes_by_name, lacking_devices, size_text
from specctl.models.placing.architecture import generation_config, require_supported_rules
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, working_bytes
from specctl.models.placing.model_config import ModelConfig, load_config
from specctl.models.placing.placement import Placement, after, dtype_on, kind_of_device, named_devices
from specctl.models.placing.quantization import rounding
from specctl.models.placing.requirements import placed, weighed
from specctl.models.placing.shard_plan import placement_advice
from specctl.models.predictors.predictor_checkpoint import locate_predictor, mismatch, on_hub, require_kind
from specctl.models.running.context import ENDLESS
from specctl.models.running.engines import EngineSettings, require_fixed_width
from specctl.models.running.parallel_runner import PARD_TOKENS
from specctl.models.running.rules.generation_rules import prompt_rules_in, rules_in
from specctl.plugins import DRAFTER, DRAFTERS
from specctl.policies import POLICIES
from specctl.printable import gib
from specctl.profile.schema import DraftTable, ModelTable, Profile
from specctl.versions import versions

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
    for place, (key, table) in enumerate(tables):
        facts = ModelFacts(key, table.model, without_files=not table.has_files)
        report.models.insert(0, facts)
        if table.is_lookup:
            facts.found = "copies from the text"
            continue
        if table.is_registered:
            facts.found = f"of {DRAFTERS.origin(table.model.removeprefix(DRAFTER).partition(':')[0])}"
            continue
        try:
            if isinstance(table, DraftTable) and (head := find_head(key, table, tables[place + 1])) is not None:
                facts.found = _found(head.checkpoint)
                facts.licence, facts.gated = terms_of(head.checkpoint)
                from specctl.doctor.draft_head_diagnosis import examine_draft_head

                facts.draft_head = head.kind
                report.advice += examine_draft_head(head, table, tables[place + 1], free, profile.engine, facts)
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
        whole = load_config(checkpoint, table.trust_remote_code)
        require_fixed_width(skeleton(checkpoint, whole, table.trust_remote_code))
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

    from specctl.doctor.layer_places import layer_places

    config = load_config(checkpoint, table.trust_remote_code)
    model = skeleton(checkpoint, config, table.trust_remote_code)
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
    from specctl.doctor.draft_head_diagnosis import examine_draft_tokens

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
