"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.commands.loading import load
from specctl.commands.options import (
    CategoryOption,
    DraftOption,
    ForceOption,
    InputOption,
    JsonOption,
    LimitOption,
    MaxNewTokensOption,
    ProfileOptions,
    QuietOption,
    SamplesOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    TargetOption,
    chosen_profile,
    chosen_prompts,
    sampling_flags,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from specctl.benchmark.plan import Plan
    from specctl.observing.field import Field
    from specctl.observing.results import RunSet
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite


def bench(
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
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="How many times to run every prompt.")] = 1,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Token limits; every prompt runs once with each.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="hf-constant|hf-heuristic|hf-confidence",
            help="Also measure transformers' own assisted generation on the same models; repeatable.",
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
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write each run here as soon as it ends. An existing file is replaced unless --resume.",
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
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare the speed of policies with each other and with the target alone, taking turns prompt by prompt."""
    from specctl.observing.results import read_results

    if from_ is not None:
        results = read_results(from_)
    else:
        if resume and output is None:
            raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")
        from rich.console import Console

        from specctl.benchmark.plan import Plan
        from specctl.observing.field import competing_drafts, field_of
        from specctl.profile import parse_policy
        from specctl.profile.schema import PolicyTable

        flags = sampling_flags(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        profiles = [chosen_profile(name, target, draft, set_, flags).profile for name in profile or (None,)]
        policies = [PolicyTable(**parse_policy(text)) for text in policy or []]
        competing = competing_drafts(profiles, policies)
        prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, profiles[0].sampling.seed)
        field = field_of(competing, peer or [])
        if oracle and profiles[0].sampling.temperature:
            raise UsageError("--oracle works only in greedy decoding", "leave it out, or add -t 0")
        plan = Plan(_lengths(lengths) or [profiles[0].sampling.max_new_tokens], repeats, oracle)
        console = Console(stderr=True, quiet=quiet)
        results = _run(profiles[0], field, prompts, plan, output, console, resume=resume, force=force)
    _show(results, report, spec_bench_out, json_)


def _lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise UsageError(f"--lengths {text} is not a list of positive numbers", "e.g. --lengths 128,256,512")
    return sorted(set(lengths))


def _run(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    plan: "Plan",
    output: Path | None,
    console: "Console",
    *,
    resume: bool,
    force: bool,
) -> "RunSet":
    """Load the models of all candidates and run the benchmark, with a table that fills in as runs finish."""
    from specctl.terminal.loading import TerminalProgress, note, resumable
    from specctl.terminal.progress import BenchProgress

    expected = len(suite.prompts) * len(field.candidates) * sum(plan.lengths) * plan.repeats
    pair = load(profile, console, expected_tokens=expected, drafts=field.drafts, heads=field.heads, force=force)

    from specctl.benchmark.run import run_benchmark
    from specctl.observing.results import BASELINE

    def watch(results: "RunSet", total: int) -> BenchProgress:
        labels = [candidate.label for candidate in results.header.candidates]
        return BenchProgress(console, labels, BASELINE, total, results.runs, not profile.sampling.temperature)

    progress = TerminalProgress(console)
    with resumable(console, output):
        results = run_benchmark(pair, profile, field, suite, plan, output, watch, progress, resume=resume)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"compiling and capturing took {seconds:.1f} s; no result includes this time")
    return results


def _show(results: "RunSet", report: Path | None, answers: Path | None, as_document: bool) -> None:
    from rich.console import Console

    from specctl.benchmark import tables
    from specctl.benchmark.digest import digest
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    whole = digest(results)
    if as_document:
        write_line(sys.stdout, tables.as_json(whole))
    else:
        print_tables(Console(), tables.tables(whole))
    written: list[Path] = []
    if report is not None:
        from specctl.benchmark.report import write_report

        written += write_report(whole, report)
    if answers is not None:
        from specctl.benchmark.spec_bench import write_answers

        written += write_answers(results, answers)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
