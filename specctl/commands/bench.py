"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.flags import (
    FewReplicaOptions,
    FewSamplingOptions,
    PairOptions,
    PromptOptions,
    Replication,
    RunOptions,
    ServerOptions,
    ShowOptions,
    TemplateOption,
    complete_profile,
    open_report,
    protect_profile,
    warn,
    warn_never_stopping,
    warn_unused,
)
from specctl.commands.loading import load, start_replicas
from specctl.commands.requests import But, grouped, option, require_unused
from specctl.errors import SpecctlError, UsageError
from specctl.outputs import OutputFile, Outputs
from specctl.terminal.output import write_out, write_sentence

if TYPE_CHECKING:
    from specctl.benchmark.plan import Plan
    from specctl.benchmark.server_load import LoadHeader, ServerLoad
    from specctl.models.running.pair import Pair
    from specctl.observing.candidates import Candidates
    from specctl.observing.results import RunSet
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.terminal.progress import TerminalProgress
    from specctl.text_engine.engine import Answer, TextEngine
    from specctl.text_engine.row_count import Batch


@dataclass(frozen=True, slots=True)
class LoadOptions(ServerOptions):
    """The load on a server."""

    concurrency: str | None = option(
        "With --url: concurrent requests, as a list; every prompt is sent once per value. Default: 1.", "N[,N...]"
    )
    warm_up: int | None = option(
        "With --url: warm-up requests before each concurrency, which are not counted. Default: 1.", "N", min=0
    )

    @property
    def levels(self) -> list[int]:
        """The concurrencies, in order; raises UsageError."""
        try:
            found = [int(part) for part in (self.concurrency or "1").split(",")]
        except ValueError:
            found = [0]
        if any(one < 1 for one in found):
            raise UsageError(f"--concurrency {self.concurrency} is not a list of positive numbers", "e.g. 1,4,16")
        return list(dict.fromkeys(found))

    def require_url(self) -> None:
        """Raise UsageError where an option has no effect without a server."""
        for name, value in (("--concurrency", self.concurrency), ("--warm-up", self.warm_up)):
            if value is not None:
                raise UsageError(f"{name} applies only to a server", "name one with --url, or leave it out")


OF_A_SERVER = (
    *("target", "api_key", "concurrency", "warm_up", "suite", "data", "input_", "limit", "category"),
    *("samples_per_category", "repeats", "max_new_tokens", "temperature", "seed", "chat", "output", "force"),
    *("json_", "progress", "quiet"),
)
"""Parameters that have an effect with --url."""


