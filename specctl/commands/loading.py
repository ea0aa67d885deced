"""Loads a profile's models for a command, here or in replicas. Torch is imported when a function runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from specctl.commands.flags import Replication, warn
from specctl.errors import UsageError
from specctl.profile.schema import IN_TARGET
from specctl.terminal.output import print_message

if TYPE_CHECKING:
    from specctl.decoding.answers import Answerer
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.jsonl import Record
    from specctl.models.running.pair import Pair
    from specctl.observing.record_stream import Watch
    from specctl.policies import Signal
    from specctl.policies.setting import TreeSize
    from specctl.profile import Profile
    from specctl.profile.schema import DraftTable, ModelTable
    from specctl.serving.served import Served
    from specctl.terminal.progress import TerminalProgress
    from specctl.text_engine.engine import TextEngine, Writer
    from specctl.text_engine.processes import ProcessEngine
    from specctl.text_engine.row_count import Batch


def load(
    profile: "Profile",
    progress: "TerminalProgress",
    *,
    expected_tokens: int = 0,
    drafts: "Sequence[ModelTable] | None" = None,
    above: Sequence[int | None] = (),
    heads: Sequence[Sequence[str]] | None = None,
    with_predictors: bool = True,
    foreign_head: bool = False,
    tree: "TreeSize | Literal['profile'] | None" = "profile",
    longest: int | None = None,
    quiet: bool = False,
    torch_weights: bool = False,
    models: bool = True,
) -> "Pair":
    """Load the pair of a profile; compile or capture its passes if the profile asks for it.

    Args:
        profile: the models and the way their passes run.
        progress: shows what is loaded.
        expected_tokens: number of tokens to generate in all, 0 if unknown; decides whether compiling pays.
        drafts, above, heads, with_predictors: see `load_pair`.
        foreign_head: use heads that were trained on another draft, with a warning.
        tree: the size of draft trees, None for chains, or ``"profile"`` for the profile's value.
        longest: the most tokens drafted in a round; None for the profile's value.
        quiet: show only warnings.
        torch_weights: see `load_pair`: whether the transformers models run too.
        models: see `load_pair`.
    """
    from specctl.terminal.progress import note

    if tree == "profile":
        tree = profile.draft.own_setting.tree if profile.draft is not None else None
    if longest is None:
        longest = profile.draft.setting.longest_draft if profile.draft is not None else 0
    with progress.doing("starting") as show:
        from specctl.decoding.prompt_format import PromptFormat
        from specctl.models.loading.assembly import load_pair
        from specctl.models.running.engines import EngineSettings

        notice: Any = (lambda _: None) if quiet else (lambda text: note(progress.console, text))
        engines = replace(EngineSettings.of(profile, expected_tokens, notice, show), trees=tree is not None)
        pair = load_pair(
            profile,
            drafts=drafts,
            above=above,
            heads=heads,
            with_predictors=with_predictors,
            on_foreign_predictor=warn if foreign_head else None,
            engines=engines,
            torch_weights=torch_weights,
            models=models,
            progress=lambda what: show(f"loading {what}"),
        )
        if pair.threads is not None and pair.threads.warning is not None:
            warn(pair.threads.warning)
        for role, runner in (("target", pair.target), *(("draft", draft) for draft in pair.drafts[:1])):
            if tree is not None and (why := runner.no_trees):
                notice(f"drafts are not trees: the {role} reads chains only, because {why}")
                break
        # On CUDA also without graphs, because the first pass of each kind loads libraries and kernels.
        if pair.preparing_seconds is not None or pair.target.device.type == "cuda":
            from specctl.decoding.warming import warm_up

            warm_up(pair, profile.sampling, tree=tree, longest=longest)
        if told := PromptFormat.of(pair.tokenizer, profile.prompt).note(profile.prompt):
            notice(told)
    return pair


PLACES = 16  # Questions sent to each replica at once if it chooses its own batch size


@contextmanager
def start_replicas(
    replication: Replication,
    profile: "Profile",
    maker: str,
    setup: Mapping[str, Any],
    progress: "TerminalProgress",
    expected_tokens: int | None = None,
    *,
    others: "Iterable[DraftTable]" = (),
    spare: bool = False,
    exclusive: bool = False,
    batch: "Batch" = 1,
    places: int | None = None,
    restarts: bool = False,
) -> "Iterator[TextEngine]":
    """Start replicas, and wait until the first of them is ready.

    Args:
        replication: the number of replicas and their place.
        profile: of the pair.
        maker: see `specctl.text_engine.job.Job`.
        setup: arguments of the job, without the profile and its share of the tokens.
        progress: shows that they are starting.
        expected_tokens: number of tokens to generate in all, 0 if unknown; None for a job that does not ask.
        others: further drafts and heads to load.
        spare: whether this process has loaded a pair itself; then it keeps its GPUs if there are others.
        exclusive: whether nothing may share a replica's devices, because it measures time.
        batch: the number of questions that each answers at once; its job receives the number too.
        places: the most questions sent to each at once; by default ``batch``.
        restarts: see `Job`.

    Raises:
        UsageError: they do not fit on this machine, or Ray is missing or cannot be reached.
        SpecctlError: the models cannot be loaded or found.
    """
    from specctl.text_engine.engine import wait_until_ready
    from specctl.text_engine.job import Job, Sources, gpus_here, gpus_needed, require_gpus, shares
    from specctl.text_engine.processes import ProcessEngine

    with progress.doing("reading the models' files"):
        sources = Sources.of(profile, others)

    def job(count: int) -> Job:
        shared: dict[str, Any] = {} if batch == 1 else {"batch": batch}
        if expected_tokens is not None:
            shared["expected_tokens"] = -(-expected_tokens // count)
        passing = frozenset({"expected_tokens", "quiet"})
        return Job(maker, {"profile": profile, **setup, **shared}, passing, sources, restarts)

    replicas: TextEngine
    if places is None:
        places = PLACES if batch == "auto" else batch
    if replication.cluster is not None:
        from specctl.text_engine.on_ray import RayEngine

        with progress.doing("connecting to Ray"):
            replicas = RayEngine.on(
                replication.cluster,
                replication.workers,
                profile,
                job,
                warn,
                replication.warm_seconds,
                exclusive=exclusive,
                places=places,
            )
    else:
        gpus = gpus_here()
        needed = gpus_needed(profile, len(gpus))
        if exclusive:
            require_gpus(profile, len(gpus))
        each = shares(replication.workers, profile, gpus[needed:] if spare and len(gpus) >= 2 * needed else gpus)
        if exclusive and not all(share.gpus and share.alone for share in each):
            raise UsageError(
                f"{len(each)} replicas would share {len(gpus)} GPUs, and times would be those of sharing",
                f"use --workers {max(1, len(gpus) // needed)}, or leave it out",
            )
        # One by one: replicas that share a GPU must see the memory taken before, and compile or fetch only once.
        one_by_one = not all(share.alone for share in each) or profile.compile is True
        environments = [share.environment for share in each]
        replicas = ProcessEngine(
            job(len(each)), environments, print_message, warn, one_by_one=one_by_one, places=places
        )
    with replicas:
        with progress.doing("starting replicas"):
            wait_until_ready(replicas)
        yield replicas


REPLICA = "specctl.commands.loading:replica"
"""The factory of replicas that answer records; see `specctl.text_engine.job.Job`."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A loaded pair with the settings for answering records."""

    pair: "Pair"  # loaded models
    profile: "Profile"  # their settings, with the draft in use
    prompts: "PromptFormat"  # makes prompts
    signals: "frozenset[Signal]"  # to record though no policy reads them
    traced: bool  # whether rounds are traced

    def answerer(self, pair: "Pair | None" = None) -> "Answerer":
        """A new answerer with fresh policies, for the pair or another one of the same models."""
        from specctl.decoding.answers import Answerer, NamedDrafters
        from specctl.decoding.session import Session

        pair = pair or self.pair
        drafters = NamedDrafters(pair, self.profile.draft, self.signals)
        session = Session(pair, None, keep_caches=self._keeps)

        def begin(record: "Record") -> None:
            session.drafter = drafters.of_record(record.data)

        return Answerer(session, self.prompts, self.profile.sampling, begin)

    def engine(self, asked: "Batch", records: int | None, watch: "Watch | None" = None) -> "TextEngine":
        """Answers records with the pair, several at once if that is requested or faster."""
        from specctl.observing.record_stream import record_writer
        from specctl.text_engine.here import HereEngine, Rows
        from specctl.text_engine.pair_rows import why_alone
        from specctl.text_engine.row_count import MOST, chosen_passes

        def writer(pair: "Pair") -> "Writer":
            return record_writer(partial(self.answerer, pair), traced=self.traced, watch=watch)

        def rows(asked: "Batch", records: int) -> Rows | None:
            limit = self.profile.sampling.max_new_tokens
            passes = chosen_passes(self.pair, asked, records, limit, settings, warn)
            return None if passes is None else Rows.over(self.pair, passes, in_row, warn, kept=self._keeps)

        def in_row(pair: "Pair", _: Callable[[], int]) -> "Writer":
            return writer(pair)

        settings = [] if self.profile.draft is None else [self.profile.draft.setting]
        if asked == "auto" and records is None and why_alone(self.pair, *settings) is None:
            return HereEngine(writer(self.pair), make=partial(rows, "auto"), places=MOST)
        found = rows(asked, records if records is not None else MOST if asked == "auto" else asked)
        return HereEngine(None if found is not None else writer(self.pair), found)

    @property
    def _keeps(self) -> bool:
        """Whether prefixes shared with earlier texts stay cached, which changes rounding."""
        return not self.profile.deterministic


