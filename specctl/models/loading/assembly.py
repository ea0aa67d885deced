"""A target and its drafts, loaded, with matching vocabularies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from specctl.errors import ModelError
from specctl.models.files.vocabulary import check_vocabulary
from specctl.models.loading.fewer_tokens import write_fewer
from specctl.models.loading.fileless_drafts import runner_without_files
from specctl.models.loading.kept_model import keep_known
from specctl.models.loading.model import LoadedModel, eos_ids, load_tokenizer, loading_order, model_tables
from specctl.models.loading.model_check import check_model
from specctl.models.loading.model_runners import checked_runner, model_runner
from specctl.models.loading.parallel_runner import in_parallel
from specctl.models.loading.profile_models import Level, find_all, load_found, reader_of
from specctl.models.loading.proportion import large_drafts
from specctl.models.loading.vocabularies import notice_of, own_text_runner, require_own_tokenizers, translated
from specctl.models.passes.recurrent_state import untested
from specctl.models.placing.absent import download_note
from specctl.models.placing.architecture import require_supported_rules
from specctl.models.placing.engine_table import build_runner, engine_named
from specctl.models.placing.memory import device_memory
from specctl.models.placing.placement import named_devices
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, locate_predictor, mismatch, require_kind
from specctl.models.running.around import NarrowRunner
from specctl.models.running.engines import EngineSettings, checked, fixed_width
from specctl.models.running.pair import Pair, in_a_row
from specctl.models.running.rules.generation_rules import prompt_rules_in
from specctl.models.running.rules.ruled import RuledRunner
from specctl.models.running.rules.token_rules import config_rules
from specctl.models.running.slot import Slot
from specctl.models.running.threads import choose, share_of
from specctl.processes.cores import CoreTime
from specctl.profile.schema import DraftTable, ModelTable, Profile


def load_pair(
    profile: Profile,
    *,
    with_drafts: bool = True,
    drafts: Sequence[ModelTable] | None = None,
    above: Sequence[int | None] = (),
    heads: Sequence[Sequence[str]] | None = None,
    with_predictors: bool = True,
    on_foreign_predictor: Callable[[str], None] | None = None,
    engines: EngineSettings | None = None,
    measured: bool = True,
    torch_weights: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Pair:
    """Load every model of a profile, and choose with how many threads passes on the CPU run in this process.

    Args:
        profile: names the models.
        with_drafts: whether to load the profile's drafts.
        drafts: tables of the drafts to load instead of the profile's, in the order of `Pair.drafts`.
        above: as in `Pair`, for ``drafts``.
        heads: for each of ``drafts`` the names of the heads to load, instead of the head in its table.
        with_predictors: whether to load the heads in the drafts' tables.
        on_foreign_head: called with a warning if a head was trained on another draft's weights; without it, such a head
            is an error.
        engines: how forward passes run; by default as set in the profile.
        measured: whether to measure with how many threads decoding is fastest, where nobody chose; what trains
            networks is faster with all of them, and repeats bit for bit only with the same number.
        torch_weights: whether the models that onnxruntime runs keep their weights in torch too; without it, only those
            that a draft head or a check reads do.
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
    tables = model_tables(profile)[: None if with_drafts else 1]
    if drafts is not None:
        tables = [tables[0], *(("draft", table) for table in drafts)]
    wanted = [own_heads(table) if with_predictors else [] for _, table in tables[1:]] if heads is None else heads
    levels = [Level(role, table, names) for (role, table), names in zip(tables, [[], *wanted], strict=True)]
    above = tuple(above or in_a_row(len(levels) - 1))
    # All that can be told without weights, before the first of them are loaded, which may take minutes.
    gpus = [named_devices(one.table) for one in levels if one.table.has_files]
    devices = device_memory(None if None in gpus else {name for each in gpus for name in each or ()})
    levels = find_all(levels, above, devices, settings.engine)
    files = [one.found.checkpoint for one in loading_order(levels) if one.found is not None]
    for told in dict.fromkeys(map(download_note, files)):
        if told is not None:
            settings.notice(told)
    if profile.generation_config:
        require_supported_rules(files[-1])
    for name in chain.from_iterable(wanted):
        locate_predictor(name)
    levels = load_found(levels, above, progress)
    target = levels[0].model
    assert target is not None, "the target is no draft head"
    tokenizer = load_tokenizer(profile.target)
    vocabulary = check_vocabulary(tokenizer, tokenizer, target.vocabulary, target.vocabulary)
    tokenizers = {0: tokenizer}
    for place, one in enumerate(levels[1:], start=1):
        if one.model is not None:
            tokenizers[place] = load_tokenizer(one.table, role=one.role)
            verifies = place - 1 in above
            levels[place] = one = translated(one, tokenizer, tokenizers[place], vocabulary, verifies=verifies)
            if one.tokens is not None:
                settings.notice(notice_of(one.role, one.table, one.tokens))
    eos = eos_ids(target.model, tokenizer)
    require_own_tokenizers(levels, above)
    for one in levels[1:]:
        if one.network is not None:
            write_fewer(one.network, one.table, tokenizer, vocabulary, eos)
    for told in large_drafts([one.network for one in levels], above, [one.role for one in levels]):
        settings.notice(told)
    # Before any pass is compiled or any session is made: both keep the number of threads that they began with.
    models = [one.model for one in levels if one.model is not None]
    whole = not any(model.sharding for model in models)
    setting = profile.threads if whole else share_of(profile.threads, profile.target.shards or 1)
    threads = choose(setting, [one.model for one in models] if measured and whole else (), vocabulary, began)
    settings = replace(settings, most_threads=threads.free if threads.milliseconds else None)
    made = assemble(
        levels,
        above,
        vocabulary,
        settings,
        torch_weights=torch_weights,
        on_foreign_predictor=on_foreign_predictor,
        progress=progress,
    )
    for place, own in tokenizers.items():
        model, found = made.levels[place].model, made.levels[place].found
        if model is not None and found is not None:
            keep_known(model, made.bare if place == 0 else made.drafts[place - 1].bare, own, found.checkpoint)
    runners, prompt_rules = [made.target, *made.drafts], dict[str, object]()
    if profile.generation_config and target.model.generation_config is not None:
        config = target.model.generation_config
        prompt_rules = prompt_rules_in(config)
        rules = [config_rules(config, eos, vocabulary, runner.device) for runner in runners]
        runners = [
            runner if own is None or one.network is None or runner.writes_text else RuledRunner(runner, own)
            for one, runner, own in zip(levels, runners, rules, strict=True)
        ]
    return Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos,
        context=runners[0].context,
        models=tuple(one.model.model for one in made.levels if one.model is not None),
        named_predictors=made.named_predictors,
        above=above,
        threads=threads.by_engine(made.bare),
        vocabulary=vocabulary,
        prompt_rules=prompt_rules,
    )