OF_RESULTS = ("details", "report", "spec_bench_out", "sync_ms", "force", "json_", "progress", "quiet")
"""Parameters that have an effect with --from."""
USUAL = (
    "profile target draft policy papers peer suite input_ limit max_new_tokens temperature details output report "
    "from_ json_ url"
)
"""The parameters that --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The flags of `specctl bench`; UsageError for conflicting ones."""

    ctx: typer.Context
    profile: list[str] | None = option(
        "Name or path of a profile; repeatable. Each adds its drafts and policies; all must have one target.",
        "--profile -p NAME",
        autocompletion=complete_profile,
    )
    models: Annotated[PairOptions, But(("profile",))]
    policy: list[str] | None = option(
        "Measure this policy: svip:threshold=0.4; repeatable. Default: the profile's, constant, heuristic and "
        "cost-optimal. none, the target alone, always runs. In a hierarchy it stops the target's own draft.",
        "NAME[:K=V,...]",
    )
    papers: bool = option(
        "Also measure the papers' policies, with their settings. Those that the pair can run, and transformers' "
        "assisted generation.",
        "--papers",
        default=False,
    )
    tree: list[str] | None = option("Also measure every policy with dynamic trees of N tokens; repeatable.", "N")
    run: RunOptions
    replicas: FewReplicaOptions
    prompts: PromptOptions
    repeats: int = option("Number of runs of every prompt.", "N", default=1, min=1)
    sampling: FewSamplingOptions
    chat: TemplateOption = None
    lengths: str | None = option("Token limits; every prompt runs once with each.", "N,N,...")
    peer: list[str] | None = option(
        "Also measure another implementation, such as hf-heuristic; repeatable. hf-constant, hf-heuristic and "
        "hf-confidence are transformers' assisted generation on the same models. openvino, onnxruntime-genai and "
        "llama.cpp run in processes of their own; WAY is none, constant:5 (the default), confidence:0.4 or, with "
        "onnxruntime-genai, adaptive:2.",
        "PEER[:WAY]",
    )
    counterpart: bool = option(
        "With transformers' peers, if specctl runs on a faster engine: measure the first policy eagerly too, as they "
        "run.",
        "--counterpart/--no-counterpart",
        default=True,
    )
    peer_models: list[str] | None = option(
        "The pair's models in the peer's own format; python -m specctl.peers.convert writes them; repeatable.",
        "PEER=FOLDER",
    )
    peer_program: list[str] | None = option(
        "The Python that has the peer's package, or llama.cpp's llama-server; repeatable. Default: this Python, or "
        "what is on the PATH.",
        "PEER=FILE",
    )
    oracle: bool = option(
        "Compare each policy with the best possible one. Also with the best that reads only the draft's entropy and "
        "top probability. Greedy decoding only.",
        "--oracle",
        default=False,
    )
    sync_ms: float = option(
        "With --oracle: how long two devices take to synchronise in each step, for the simulation of drafting in "
        "parallel.",
        "MS",
        default=0.0,
        min=0,
    )
    details: bool = option("Show latency, drafting and costs too, not speed alone.", "--details", default=False)
    output: Path | None = option("Write each run here as soon as it ends.", "-o --output FILE")
    resume: bool = option("Keep the runs in the output file; run only the missing ones.", "--resume", default=False)
    report: Path | None = option("Write report.md, report.html and figures here.", "DIR")
    spec_bench_out: Path | None = option("Write answer files in Spec-Bench's own format here.", "DIR")
    from_: Path | None = option("Show the results of --output again; no model runs.", "--from FILE")
    compare: tuple[Path, Path] | None = option(
        "Compare two results files of --output; no model runs. Only --json goes with it.", "A B"
    )
    server: LoadOptions
    show: Annotated[ShowOptions, But(("report",))]

    def __post_init__(self) -> None:
        if self.server.url is not None:
            require_unused(self.ctx, "url", "measures a server", but=OF_A_SERVER)
            _ = self.server.levels
            return
        self.server.require_url()
        if self.compare is not None:
            require_unused(self.ctx, "compare", "runs nothing", but=("json_", "quiet"))
        elif self.from_ is not None:
            require_unused(self.ctx, "from_", "runs nothing", but=OF_RESULTS)
        if self.replicas.replication is not None and self.batch == "auto":
            raise UsageError("--batch auto may be another number in each replica", "give one, e.g. --batch 8")
        if self.resume and self.output is None:
            raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")
        _ = self.limits

    @property
    def batch(self) -> "Batch":
        """The batch size."""
        return self.replicas.at_once or 1

    @property
    def limits(self) -> list[int]:
        """The token limits of --lengths, ascending; empty for the profile's."""
        try:
            found = [int(part) for part in self.lengths.split(",")] if self.lengths else []
        except ValueError:
            found = [0]
        if any(limit < 1 for limit in found):
            hint = "e.g. --lengths 128,256,512"
            raise UsageError(f"--lengths {self.lengths} is not a list of positive numbers", hint)
        return sorted(set(found))

    def resolve(self) -> "list[ResolvedProfile]":
        """Every profile with the flags applied."""
        flags = {**self.sampling.flags, "prompt.chat": self.chat}
        names = self.profile or (None,)
        return [self.run.resolve(replace(self.models, profile=name), flags) for name in names]

    def plan(self, found: "Sequence[ResolvedProfile]") -> "Plan":
        """The plan of the benchmark.

        Raises:
            UsageError: the flags ask for a measurement that is not possible.
        """
        from specctl.benchmark.papers import runnable_papers
        from specctl.benchmark.plan import Plan
        from specctl.observing.candidates import candidates_of, competing_drafts, with_counterpart
        from specctl.peers.engines import launches, parse_peer, paths_by_peer
        from specctl.policies.setting import parse_tree
        from specctl.profile import parse_policy
        from specctl.profile.schema import PolicyTable

        profiles = [each.profile for each in found]
        first = profiles[0]
        policies = [PolicyTable(**parse_policy(text)) for text in self.policy or []]
        competing = competing_drafts(profiles, policies, [parse_tree(text) for text in self.tree or []])
        warn_unused(found)
        warn_never_stopping(policy.setting for policy in policies)
        suite = self.prompts.chosen(first.sampling.seed)
        peers = [parse_peer(text) for text in self.peer or []]
        left_out = None
        if self.papers:
            able = runnable_papers(first, oracle=self.oracle)
            competing, peers, left_out = [*competing, *able.tables], [*peers, *able.peers], able.left_out
        folders = paths_by_peer("--peer-models", self.peer_models or [], peers)
        programs = paths_by_peer("--peer-program", self.peer_program or [], peers)
        candidates = candidates_of(competing, peers, launches(peers, folders, programs))
        if self.counterpart:
            candidates = with_counterpart(candidates)
        self._check(first, candidates)
        if len(candidates.all) == 1:
            warn(
                "there is nothing to compare the target with: name a draft with --draft MODEL "
                "(`specctl doctor --find-draft` lists some), or another implementation with --peer"
            )
        limits = self.limits or [first.sampling.max_new_tokens]
        return Plan(first, candidates, suite, limits, self.repeats, self.oracle, left_out, self.batch)

    def _check(self, first: "Profile", candidates: "Candidates") -> None:
        from specctl.profile.validation import require_models

        peer = next(iter(candidates.launches), None)
        if peer is not None and first.sampling.temperature:
            raise UsageError(f"{peer} is measured only in greedy decoding", "leave it out, or add -t 0")
        if self.oracle:
            if first.sampling.temperature:
                raise UsageError("--oracle works only in greedy decoding", "leave it out, or add -t 0")
            if candidates.tree is not None:
                raise UsageError("--oracle is a bound for chains", "leave it out, or the trees")
            hint = "leave it out, or name a profile with a draft model first"
            require_models(candidates.drafts[:1], "--oracle", hint)
        if self.replicas.replication is not None and (self.oracle or peer is not None):
            what = "--oracle" if self.oracle else f"--peer {peer}"
            raise UsageError(f"{what} needs all prompts on one device", "leave it out, or --workers")


