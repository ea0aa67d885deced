"""Loads a profile's `Pair`: facts about its models first, then weights or stored graphs, then runners."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from specctl.errors import ModelError
from specctl.models.files.tokenizer import difference, known_ids
from specctl.models.loading.file_models import FileModel, GgufHead, store_facts
from specctl.models.loading.model import LoadedModel, load_tokenizer, loading_order
from specctl.models.loading.model_check import check_model
from specctl.models.loading.model_runners import checked_runner, model_runner
from specctl.models.loading.pair_members import (
    PairMember,
    eos_of,
    find_all,
    load_found,
    offering_llama,
    reader_of,
    require_own_tokenizers,
    with_gguf_models,
    with_stored_graphs,
)
from specctl.models.loading.vocabularies import notice_of, own_text_runner
from specctl.models.placing.absent import download_note
from specctl.models.placing.engine_table import NO_GGUF, build_runner, engine_named
from specctl.models.placing.memory import device_memory
from specctl.models.placing.model_config import require_supported_rules
from specctl.models.placing.placement import named_devices
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, locate_predictor, mismatch, require_kind
from specctl.models.running.engines import EngineSettings, fixed_width
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.pair import Pair, in_a_row
from specctl.models.running.registered import RegisteredPasses
from specctl.models.running.ruled import RuledPasses, TokenRule
from specctl.models.running.slot import Slot
from specctl.models.running.text_rules import prompt_rules_in
from specctl.models.running.threads import LARGE, choose, decided, share_of, tell_torch, threads_of
from specctl.models.running.transforms import NarrowPasses, in_parallel
from specctl.processes import CoreTime
from specctl.profile.schema import DraftTable, ModelTable, Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE_DRAFT = 0.5


def large_draft(verifier: tuple[str, int], draft: tuple[str, int]) -> str | None:
    """A warning about a draft that is too large to pay off, else None.

    ``verifier`` and ``draft`` are each model's key in the profile and its number of parameters.
    """
    (upper, larger), (lower, smaller) = verifier, draft
    if smaller <= LARGE_DRAFT * larger:
        return None
    return (
        f"The {lower} model has {smaller / larger:.0%} of the parameters of the {upper} model; drafting pays off when "
        "the draft is many times smaller."
    )


def large_drafts(members: Sequence[PairMember], above: Sequence[int | None]) -> Iterator[str]:
    """The warnings of `large_draft` about a pair's members; draft heads and models in shards are left out."""
    for draft, upper in zip(members[1:], above, strict=True):
        sizes = [
            (one.role, one.model.parameters)
            for one in (reader_of(members, upper), draft)
            if one.model is not None and (one.torch_model is None or one.torch_model.sharding is None)
        ]
        if len(sizes) == 2 and (warning := large_draft(*sizes)):
            yield warning