@dataclass(frozen=True, slots=True)
class Assembled:
    """Runners around the models of a target and its drafts.

    Attributes:
        levels: from the target down, each with the model that its runner has.
        bare: the target's runner, without others around it.
        target: what verifies.
        drafts: as in `Pair`.
        named_predictors: as in `Pair`.
    """

    levels: Sequence[Level]
    bare: Slot
    target: Slot
    drafts: tuple[Slot, ...]
    named_predictors: tuple[dict[str, TrainedPredictor], ...]


def assemble(
    levels: Sequence[Level],
    above: Sequence[int | None],
    vocabulary: int,
    settings: EngineSettings,
    *,
    torch_weights: bool = True,
    on_foreign_predictor: Callable[[str], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Assembled:
    """Make the runners of a target and its drafts, and let each draft head read the states of its verifier.

    Args:
        levels: from the target down, loaded.
        above: as in `Pair`.
        vocabulary: V, as wide as the logits of all runners; those of a model with fewer rows are filled up.
        settings: how passes run; its ``check`` is for the target.
        torch_weights, on_foreign_head, progress: as in `load_pair`.

    Raises:
        ModelError: a model cannot run on the engine, a head cannot be loaded, or what the target makes of a text
            depends on the passes in which it reads it.
    """
    target = levels[0].model
    assert target is not None, "the target is no draft head"
    checks = settings.check or untested(target.model)
    files = levels[0].found
    needed = {0} if checks and (files is None or files.rounding is None) else set()
    for one, upper in zip(levels[1:], above, strict=True):
        if one.network is not None and one.model is None:
            needed.add(0 if upper is None else upper + 1)
    check_model(target, files, vocabulary)
    levels, runners = list(levels), list[Slot]()
    for place, level in enumerate(levels):
        verifier = reader_of(runners, above[place - 1]).bare if place else None
        if place and level.model is not None and level.model.sharding is None:
            check_model(level.model, level.found, level.model.vocabulary, drafts=True)
        levels[place], runner = _runner(level, vocabulary, settings, verifier, keeps=torch_weights or place in needed)
        found = levels[place].model
        if place and found is not None and place - 1 not in above:
            runner = in_parallel(runner, found.model.config, vocabulary, found.name)
        runners.append(runner)
    whole, target, bare = target, levels[0].model, runners[0]
    assert target is not None, "the target is no draft head"
    if target is not whole:  # onnxruntime cannot run it as it is quantised there, and torch quantises it otherwise
        check_model(target, files, vocabulary)
    verifier = fixed_width(bare, target.model) if settings.deterministic else bare
    if checks and files is not None:
        verifier = checked_runner(verifier, bare, target, files, vocabulary)
    elif checks:
        verifier = checked(verifier, target.model, vocabulary, target.name)
    runners[0] = verifier
    for runner, upper in zip(runners[1:], above, strict=True):
        if runner.reads_states:
            reader_of(runners, upper).watch(runner.layers)
    named: list[dict[str, TrainedPredictor]] = []
    for level, runner in zip(levels[1:], runners[1:], strict=True):
        loading: dict[str, TrainedPredictor] = {}
        for name in level.heads if level.network is not None else ():
            progress(name)
            head = _load_predictor(level, name, on_foreign_predictor)
            loading[name] = head if isinstance(head, DiscoPredictor) else head.to(runner.device)
        named.append(loading)
    return Assembled(levels, bare, verifier, tuple(runners[1:]), tuple(named))


def _runner(
    level: Level, vocabulary: int, settings: EngineSettings, verifier: Slot | None, *, keeps: bool
) -> tuple[Level, Slot]:
    """A level's runner, and the level as that runs it; ``verifier`` is the runner above it, if there is one."""
    model = level.network
    if model is None:
        return level, runner_without_files(level.table, vocabulary)
    if not isinstance(model, LoadedModel):
        from specctl.models.loading.head_engines import build_head_runner

        return level, build_head_runner(model.head, vocabulary, model.name, settings, verifier)
    own = vocabulary if level.tokens is None else level.tokens.draft.whole
    if level.found is None:
        runner = build_runner(model.model, own, model.name, settings)
    else:
        model, runner = model_runner(level.found, model, own, settings, keeps=keeps)
    if level.tokens is not None:
        runner = own_text_runner(runner, level.tokens)
    elif model.vocabulary < vocabulary:
        runner = NarrowRunner(runner, model.vocabulary, vocabulary)
    return replace(level, network=model), runner


def own_heads(table: ModelTable) -> list[str]:
    """The head that a draft's table names, of a kind that its policy reads."""
    if not isinstance(table, DraftTable) or table.head is None:
        return []
    require_kind(locate_predictor(table.head), table.policy)
    return [table.head]


def _load_predictor(level: Level, name: str, on_foreign: Callable[[str], None] | None) -> TrainedPredictor:
    checkpoint = locate_predictor(name)
    assert level.network is not None, "a lookup has no states"
    head = checkpoint.load(level.network.hidden_size)
    if level.found is not None and (reason := mismatch(checkpoint, level.found.checkpoint)):
        if on_foreign is None:
            hint = "Train a head on this draft with `specctl train-head`, or use this one with --foreign-head."
            raise ModelError(f"{reason}.", hint)
        on_foreign(f"{reason}; its predictions may be far off")
    return head