def load_answering(
    profile: "Profile",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    traced: bool,
    foreign_head: bool,
    expected_tokens: int,
) -> Answering:
    """Load the models that the profile's policies use; with ``traced``, every available signal is recorded."""
    draft = profile.draft.at_work() if profile.draft is not None else None
    profile = profile.model_copy(update={"draft": draft})  # drafts that never run are not loaded
    with_predictors = traced or (draft is not None and draft.setting.needs_predictors)
    pair = load(
        profile,
        progress,
        expected_tokens=expected_tokens,
        with_predictors=with_predictors,
        foreign_head=foreign_head,
        quiet=quiet,
        models=False,
    )

    from specctl.decoding.composition import readable
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.policies import Signal

    signals = readable(pair) if traced else frozenset[Signal]()
    return Answering(pair, profile, PromptFormat.of(pair.tokenizer, profile.prompt), signals, traced)


def replica(
    *,
    number: int,
    profile: "Profile",
    quiet: bool,
    traced: bool,
    foreign_head: bool,
    expected_tokens: int,
    batch: "Batch" = 1,
) -> "TextEngine":
    """A replica of the pair: answers requests of `specctl.observing.record_stream`."""
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    quiet = quiet or number > 0
    silent = TerminalProgress(Console(stderr=True), False)
    loaded = load_answering(
        profile, silent, quiet=quiet, traced=traced, foreign_head=foreign_head, expected_tokens=expected_tokens
    )
    return loaded.engine(batch, None)