@grouped(usual=USUAL)
def bench(request: BenchRequest) -> None:
    """Compare the speed of policies with each other and with the target alone, taking turns prompt by prompt.

    Examples:

    [cyan]specctl bench --target ./big --draft ./small -i prompts.jsonl --report report[/]

    [cyan]specctl bench --policy svip --policy cost-optimal --peer hf-heuristic --limit 20[/]

    [cyan]specctl bench --url http://localhost:8000 --concurrency 1,4[/]
    """
    if request.server.url is not None:
        _measure_server(request)
    elif request.compare is not None:
        _compare(*request.compare, request.show.json_)
    else:
        _run_or_read(request)


def _run_or_read(request: BenchRequest) -> None:
    from specctl.benchmark.spec_bench import ANSWER_FILES
    from specctl.observing.results import read_results

    with Outputs(force=request.run.force) as outputs:
        request.prompts.read_by(outputs)
        outputs.reads("results", request.from_)
        plan = None
        if request.from_ is None:
            found = request.resolve()
            plan = request.plan(found)
            for each in found:
                protect_profile(outputs, each)
        file = outputs.file("output", request.output, resumed=request.resume)
        open_report(outputs, request.report)
        outputs.folder("answers", request.spec_bench_out, ANSWER_FILES)
        if plan is not None:
            _show(_run(request, plan, file), request)
        elif request.from_ is not None:
            _show(read_results(request.from_), request)


