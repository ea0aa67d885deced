"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.commands.grouped_command import But, grouped, option, require_unused
from specctl.commands.option_groups import FewSamplingOptions, PairOptions, RunOptions, ShowOptions
from specctl.commands.options import TemplateOption, complete_profile, warn, warn_never_stopping, warn_unused
from specctl.commands.prompt_options import PromptOptions
from specctl.commands.tasks.bench_results import show_comparison, show_results
from specctl.commands.tasks.benchmark_run import run_plan
from specctl.commands.tasks.command_files import open_report, spare_profile
from specctl.commands.tasks.replication import FewReplicaOptions
from specctl.commands.tasks.server_load_run import LoadOptions, run_load
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.observing.results import RunSet

OF_A_SERVER = (
    *("target", "api_key", "concurrency", "warm_up", "suite", "data", "input_", "limit", "category"),
    *("samples_per_category", "repeats", "max_new_tokens", "temperature", "seed", "chat", "output", "force"),
    *("json_", "progress", "quiet"),
)
"""Parameters that have an effect with --url."""


USUAL = (
    "profile target draft policy papers peer suite input_ limit max_new_tokens temperature details output report "
    "from_ json_ url"
)
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def bench(
    *,
    ctx: typer.Context,
    profile: list[str] | None = option(
        "Name or path of a profile; repeatable. Each adds its drafts and policies; all must have one target.",
        "--profile -p NAME",
        autocompletion=complete_profile,
    ),
    models: Annotated[PairOptions, But(("profile",))],
    policy: list[str] | None = option(
        "Measure this policy: svip:threshold=0.4; repeatable. Default: the profile's, constant, heuristic and "
        "cost-optimal. none, the target alone, always runs. In a hierarchy it stops the target's own draft.",
        "NAME[:K=V,...]",
    ),
    papers: bool = option(
        "Also measure the papers' policies, with their settings. Those that the pair can run, and transformers' "
        "assisted generation.",
        "--papers",
        default=False,
    ),
    tree: list[str] | None = option("Also measure every policy with dynamic trees of N tokens; repeatable.", "N"),
    run: RunOptions,
    replicas: FewReplicaOptions,
    prompts: PromptOptions,
    repeats: int = option("How many times to run every prompt.", "N", default=1, min=1),
    sampling: FewSamplingOptions,
    chat: TemplateOption = None,
    lengths: str | None = option("Token limits; every prompt runs once with each.", "N,N,..."),
    peer: list[str] | None = option(
        "Also measure another implementation, such as hf-heuristic; repeatable. hf-constant, hf-heuristic and "
        "hf-confidence are transformers' assisted generation on the same models. openvino, onnxruntime-genai and "
        "llama.cpp run in processes of their own; WAY is none, constant:5 (the default), confidence:0.4 or, with "
        "onnxruntime-genai, adaptive:2.",
        "PEER[:WAY]",
    ),
    counterpart: bool = option(
        "Beside transformers' peers, if specctl runs on a faster engine: measure the first policy eagerly too, as they "
        "run.",
        "--counterpart/--no-counterpart",
        default=True,
    ),
    peer_models: list[str] | None = option(
        "The pair's models in the peer's own format; python -m specctl.peers.convert writes them; repeatable.",
        "PEER=FOLDER",
    ),
    peer_program: list[str] | None = option(
        "The Python that has the peer's package, or llama.cpp's llama-server; repeatable. Default: this Python, or "
        "what is on the PATH.",
        "PEER=FILE",
    ),
    oracle: bool = option(
        "Compare each policy with the best possible one. Also with the best that reads only the draft's entropy and "
        "top probability. Greedy decoding only.",
        "--oracle",
        default=False,
    ),
    sync_ms: float = option(
        "With --oracle: how long two devices take to synchronise in each step, for the simulation of drafting in "
        "parallel.",
        "MS",
        default=0.0,
        min=0,
    ),
    details: bool = option("Show latency, drafting and costs too, not speed alone.", "--details", default=False),
    output: Path | None = option("Write each run here as soon as it ends.", "-o --output FILE"),
    resume: bool = option("Keep the runs in the output file; run only what is missing.", "--resume", default=False),
    report: Path | None = option("Write report.md, report.html and figures here.", "DIR"),
    spec_bench_out: Path | None = option("Write answer files in Spec-Bench's own format here.", "DIR"),
    from_: Path | None = option("Show the results of --output again; no model runs.", "--from FILE"),
    compare: tuple[Path, Path] | None = option(
        "Compare two results files of --output; no model runs. Only --json goes with it.", "A B"
    ),
    server: LoadOptions,
    show: Annotated[ShowOptions, But(("report",))],
) -> None:
    """Compare the speed of policies with each other and with the target alone, taking turns prompt by prompt.

    Examples:

    [cyan]specctl bench --target ./big --draft ./small -i prompts.jsonl --report report[/]

    [cyan]specctl bench --policy svip --policy cost-optimal --peer hf-heuristic --limit 20[/]

    [cyan]specctl bench --url http://localhost:8000 --concurrency 1,4[/]
    """
    if server.url is not None:
        require_unused(ctx, "url", "measures a server", but=OF_A_SERVER)
        with Outputs(force=run.force) as outputs:
            from specctl.profile.schema import SamplingTable

            prompts.read_by(outputs)
            suite = prompts.chosen(sampling.seed or 0)
            file = outputs.file("output", output)
            limit = sampling.max_new_tokens or SamplingTable().max_new_tokens
            temperature = sampling.temperature or 0.0
            settings = {"max_new_tokens": limit, "temperature": temperature, "seed": sampling.seed}
            run_load(server, models.target, suite, settings, chat, repeats, file, show)
        return
    server.require_url()
    if compare is not None:
        require_unused(ctx, "compare", "runs nothing", but=("json_", "quiet"))
        show_comparison(*compare, show.json_)
        return
    if from_ is not None:
        shown = ("details", "report", "spec_bench_out", "sync_ms", "force", "json_", "progress", "quiet")
        require_unused(ctx, "from_", "runs nothing", but=shown)
    from specctl.benchmark.spec_bench import ANSWER_FILES
    from specctl.observing.results import read_results

    batch, replication, show = replicas.rows or 1, replicas.replication, replace(show, report=report)
    if replication is not None and batch == "auto":
        raise UsageError("--batch auto may be another number in each replica", "give one, e.g. --batch 8")
    with Outputs(force=run.force) as outputs:
        prompts.read_by(outputs)
        outputs.reads("results", from_)
        if from_ is not None:
            open_report(outputs, report)
            outputs.folder("answers", spec_bench_out, ANSWER_FILES)
            show_results(read_results(from_), show, spec_bench_out, sync_ms, details=details)
            return
        if resume and output is None:
            raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")
        from specctl.benchmark.papers import runnable_papers
        from specctl.benchmark.plan import Plan
        from specctl.observing.candidates import candidates_of, competing_drafts, with_counterpart
        from specctl.peers.engines import launches, parse_peer, paths_by_peer
        from specctl.policies.tree_shape import parse_tree
        from specctl.profile import parse_policy
        from specctl.profile.schema import PolicyTable
        from specctl.profile.validation import require_models

        flags = {**sampling.flags, "prompt.chat": chat}
        found = [run.resolve(replace(models, profile=name), flags) for name in profile or (None,)]
        profiles = [each.profile for each in found]
        policies = [PolicyTable(**parse_policy(text)) for text in policy or []]
        competing = competing_drafts(profiles, policies, [parse_tree(text) for text in tree or []])
        warn_unused(found)
        warn_never_stopping(policy.setting for policy in policies)
        suite = prompts.chosen(profiles[0].sampling.seed)
        peers = [parse_peer(text) for text in peer or []]
        left_out = None
        if papers:
            able = runnable_papers(profiles[0], oracle=oracle)
            competing, peers, left_out = [*competing, *able.tables], [*peers, *able.peers], able.left_out
        folders = paths_by_peer("--peer-models", peer_models or [], peers)
        programs = paths_by_peer("--peer-program", peer_program or [], peers)
        candidates = candidates_of(competing, peers, launches(peers, folders, programs))
        if counterpart:
            candidates = with_counterpart(candidates)
        if candidates.launches and profiles[0].sampling.temperature:
            raise UsageError(
                f"{next(iter(candidates.launches))} is measured only in greedy decoding", "leave it out, or add -t 0"
            )
        if oracle and profiles[0].sampling.temperature:
            raise UsageError("--oracle works only in greedy decoding", "leave it out, or add -t 0")
        if oracle and candidates.tree is not None:
            raise UsageError("--oracle is a bound for chains", "leave it out, or the trees")
        if oracle:
            hint = "leave it out, or name a profile with a draft model first"
            require_models(candidates.drafts[:1], "--oracle", hint)
        if replication is not None and (oracle or candidates.launches):
            what = "--oracle" if oracle else f"--peer {next(iter(candidates.launches))}"
            raise UsageError(f"{what} needs all prompts on one device", "leave it out, or --workers")
        if len(candidates.all) == 1:
            warn(
                "there is nothing to compare the target with: name a draft with --draft MODEL "
                "(`specctl doctor --find-draft` lists some), or another implementation with --peer"
            )
        limits = _lengths(lengths) or [profiles[0].sampling.max_new_tokens]
        plan = Plan(profiles[0], candidates, suite, limits, repeats, oracle, left_out, batch)
        for each in found:
            spare_profile(outputs, each)
        file = outputs.file("output", output, resumed=resume)
        open_report(outputs, report)
        outputs.folder("answers", spec_bench_out, ANSWER_FILES)

        def finish(results: "RunSet") -> None:
            show_results(results, show, spec_bench_out, sync_ms, details=details)

        benchmark = partial(run_plan, plan, file, show.bars(), stopped=finish)
        finish(benchmark(foreign_head=run.foreign_head, replication=replication))


def _lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise UsageError(f"--lengths {text} is not a list of positive numbers", "e.g. --lengths 128,256,512")
    return sorted(set(lengths))
