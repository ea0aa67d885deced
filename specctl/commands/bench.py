"""`specctl bench`: which policy is fastest on this pair and these prompts, by how much, and why."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from specctl.commands.loading import load
from specctl.commands.options import (
    CategoryOption,
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
    chosen_prompts,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.observing.entrants import Field
    from specctl.observing.results import Header, RunSet
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite


def bench(
    profile: ProfileOptions = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME:KEY=VALUE,...",
            help="A policy to run, in a hierarchy at its top draft; repeatable. none always runs.",
        ),
    ] = None,
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything so many times.")] = 1,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Run every prompt to each of these lengths.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="hf-constant|hf-heuristic|hf-confidence",
            help="transformers' own assisted generation on the same models; repeatable.",
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle", help="How near each policy comes to the best possible: of all, and of its signals (greedy)."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write every run here as soon as it ends.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the output file has and run only the rest.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    spec_bench_out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write answer files in Spec-Bench's own format here.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show earlier results; no model runs.")
    ] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure policies against each other and against the target alone, prompt by prompt in turn."""
    from specctl.observing.results import read_results

    if from_ is not None:
        results = read_results(from_)
    else:
        if resume and output is None:
            raise UsageError("--resume needs to know what is already there", "name the results file with --output FILE")
        from specctl.observing.entrants import contenders, field_of
        from specctl.profile import parse_policy, resolve
        from specctl.profile.schema import PolicyTable

        flags = {"sampling.max_new_tokens": max_new_tokens, "sampling.temperature": temperature, "sampling.seed": seed}
        profiles = [resolve(name, overrides=set_ or (), flags=flags).profile for name in profile or (None,)]
        policies = [PolicyTable(**parse_policy(text)) for text in policy or []]
        competing = contenders(profiles, policies)
        prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, profiles[0].sampling.seed)
        field = field_of(competing, peer or [])
        limits = _lengths(lengths) or [profiles[0].sampling.max_new_tokens]
        results = _run(profiles[0], field, prompts, limits, repeats, oracle, output, resume, quiet, force)
    _show(results, report, spec_bench_out, json_)


def _lengths(text: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise UsageError(f"--lengths {text} is not a list of numbers", "e.g. --lengths 128,256,512")
    return sorted(set(lengths))


def _run(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    lengths: list[int],
    repeats: int,
    oracle: bool,
    output: Path | None,
    resume: bool,
    quiet: bool,
    force: bool,
) -> "RunSet":
    from rich.console import Console

    from specctl.commands.streaming import open_output
    from specctl.files import drop_torn_line
    from specctl.observing.results import BASELINE, RESULTS, RunSet, read_results
    from specctl.terminal.loading import loading, note
    from specctl.terminal.progress import BenchProgress

    if oracle and profile.sampling.temperature:
        raise UsageError("--oracle is about greedy decoding", "leave it out, or add -t 0")
    entrants, drafts = field.entrants, field.drafts
    console = Console(stderr=True, quiet=quiet)
    expected = len(suite.prompts) * len(entrants) * sum(lengths) * repeats
    pair = load(profile, console, expected_tokens=expected, drafts=drafts, heads=field.heads, force=force)

    from specctl.observing.facts import describe

    names = [draft.model for draft in drafts] if len(drafts) > 1 else []
    header = describe(pair, profile, suite, entrants, lengths, repeats, oracle, names)
    results = RunSet(header)
    if resume and output is not None and output.exists():
        results = read_results(output)
        _require_same(results.header, header, output)
        drop_torn_line(output)

    from specctl.benchmark.bounds import find_bounds
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.observing.round_robin import RoundRobin

    with ExitStack() as stack:
        sink: IO[str] | None = None
        if output is not None:
            sink = stack.enter_context(open_output(str(output), append=bool(results.runs)))
            if not results.runs:
                RESULTS.append(sink, header)
        prompts = PromptFormat.of(pair.tokenizer, profile.prompt)

        def emit(record: object) -> None:
            if sink is not None:
                RESULTS.append(sink, record)

        runs = RoundRobin(pair, results, suite.prompts, profile.sampling, prompts, emit)
        total = len(suite.prompts) * len(entrants) * len(lengths) * repeats
        greedy = not profile.sampling.temperature
        labels = [entrant.label for entrant in entrants]
        with BenchProgress(console, labels, BASELINE, total, results.runs, greedy) as progress:
            for run in runs.run(before=progress.start):
                progress.add(run)
        if oracle:
            with loading(console, "working out the bounds"):
                find_bounds(pair, runs, suite.prompts, results, emit)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"compiling and capturing took {seconds:.1f} s, which no figure contains")
    return results


def _require_same(old: "Header", new: "Header", path: Path) -> None:
    """Refuse to mix two benchmarks in one file."""
    for name in ("profile", "suite", "sampling", "entrants", "lengths", "repeats"):
        if getattr(old, name) != getattr(new, name):
            raise UsageError(
                f"{path} holds another benchmark: its {name} differs",
                "resume with the same options, or start a new file",
            )


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