def _compare(a: Path, b: Path, as_document: bool) -> None:
    """Print two results files compared, as tables or as one JSON document."""
    from rich.console import Console

    from specctl.benchmark.comparison import compare_files, comparison_json, comparison_tables
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    comparison = compare_files(a, b)
    if as_document:
        write_line(sys.stdout, comparison_json(comparison))
        return
    console = Console()
    print_tables(console, comparison_tables(comparison))
    if not console.is_terminal:
        write_out("")
    for compared in comparison.candidates:
        write_sentence(compared.verdict)


def _show(results: "RunSet", request: BenchRequest) -> None:
    """Print the tables and the verdict, or one JSON document; write the report and the answer files asked for."""
    from specctl.benchmark import report
    from specctl.benchmark.digest import digest, verdict

    whole = digest(results, request.sync_ms)
    tables = report.tables(whole) if request.details else report.brief_tables(whole)
    request.show.outcome(report.as_json(whole), tables, verdict(whole))
    written: list[Path] = []
    if request.report is not None:
        written += report.write_report(whole, request.report)
    if request.spec_bench_out is not None:
        from specctl.benchmark.spec_bench import write_answers

        written += write_answers(results, request.spec_bench_out)
    request.show.written(written)


REPLICA = "specctl.commands.bench:replica"
"""The factory of benchmarking replicas; see `specctl.text_engine.job.Job`."""


def _run(request: BenchRequest, plan: "Plan", output: OutputFile | None) -> "RunSet":
    """Load the models of all candidates and run them, with a table that fills in as runs finish."""
    from specctl.benchmark.papers import left_out_lines
    from specctl.benchmark.plan import require_same
    from specctl.benchmark.progress import BenchProgress
    from specctl.observing.results import RESULTS, read_results
    from specctl.terminal.progress import note, resumable

    progress, replication, foreign_head = request.show.bars(), request.replicas.replication, request.run.foreign_head
    console = progress.console
    earlier = None
    if output is not None and RESULTS.continues(output):
        earlier = read_results(output.path)
        require_same(earlier.header, plan, output.path)
    for line in left_out_lines(plan.papers or {}):
        note(console, line)
    begun: list[RunSet] = []

    def watch(results: "RunSet", total: int) -> BenchProgress:
        begun.append(results)
        return BenchProgress(progress, results, total)

    try:
        with ExitStack() as stack:
            if replication is not None:
                from specctl.benchmark.run import run_by_replicas

                start = _starter(replication, plan, progress, foreign_head=foreign_head)
                stack.enter_context(resumable(console, output and output.path))
                return run_by_replicas(start, plan, output, watch, earlier)
            from specctl.peers.process import PeerProcess

            processes = {
                label: stack.enter_context(PeerProcess(label, launch.command))
                for label, launch in plan.candidates.launches.items()
            }
            pair = _load(plan, plan.tokens, progress, foreign_head=foreign_head)

            from specctl.benchmark.run import run_benchmark

            stack.enter_context(resumable(console, output and output.path))
            results = run_benchmark(pair, plan, output, watch, progress, earlier, processes)
    except KeyboardInterrupt:
        if output is None:
            note(console, "interrupted")
        if begun and begun[0].runs:
            _show(begun[0], request)
        raise
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"preparing passes took {seconds:.1f} s; no result includes this time")
    return results


