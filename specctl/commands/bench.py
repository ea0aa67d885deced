"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.commands.bench_results import show_comparison, show_results
from specctl.commands.benching import run_field
from specctl.commands.files import open_report, resolve_profile, spare_profile
from specctl.commands.options import (
    CategoryOption,
    CheckOption,
    DraftOption,
    EngineOption,
    ForceOption,
    ForeignHeadOption,
    InputOption,
    JsonOption,
    LimitOption,
    MaxNewTokensOption,
    ProfileOptions,
    ProgressOption,
    QuietOption,
    SamplesOption,
    SeedOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    TargetOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
    TrustOption,
    VerificationOption,
    chosen_prompts,
    sampling_flags,
)
from specctl.commands.replicating import ClusterOption, Replication, WorkersOption
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.observing.results import RunSet


def bench(
    ctx: typer.Context,
    profile: ProfileOptions = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME:KEY=VALUE,...",
            help="A stopping policy to measure; repeatable. In a hierarchy it applies to the target's own draft. "
            "The baseline none always runs.",
        ),
    ] = None,
    papers: Annotated[
        bool,
        typer.Option(
            "--papers",
            help="Also measure the policies of the papers with their papers' settings, and transformers' assisted "
            "generation, as far as the pair can run them.",
        ),
    ] = False,
    leaves: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|confidence|cost",
            help="Also measure every policy with these leaves beside its drafts; repeatable.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(metavar="N", help="Also measure every policy with dynamic trees of N tokens; repeatable."),
    ] = None,
    set_: SetOption = None,
    engine: EngineOption = None,
    threads: ThreadsOption = None,
    workers: WorkersOption = None,
    cluster: ClusterOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="How many times to run every prompt.")] = 1,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: TemperatureOption = None,
    verification: VerificationOption = None,
    seed: SeedOption = None,
    chat: TemplateOption = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Token limits; every prompt runs once with each.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER[:WAY[:VALUE]]",
            help="Also measure another implementation; repeatable. hf-constant, hf-heuristic, hf-confidence are "
            "transformers' assisted generation on the same models. openvino, onnxruntime-genai and llama.cpp run in "
            "processes of their own; WAY is none, constant:5 (the default), and confidence:0.4 or, with "
            "onnxruntime-genai, adaptive:2.",
        ),
    ] = None,
    counterpart: Annotated[
        bool,
        typer.Option(
            "--counterpart/--no-counterpart",
            help="With transformers' peers, where our passes run on a faster engine than theirs: measure the first "
            "policy eagerly too, as they run. Default: yes.",
        ),
    ] = True,
    peer_models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER=FOLDER",
            help="The pair's models in the peer's own format; python -m specctl.peers.convert writes them; repeatable.",
        ),
    ] = None,
    peer_program: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PEER=FILE",
            help="The Python that has the peer's package, or llama.cpp's llama-server; repeatable. Default: this "
            "Python, or what is on the PATH.",
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle",
            help="Compare each policy with the best possible one, and with the best that reads only the draft's "
            "entropy and top probability. Greedy decoding only.",
        ),
    ] = False,
    sync_ms: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MS",
            help="With --oracle: how long two devices take in each step to synchronise, where drafting in parallel is "
            "simulated.",
        ),
    ] = 0.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write each run here as soon as it ends.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs in the output file; run only what is missing.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    spec_bench_out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write answer files in Spec-Bench's own format here.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show the results of an earlier --output; no model runs."),
    ] = None,
    check: CheckOption = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="A B", help="Compare two results files of --output; no model runs. Takes only --json."
        ),
    ] = None,
    force: ForceOption = False,
    foreign_head: ForeignHeadOption = False,
    trust_remote_code: TrustOption = False,
    json_: JsonOption = False,
    progress: ProgressOption = None,
    quiet: QuietOption = False,
) -> None:
    """Compare the speed of policies with each other and with the target alone, taking turns prompt by prompt."""
    if compare is not None:
        _require_alone(ctx, "compare", "json_", "quiet")
        show_comparison(*compare, json_)
        return
    from specctl.benchmark.spec_bench import ANSWER_FILES
    from specctl.observing.results import read_results

    replication = Replication.of(workers, cluster, None)
    with Outputs(force=force) as outputs:
        outputs.reads("input", input_)
        outputs.reads("data", data)
        outputs.reads("results", from_)
        if from_ is not None:
            open_report(outputs, report)
            outputs.folder("answers", spec_bench_out, ANSWER_FILES)
            show_results(read_results(from_), report, spec_bench_out, json_, quiet, sync_ms)
            return
        if resume and output is None:
            raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")
        from rich.console import Console

        from specctl.benchmark.plan import Plan
        from specctl.benchmark.runnable_papers import lineup
        from specctl.observing.candidates import competing_drafts, field_of, with_counterpart
        from specctl.peers.launch import launches, paths_by_peer
        from specctl.peers.names import parse_peer
        from specctl.policies.leaf_rule import parse_leaves
        from specctl.policies.tree_shape import parse_tree
        from specctl.profile import parse_policy
        from specctl.profile.lookup_policies import require_models
        from specctl.profile.schema import PolicyTable
        from specctl.terminal.work_progress import TerminalProgress

        flags = sampling_flags(
            max_new_tokens=max_new_tokens, temperature=temperature, verification=verification, seed=seed
        )
        flags |= {"check": check or None, "engine": engine, "threads": threads, "prompt.chat": chat}
        found = [
            resolve_profile(name, set_, flags, target=target, draft=draft, trust_remote_code=trust_remote_code)
            for name in profile or (None,)
        ]
        profiles = [each.profile for each in found]
        policies = [PolicyTable(**parse_policy(text)) for text in policy or []]
        shapes = [parse_leaves(text) for text in leaves or []], [parse_tree(text) for text in tree or []]
        competing = competing_drafts(profiles, policies, *shapes)
        prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, profiles[0].sampling.seed)
        peers = [parse_peer(text) for text in peer or []]
        left_out = None
        if papers:
            line = lineup(profiles[0], oracle=oracle)
            competing, peers, left_out = [*competing, *line.tables], [*peers, *line.peers], line.left_out
        folders = paths_by_peer("--peer-models", peer_models or [], peers)
        programs = paths_by_peer("--peer-program", peer_program or [], peers)
        field = field_of(competing, peers, launches(peers, folders, programs))
        if counterpart:
            field = with_counterpart(field)
        if field.launches and profiles[0].sampling.temperature:
            raise UsageError(
                f"{next(iter(field.launches))} is measured only in greedy decoding", "leave it out, or add -t 0"
            )
        if oracle and profiles[0].sampling.temperature:
            raise UsageError("--oracle works only in greedy decoding", "leave it out, or add -t 0")
        if oracle and field.leaves:
            raise UsageError("--oracle is a bound for drafts without leaves", "leave it out, or the leaves")
        if oracle and field.tree is not None:
            raise UsageError("--oracle is a bound for chains", "leave it out, or the trees")
        if oracle:
            require_models(field.drafts[:1], "--oracle", "leave it out, or name a profile with a draft model first")
        if replication is not None and (oracle or field.launches):
            what = "--oracle" if oracle else f"--peer {next(iter(field.launches))}"
            raise UsageError(f"{what} needs all prompts on one device", "leave it out, or --workers")
        plan = Plan(_lengths(lengths) or [profiles[0].sampling.max_new_tokens], repeats, oracle, left_out)
        for each in found:
            spare_profile(outputs, each)
        file = outputs.file("output", output, resumed=resume)
        open_report(outputs, report)
        outputs.folder("answers", spec_bench_out, ANSWER_FILES)
        shown = TerminalProgress(Console(stderr=True, quiet=quiet), progress)

        def show(results: "RunSet") -> None:
            show_results(results, report, spec_bench_out, json_, quiet, sync_ms)

        show(
            run_field(
                profiles[0],
                field,
                prompts,
                plan,
                file,
                shown,
                foreign_head=foreign_head,
                stopped=show,
                replication=replication,
            )
        )


def _require_alone(ctx: typer.Context, option: str, *allowed: str) -> None:
    """Raise UsageError for options that would have no effect with ``option``."""
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    given = [name for name in ctx.params if (source := ctx.get_parameter_source(name)) and source.name == "COMMANDLINE"]
    if others := [flags[name] for name in given if name not in (option, *allowed)]:
        raise UsageError(f"{flags[option]} runs nothing, so {', '.join(others)} has no effect", "leave it out")


def _lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise UsageError(f"--lengths {text} is not a list of positive numbers", "e.g. --lengths 128,256,512")
    return sorted(set(lengths))