def load_pair(
    profile: Profile,
    *,
    drafts: Sequence[ModelTable] | None = None,
    above: Sequence[int | None] = (),
    heads: Sequence[Sequence[str]] | None = None,
    with_predictors: bool = True,
    on_foreign_predictor: Callable[[str], None] | None = None,
    engines: EngineSettings | None = None,
    measured: bool = True,
    torch_weights: bool = True,
    models: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Pair:
    """Load every model of a profile, and choose the number of threads for passes on the CPU.

    Args:
        profile: names the models.
        drafts: tables of the drafts to load instead of the profile's, in the order of `Pair.drafts`; none for the
            target alone.
        above: see `Pair`, for ``drafts``.
        heads: for each of ``drafts`` the names of the heads to load, instead of the head in its table.
        with_predictors: whether to load the heads in the drafts' tables.
        on_foreign_predictor: called with a warning if a head was trained on another draft's weights; without it, such a
            head is an error.
        engines: how forward passes run; by default as set in the profile.
        measured: whether to measure the fastest number of threads for decoding, if none is set. Training is faster with
            all threads, and is reproducible bit for bit only with a fixed number.
        torch_weights: whether models on onnxruntime also keep their torch weights; if not, only models needed by a
            draft head or a check do.
        models: whether `Pair.models` is needed; if not and all models have stored graphs, these replace the models,
            without torch and transformers.
        progress: called with the name of each model and head before it is loaded.

    Raises:
        ModelError: a model cannot be loaded, does not fit, has another tokenizer than the target and may not, or cannot
            run on the chosen engine; or a head cannot be loaded, was trained on another draft, or is of a kind that its
            policy does not read.
        ProfileError: a draft's tokenizer makes it useless for the target.
    """
    began = CoreTime.now()
    settings = engines or EngineSettings.of(profile)
    engine_named(settings.engine).require()
    tables = profile.models
    if drafts is not None:
        tables = [tables[0], *(("draft", table) for table in drafts)]
    wanted = [own_heads(table) if with_predictors else [] for _, table in tables[1:]] if heads is None else heads
    members = [PairMember(role, table, names) for (role, table), names in zip(tables, [[], *wanted], strict=True)]
    above = tuple(above or in_a_row(len(members) - 1))

    members = with_gguf_models(members, above, profile.threads, settings)
    if settings.engine == "llama":
        for one in members:
            if one.checkpoint is not None and one.network is None:
                settings.notice(f'{one.table.model} runs as with engine = "auto": {NO_GGUF}')
        settings = replace(settings, engine="auto")
    pair_of = partial(
        _pair,
        profile,
        above=above,
        settings=settings,
        began=began,
        measured=measured,
        torch_weights=torch_weights,
        on_foreign_predictor=on_foreign_predictor,
        progress=progress,
    )
    if not models:
        members = with_stored_graphs(members, profile, settings)
    if all(one.network is not None or not one.table.has_files for one in members):
        return pair_of(members)
    # Check everything possible before loading weights, which may take minutes.
    gpus = [named_devices(one.table) for one in members if one.table.has_files]
    devices = device_memory(None if None in gpus else {name for each in gpus for name in each or ()})
    members = find_all(members, above, devices, settings.engine)
    files = [one.checkpoint for one in loading_order(members) if one.checkpoint is not None and one.network is None]
    for note in dict.fromkeys(map(download_note, files)):
        if note is not None:
            settings.notice(note)
    if profile.generation_config and members[0].checkpoint in files:
        require_supported_rules(files[-1])
    for name in chain.from_iterable(wanted):
        locate_predictor(name)
    return pair_of(load_found(members, above, progress))


def _pair(
    profile: Profile,
    members: Sequence[PairMember],
    *,
    above: tuple[int | None, ...],
    settings: EngineSettings,
    began: CoreTime | None,
    measured: bool,
    torch_weights: bool,
    on_foreign_predictor: Callable[[str], None] | None,
    progress: Callable[[str], None],
) -> Pair:
    """Build the pair from loaded or stored members; ``began`` is the start time of loading, for the others see
    `load_pair`.
    """
    members = list(members)
    target = members[0].model
    assert target is not None, "the target is not a draft head"
    tokenizer = members[0].tokenizer()
    vocabulary = known_ids(tokenizer, target.vocabulary)
    tokenizers = {0: tokenizer}
    for place, one in enumerate(members[1:], start=1):
        if one.model is not None:
            tokenizers[place] = tokenizer if one.spells_like(members[0]) else one.tokenizer()
            verifies = place - 1 in above
            members[place] = one = one.translated(tokenizer, tokenizers[place], vocabulary, verifies=verifies)
            if one.tokens is not None:
                settings.notice(notice_of(one.role, one.table, one.tokens))
    eos = eos_of(target, tokenizer)
    require_own_tokenizers(members, above)
    for one in members[1:]:
        one.write_fewer(tokenizer, vocabulary, eos)
    for warning in large_drafts(members, above):
        settings.notice(warning)
    # Done before any compilation or session, because both keep their initial number of threads.
    loaded = [one.torch_model for one in members if one.torch_model is not None]
    whole = not any(model.sharding for model in loaded)
    setting = profile.threads if whole else share_of(profile.threads, profile.target.shards or 1)
    plain = whole and not any(model.weights for model in loaded)
    threads = choose(setting, [one.model for one in loaded] if measured and plain else (), vocabulary, began)
    graphs = [one.file_model for one in members if one.file_model is not None]
    tries = graphs and decided(setting) is None and sum(each.weight_bytes for each in graphs) <= LARGE
    made = assemble(
        members,
        above,
        vocabulary,
        replace(settings, most_threads=threads.free if threads.milliseconds or (whole and not plain) else None),
        threads={1, threads.free} if tries else {threads.number},
        torch_weights=torch_weights,
        on_foreign_predictor=on_foreign_predictor,
        progress=progress,
    )
    for place, own in tokenizers.items():
        model, checkpoint = made.members[place].torch_model, made.members[place].checkpoint
        if model is not None and checkpoint is not None:
            store_facts(model, made.bare if place == 0 else made.drafts[place - 1].bare, own, checkpoint)
    runners, prompt_rules = [made.target, *made.drafts], dict[str, object]()
    if profile.generation_config:
        runners = [
            runner if rule is None or one.network is None or runner.writes_text else Slot(RuledPasses(runner, rule))
            for one, runner, rule in zip(members, runners, _rules(target, runners, eos, vocabulary), strict=True)
        ]
        if isinstance(target, LoadedModel) and target.model.generation_config is not None:
            prompt_rules = prompt_rules_in(target.model.generation_config)
    models = tuple(
        None if one.torch_model is None else one.torch_model.model for one in made.members if one.model is not None
    )
    used = threads.by_engine(made.bare)
    if tries and used is threads:
        used = replace(threads, number=threads_of(made.bare), reason="as its file is small")
    if graphs:
        tell_torch(used.number)  # a registered drafter may have imported it
    return Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos,
        context=runners[0].context,
        models=models if any(models) else (),
        named_predictors=made.named_predictors,
        above=above,
        threads=used,
        vocabulary=vocabulary,
        prompt_rules=prompt_rules,
    )