SERVED_REPLICA = "specctl.commands.loading:served_replica"
"""The factory of a server's replicas; see `specctl.text_engine.job.Job`."""


def load_served(
    profile: "Profile",
    name: str,
    batch: "Batch",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    foreign_head: bool,
    compiles: bool = False,
) -> "Served":
    """Load a pair, and find its batch size."""
    from specctl.serving.served import Served
    from specctl.text_engine.row_count import MOST, chosen_passes

    loaded = load_answering(profile, progress, quiet=quiet, traced=False, foreign_head=foreign_head, expected_tokens=0)
    pair, profile = loaded.pair, loaded.profile
    limit = profile.sampling.max_new_tokens
    settings = [] if profile.draft is None else [profile.draft.setting]
    with progress.doing("choosing how many texts are written at once"):
        passes = chosen_passes(pair, batch, MOST if batch == "auto" else batch, limit, settings, warn)
    return Served.here(pair, profile, name, passes, warn, compiles=compiles)


def may_run_on_llama(profile: "Profile") -> bool:
    """Whether llama.cpp may run one of the models: a GGUF file. It ends its process where it finds a fault.

    Raises:
        ModelError: there is no such model.
    """
    from specctl.models.files.checkpoint import locate
    from specctl.models.llama.library import package

    if profile.engine not in ("auto", "llama") or package() is None:
        return False
    files = [(table, key) for key, table in profile.models if table.has_files and table.model != IN_TARGET]
    return any(locate(table, key).weights is not None for table, key in files)


@contextmanager
def served_replicas(
    replication: Replication | None,
    profile: "Profile",
    name: str,
    batch: "Batch",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    foreign_head: bool,
) -> "Iterator[Served]":
    """Replicas of a pair that end with the block; without ``replication`` a single process.

    Raises:
        UsageError: they do not fit on this machine.
        ModelError: they cannot be loaded, or end while they load.
    """
    from functools import cache

    from specctl.errors import ModelError
    from specctl.models.files.tokenizer import Tokenizer
    from specctl.serving.served import Served
    from specctl.text_engine.job import ReplicaError
    from specctl.text_engine.row_count import MOST

    @cache
    def whole() -> Tokenizer:
        from specctl.models.files.checkpoint import locate
        from specctl.models.loading.file_models import find_tokenizer

        return find_tokenizer(locate(profile.target, "target"), profile.target, profile.engine)

    places = MOST if batch == "auto" else batch
    setup = {"quiet": quiet, "foreign_head": foreign_head, "name": name}
    try:
        with (
            _one_process({"profile": profile, "batch": batch, **setup}, places, progress)
            if replication is None
            else start_replicas(
                replication, profile, SERVED_REPLICA, setup, progress, batch=batch, places=places, restarts=True
            )
        ) as started:
            yield Served.by_workers(cast("ProcessEngine", started), profile, whole)
    except ReplicaError as error:
        fewer = (
            "Fewer --workers need" if replication is not None else "If memory ran out, a smaller model or --batch needs"
        )
        raise ModelError(error.message, f"{fewer} less memory.") from error


@contextmanager
def _one_process(setup: "Mapping[str, Any]", places: int, progress: "TerminalProgress") -> "Iterator[ProcessEngine]":
    """The process of a pair whose library may end it; it has the folder, the variables and the files of this one."""
    from specctl.text_engine.engine import wait_until_ready
    from specctl.text_engine.job import Job
    from specctl.text_engine.processes import ProcessEngine

    job = Job(SERVED_REPLICA, setup, restarts=True)
    with ProcessEngine(job, [{}], print_message, warn, places=places, name="the models' process") as started:
        with progress.doing("loading the models"):
            wait_until_ready(started)
        yield started


def served_replica(
    *, number: int, profile: "Profile", quiet: bool, foreign_head: bool, name: str, batch: "Batch" = 1
) -> "TextEngine":
    """A replica of the pair that writes a server's texts."""
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True), False)
    quiet = quiet or number > 0
    return load_served(profile, name, batch, silent, quiet=quiet, foreign_head=foreign_head, compiles=True).engine
