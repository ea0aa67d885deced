"""A target and its drafts, loaded, with matching vocabularies."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.vocabulary import check_vocabulary
from specctl.models.loading.fileless_drafts import Places
from specctl.models.loading.kept_model import keep_known
from specctl.models.loading.model import LoadedModel, eos_ids, load_tokenizer, model_tables
from specctl.models.loading.model_runners import checked_runner, model_runner
from specctl.models.loading.profile_models import find_all, load_found
from specctl.models.loading.proportion import large_drafts
from specctl.models.passes.recurrent_state import untested
from specctl.models.placing.absent import download_note
from specctl.models.placing.architecture import require_supported_rules
from specctl.models.placing.engine_table import engine_named
from specctl.models.placing.memory import device_memory
from specctl.models.placing.placement import named_devices
from specctl.models.predictors.disco_head import DiscoHead
from specctl.models.predictors.head_checkpoint import locate_head, mismatch, require_kind
from specctl.models.predictors.trained_heads import TrainedHead
from specctl.models.running.engines import EngineSettings, fixed_width
from specctl.models.running.pair import Pair, in_a_row
from specctl.models.running.rounding import require_one_function
from specctl.models.running.ruled import RuledRunner
from specctl.models.running.runner import Runner
from specctl.models.running.threads import choose, share_of
from specctl.models.running.token_rules import TokenRules
from specctl.processes.cores import CoreTime
from specctl.profile.schema import DraftTable, ModelTable, Profile

if TYPE_CHECKING:
    from specctl.models.loading.head_loading import LoadedHead


def load_pair(
    profile: Profile,
    *,
    with_drafts: bool = True,
    drafts: Sequence[ModelTable] | None = None,
    above: Sequence[int | None] = (),
    heads: Sequence[Sequence[str]] | None = None,
    with_heads: bool = True,
    on_foreign_head: Callable[[str], None] | None = None,
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
        with_heads: whether to load the heads in the drafts' tables.
        on_foreign_head: called with a warning if a head was trained on another draft's weights; without it, such a head
            is an error.
        engines: how forward passes run; by default as set in the profile.
        measured: whether to measure with how many threads decoding is fastest, where nobody chose; what trains
            networks is faster with all of them, and repeats bit for bit only with the same number.
        torch_weights: whether the models that onnxruntime runs keep their weights in torch too; without it, only those
            that a draft head or a check reads do.
        progress: called with the name of each model and head before it is loaded.

    Raises:
        ModelError: a model cannot be loaded, does not fit, has another tokenizer than the target, or cannot run on the
            chosen engine; or a head cannot be loaded, was trained on another draft, or is of a kind that its policy
            does not read.
    """
    began = CoreTime.now()
    settings = engines or EngineSettings.of(profile)
    engine_named(settings.engine).require()
    tables = model_tables(profile)[-1:]
    if drafts is not None:
        # The target comes last: if it is spread over devices, it takes the remaining memory.
        tables = [*(("draft", table) for table in reversed(drafts)), *tables]
    elif with_drafts:
        tables = model_tables(profile)
    wanted = [_own_heads(table) if with_heads else [] for _, table in tables[-2::-1]] if heads is None else heads
    # Drafts without files are left out here and take their places at the end.
    places = Places([table for _, table in tables[-2::-1]])
    all_above = above or in_a_row(len(tables) - 1)
    above = places.above(all_above)
    wanted = [wanted[index] for index in places.loaded]
    tables = [(role, table) for role, table in tables if table.has_files]
    # All that can be told without weights, before the first of them are loaded, which may take minutes.
    gpus = [named_devices(table) for _, table in tables]
    devices = device_memory(None if None in gpus else {name for each in gpus for name in each or ()})
    found = find_all(tables, above, devices, settings.engine)
    for told in dict.fromkeys(map(download_note, (one.checkpoint for one in found))):
        if told is not None:
            settings.notice(told)
    if profile.generation_config:
        require_supported_rules(found[-1].checkpoint)
    for name in chain.from_iterable(wanted):
        locate_head(name)
    networks = load_found(found, above, progress)
    target = networks[0]
    assert isinstance(target, LoadedModel), "the target is no draft head"
    tokenizer = load_tokenizer(profile.target)
    vocabulary = check_vocabulary(tokenizer, tokenizer, target.vocabulary, target.vocabulary)
    tokenizers = [tokenizer]
    for (role, table), draft in zip(tables[:-1], networks[:0:-1], strict=True):
        tokenizers.insert(1, tokenizer)
        if isinstance(draft, LoadedModel):
            tokenizers[1] = load_tokenizer(table, role=role)
            check_vocabulary(tokenizer, tokenizers[1], target.vocabulary, draft.vocabulary)
    for told in large_drafts(networks, above, [role for role, _ in tables[::-1]]):
        settings.notice(told)
    # Before any pass is compiled or any session is made: both keep the number of threads that they began with.
    whole = not any(isinstance(one, LoadedModel) and one.sharding for one in networks)
    setting = profile.threads if whole else share_of(profile.threads, profile.target.shards or 1)
    threads = choose(setting, _models(networks) if measured and whole else (), vocabulary, began)
    settings = replace(settings, most_threads=threads.free if threads.milliseconds else None)
    checks = settings.check or untested(target.model)
    needed = {0} if checks and found[-1].rounding is None else set()
    needed |= {0 if upper is None else upper + 1 for one, upper in zip(found[-2::-1], above, strict=True) if one.head}
    runners: list[Runner] = []
    for index, (network, one) in enumerate(zip(networks, found[::-1], strict=True)):
        if isinstance(network, LoadedModel):
            asked = replace(settings, trees=settings.draft_trees) if index else settings
            model, runner = model_runner(one, network, vocabulary, asked, keeps=torch_weights or index in needed)
            networks[index] = model
            runners.append(runner)
            keep_known(model, runner, tokenizers[index], one.checkpoint)
        else:
            from specctl.models.loading.head_engines import build_head_runner

            runners.append(build_head_runner(network.head, vocabulary, network.name, settings))
    target, bare = networks[0], runners[0]
    assert isinstance(target, LoadedModel), "the target is no draft head"
    require_one_function(bare, target.model, vocabulary, target.name)
    if settings.deterministic:
        runners[0] = fixed_width(runners[0], target.model)
    if checks:
        runners[0] = checked_runner(runners[0], bare, target, found[-1], vocabulary)
    for runner, upper in zip(runners[1:], above, strict=True):
        if runner.reads_states:
            runners[0 if upper is None else upper + 1].watch(runner.layers)
    eos = eos_ids(target.model, tokenizer)
    if profile.generation_config and target.model.generation_config is not None:
        rules = [TokenRules.of(target.model.generation_config, eos, vocabulary, runner.device) for runner in runners]
        if rules[0].active:
            runners = [RuledRunner(runner, own) for runner, own in zip(runners, rules, strict=True)]
    named: list[dict[str, TrainedHead]] = []
    for one, draft, runner, names in zip(found[-2::-1], networks[1:], runners[1:], wanted, strict=True):
        loading: dict[str, TrainedHead] = {}
        for name in names:
            progress(name)
            head = _load_head(one.checkpoint, name, draft, on_foreign_head)
            loading[name] = head if isinstance(head, DiscoHead) else head.to(runner.device)
        named.append(loading)
    pair = Pair(
        target=runners[0],
        drafts=tuple(runners[1:]),
        tokenizer=tokenizer,
        eos=eos,
        context=min(runner.context for runner in runners),
        models=_models(networks),
        named_heads=tuple(named),
        above=tuple(above),
        threads=threads.by_engine(bare),
        vocabulary=vocabulary,
    )
    return places.filled(pair, all_above, vocabulary)


def _models(networks: "Sequence[LoadedModel | LoadedHead]") -> tuple[PreTrainedModel, ...]:
    """The models among what was loaded."""
    return tuple(network.model for network in networks if isinstance(network, LoadedModel))


def _own_heads(table: ModelTable) -> list[str]:
    if not isinstance(table, DraftTable) or table.head is None:
        return []
    require_kind(locate_head(table.head), table.policy)
    return [table.head]


def _load_head(
    of: Checkpoint, name: str, draft: "LoadedModel | LoadedHead", on_foreign: Callable[[str], None] | None
) -> TrainedHead:
    checkpoint = locate_head(name)
    head = checkpoint.load(draft.hidden_size)
    if reason := mismatch(checkpoint, of):
        if on_foreign is None:
            hint = "Train a head on this draft with `specctl train-head`, or use this one with --foreign-head."
            raise ModelError(f"{reason}.", hint)
        on_foreign(f"{reason}; its predictions may be far off")
    return head