def _rules(
    target: LoadedModel | FileModel, runners: Sequence[Slot], eos: Set[int], vocabulary: int
) -> Sequence[TokenRule | None]:
    """The target's generation rules for each runner."""
    if isinstance(target, FileModel):
        return [target.rule(vocabulary) for _ in runners]
    if (config := target.model.generation_config) is None:
        return [None] * len(runners)
    from specctl.models.running.config_rules import config_rules

    return [config_rules(config, eos, vocabulary, runner.device) for runner in runners]


@dataclass(frozen=True, slots=True)
class Assembled:
    """Runners of a target and its drafts."""

    members: Sequence[PairMember]  # from the target down, each with its runner's model
    bare: Slot  # the target's runner without wrappers
    target: Slot  # the runner that verifies
    # drafts, named_predictors: see `Pair`
    drafts: tuple[Slot, ...]
    named_predictors: tuple[dict[str, TrainedPredictor], ...]


def assemble(
    members: Sequence[PairMember],
    above: Sequence[int | None],
    vocabulary: int,
    settings: EngineSettings,
    *,
    threads: Set[int] = frozenset({1}),
    torch_weights: bool = True,
    on_foreign_predictor: Callable[[str], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Assembled:
    """Build the runners of a target and its drafts, and connect each draft head to its verifier's states.

    Args:
        members: from the target down, loaded or stored.
        above: see `Pair`.
        vocabulary: V, the width of all runners' logits; narrower logits are padded.
        settings: how passes run; its ``check`` is for the target.
        threads: thread counts from which a stored graph chooses the fastest.
        torch_weights, on_foreign_predictor, progress: see `load_pair`.

    Raises:
        ModelError: a model cannot run on the engine, a head cannot be loaded, or the target's results depend on the
            passes in which a text is read.
    """
    members, whole = list(members), members[0].torch_model
    checks = settings.check or (whole is not None and whole.untested)
    needed = {0} if checks and (members[0].checkpoint is None or members[0].rounding is None) else set()
    needed |= {
        0 if upper is None else upper + 1 for one, upper in zip(members[1:], above, strict=True) if one.head is not None
    }
    if whole is not None:
        check_model(whole, members[0], vocabulary)
    runners = list[Slot]()
    for place, one in enumerate(members):
        verifier = reader_of(runners, above[place - 1]).bare if place else None
        if place and one.torch_model is not None and one.torch_model.sharding is None:
            check_model(one.torch_model, one, one.torch_model.vocabulary, drafts=True)
        if one.file_model is not None:
            progress(one.name)
        keeps = torch_weights or place in needed
        with offering_llama(one):
            members[place], runner = _runner(one, vocabulary, settings, verifier, threads, keeps=keeps)
        found = members[place].torch_model
        if place and found is not None and place - 1 not in above:
            runner = in_parallel(runner, found.model.config, vocabulary, found.name)
        runners.append(runner)
    target, bare = members[0].torch_model, runners[0]
    if target is not None and target is not whole:  # onnxruntime cannot run its quantised graph
        check_model(target, members[0], vocabulary)  # and torch quantises it differently
    file_model = members[0].file_model
    if settings.deterministic:
        if file_model is not None:
            runners[0] = file_model.deterministic(bare)
        elif target is not None:
            runners[0] = fixed_width(bare, target.model)
    if checks:
        runners[0] = checked_runner(runners[0], bare, members[0], vocabulary)
    for runner, upper in zip(runners[1:], above, strict=True):
        if runner.reads_states:
            reader_of(runners, upper).watch(runner.layers)
    named: list[dict[str, TrainedPredictor]] = []
    for one, runner in zip(members[1:], runners[1:], strict=True):
        loading: dict[str, TrainedPredictor] = {}
        for name in one.predictors if one.network is not None else ():
            progress(name)
            head = _load_predictor(one, name, on_foreign_predictor)
            loading[name] = head if isinstance(head, DiscoPredictor) else head.to(runner.device)
        named.append(loading)
    return Assembled(members, bare, runners[0], tuple(runners[1:]), tuple(named))


def _runner(
    member: PairMember,
    vocabulary: int,
    settings: EngineSettings,
    verifier: Slot | None,
    threads: Set[int],
    *,
    keeps: bool,
) -> tuple[PairMember, Slot]:
    """A member's runner, and the member with the runner's model; ``verifier`` is the runner above it, if any."""
    network = member.network
    if network is None:
        name = member.table.model
        return member, Slot(LookupPasses(vocabulary) if member.table.is_lookup else RegisteredPasses(name, vocabulary))
    own = vocabulary if member.tokens is None else member.tokens.draft.whole
    runner: Slot
    if isinstance(network, FileModel):
        runner = network.runner(own, threads, settings)
    elif isinstance(network, GgufHead):
        assert verifier is not None, "the target is not a draft head"
        return member, network.runner(vocabulary, verifier)
    elif isinstance(network, LoadedModel) and member.checkpoint is None:
        runner = build_runner(network.model, own, network.name, settings)
    elif isinstance(network, LoadedModel):
        network, runner = model_runner(member, network, own, settings, keeps=keeps)
    else:
        from specctl.models.loading.draft_heads import build_head_runner

        return member, build_head_runner(network, vocabulary, member.name, settings, verifier)
    if member.tokens is not None:
        runner = own_text_runner(runner, member.tokens)
    elif network.vocabulary < vocabulary:
        runner = Slot(NarrowPasses(runner, network.vocabulary, vocabulary))
    return replace(member, network=network), runner


def own_heads(table: ModelTable) -> list[str]:
    """Load the head in a draft's table; its kind must fit the policy."""
    if not isinstance(table, DraftTable) or table.head is None:
        return []
    require_kind(locate_predictor(table.head), table.policy)
    return [table.head]


def _load_predictor(draft: PairMember, name: str, on_foreign: Callable[[str], None] | None) -> TrainedPredictor:
    checkpoint = locate_predictor(name)
    head = checkpoint.load(draft.hidden_size)
    if draft.checkpoint is not None and (reason := mismatch(checkpoint, draft.checkpoint)):
        if on_foreign is None:
            hint = "Train a head on this draft with `specctl train-head`, or use this one with --foreign-head."
            raise ModelError(f"{reason}.", hint)
        on_foreign(f"{reason}; its predictions may be far off")
    return head


NAMELESS = "the model"


def in_memory(model: "PreTrainedModel", role: str) -> LoadedModel:
    """A member for a causal language model loaded by the user; ``role`` is ``target`` or ``draft``, for messages.

    Raises ModelError for an encoder-decoder model, and for a model that cannot roll back rejected tokens.
    """
    from specctl.models.passes.cache import cannot_go_back

    name = model.name_or_path or NAMELESS
    if model.config.is_encoder_decoder:
        raise ModelError(f"The {role} {name!r} has an encoder.", "specctl runs decoders only.")
    if why := cannot_go_back(model.config, type(model)):
        raise ModelError(f"The {role} {name!r} cannot take back rejected tokens: {why}.")
    return LoadedModel.of(model, name)


def form_of(model: "PreTrainedModel") -> list[Any]:
    """A fingerprint of a model's form; runners must be rebuilt when it changes.

    It has the model's configuration, its attention, and each weight's name, shape, dtype and device. So it changes when
    embeddings are resized or the model is moved, but not when weights get new values.
    """
    from specctl.models.passes.masks import USUAL, WITH_MASKS

    weights = [(name, weight.shape, weight.dtype, weight.device) for name, weight in model.named_parameters()]
    config = model.config
    attention = getattr(config, "_attn_implementation", None)  # a runner may switch among `WITH_MASKS` itself
    return [model, config.to_dict(), USUAL if attention in WITH_MASKS else attention, weights]


def assembled(target: LoadedModel, draft: DraftTable, given: "PreTrainedModel | None") -> Assembled:
    """Eager runners of a target in memory, with its full vocabulary, and of its drafts.

    Args:
        target: checked once, if its family is not known.
        draft: the table of the draft that it verifies.
        given: a model to use as the only draft; None to load the table's draft.

    Raises:
        ModelError: a draft cannot be loaded, has another tokenizer than the target, or its head was trained on another
            target; or the target's weights are quantised, and its results depend on the width of a pass.
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
    members = find_all(with_gguf_models(members, above, "auto", EngineSettings()), above, device_memory(), "eager")
    for place, (member, table) in enumerate(zip(members[1:], draft.levels, strict=False), start=1):
        if member.head is not None:
            # draft heads go to the device of their verifier's output layer
            members[place] = replace(member, table=table)
    members = load_found(members, above, lambda _: None)
    _write_fewer(target, members)
    for place, member in enumerate(members[1:], start=1):
        if member.model is not None:
            members[place] = _translated(member, target, verifies=place - 1 in above)
    require_own_tokenizers(members, above)
    return assemble(members, above, target.vocabulary, EngineSettings(engine="eager"))


def _write_fewer(target: LoadedModel, members: Sequence[PairMember]) -> None:
    """Trim drafts' output layers to the tokens in their tables; a user's model in memory is rejected instead."""
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
        draft.write_fewer(tokenizer, whole, eos_of(target, tokenizer))


def _translated(draft: PairMember, target: LoadedModel, *, verifies: bool) -> PairMember:
    """Apply `translated` if both models' folders or repositories have a tokenizer."""
    try:
        ours = load_tokenizer(ModelTable(model=target.name))
        theirs = load_tokenizer(ModelTable(model=draft.name)) if draft.checkpoint is None else draft.tokenizer()
    except ModelError:
        return draft  # nothing is known of it
    # A draft with fewer rows than the target may still have the same tokenizer: the others are padding.
    if difference(ours, theirs) is None:
        return draft
    return draft.translated(ours, theirs, target.vocabulary, verifies=verifies)