def _starter(
    replication: Replication, plan: "Plan", progress: "TerminalProgress", *, foreign_head: bool
) -> "Callable[[], AbstractContextManager[TextEngine]]":
    setup = {"plan": plan, "foreign_head": foreign_head}
    others = [
        table.model_copy(update={"head": head})
        for table, heads in zip(plan.candidates.drafts, plan.candidates.heads, strict=True)
        for head in (*heads, None)
    ]
    return partial(
        start_replicas, replication, plan.profile, REPLICA, setup, progress, plan.tokens, others=others, exclusive=True
    )


def replica(*, number: int, profile: "Profile", plan: "Plan", foreign_head: bool, expected_tokens: int) -> "Answer":
    """A replica for `specctl.benchmark.run.run_by_replicas`."""
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True, quiet=number > 0), False)
    plan = replace(plan, profile=profile)
    pair = _load(plan, expected_tokens, silent, foreign_head=foreign_head)

    from specctl.benchmark.run import benchmarking

    return benchmarking(pair, plan)


def _load(plan: "Plan", expected_tokens: int, progress: "TerminalProgress", *, foreign_head: bool) -> "Pair":
    from specctl.peers.engines import ASSISTED

    candidates = plan.candidates
    return load(
        plan.profile,
        progress,
        expected_tokens=expected_tokens,
        drafts=candidates.drafts,
        above=candidates.above,
        heads=candidates.heads,
        foreign_head=foreign_head,
        tree=candidates.tree,
        longest=max((one.setting.longest_draft for one in candidates.all if one.setting is not None), default=0),
        torch_weights=any(candidate.peer in ASSISTED for candidate in candidates.all),
    )


def _measure_server(request: BenchRequest) -> None:
    """Measure a server and show the results, also after Ctrl-C."""
    from specctl.profile.schema import SamplingTable

    settings = {
        "max_new_tokens": request.sampling.max_new_tokens or SamplingTable().max_new_tokens,
        "temperature": request.sampling.temperature or 0.0,
        "seed": request.sampling.seed,
    }
    with Outputs(force=request.run.force) as outputs:
        request.prompts.read_by(outputs)
        suite = request.prompts.chosen(request.sampling.seed or 0)
        _ask_server(request, suite, settings, outputs.file("output", request.output))


def _ask_server(request: BenchRequest, suite: "Suite", settings: dict[str, Any], file: OutputFile | None) -> None:
    from datetime import UTC, datetime

    from specctl.benchmark.server_load import LOAD, Asked, LoadHeader, ServerLoad, dialogues
    from specctl.remote import connected

    options, show = request.server, request.show
    assert options.url is not None
    levels = options.levels
    work = dialogues(suite, settings, request.chat) * request.repeats
    server = connected(options.url, options.api_key, request.models.target)
    header = LoadHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        url=server.url,
        model=server.model,
        concurrency=levels,
        suite={"name": suite.name, "sha256": suite.sha256, "count": len(suite.prompts)},
        settings={key: value for key, value in settings.items() if value is not None},
    )
    write = LOAD.writing(file, header)
    total = sum(max(1, len(one.turns)) for one in work) * len(levels)
    with show.bars().counting("requests", total) as advance:

        def on_end(asked: Asked) -> None:
            write(asked)
            advance(asked.tokens)

        load = ServerLoad(server, work, on_end)
        try:
            for concurrency in levels:
                load.run(concurrency, 1 if options.warm_up is None else options.warm_up)
        except KeyboardInterrupt:
            _show_load(header, load, total - sum(len(level.asked) for level in load.levels), show)
            raise
    _show_load(header, load, 0, show)
    failed = sum(sum(level.failures.values()) for level in load.levels)
    if failed:
        asked = sum(len(level.asked) for level in load.levels)
        raise SpecctlError(f"{failed} of {asked} requests failed")


def _show_load(header: "LoadHeader", load: "ServerLoad", missing: int, show: ShowOptions) -> None:

    from specctl.benchmark.server_load import load_json, load_tables

    levels = [level for level in load.levels if level.asked]
    show.outcome(load_json(header, levels, missing), load_tables(header, levels, missing) if levels else ())
