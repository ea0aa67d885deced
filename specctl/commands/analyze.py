"""`specctl analyze`: what a draft's signals say about acceptance on this pair and these prompts."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.options import JsonOption, ProfileOption, QuietOption, SetOption
from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.benchmark.readings import Judged, Readings
    from specctl.benchmark.suites import Suite
    from specctl.profile import Profile


def analyze(
    profile: ProfileOption = None,
    set_: SetOption = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Analyse what `generate --trace` wrote; no model runs. Repeatable."),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="Named prompts to run; without it, the embedded ones.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A local copy of the suite, in the data set's own format.")
    ] = None,
    input_: Annotated[
        str | None, typer.Option("-i", "--input", metavar="FILE|-", help="Records to run instead of a suite.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    category: Annotated[list[str] | None, typer.Option(help="Only prompts of this category; repeatable.")] = None,
    samples_per_category: Annotated[
        int | None, typer.Option(min=1, help="A seeded sample of so many prompts of each category.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("-n", "--max-new-tokens", min=1, help="Most tokens to generate for a prompt.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Look at what a policy has to go by: draft entropy, acceptance, and the bounds between them.

    The target writes an answer to every prompt, then target and draft read it. With --trace the verdicts of an earlier
    run are looked at instead.
    """
    if trace:
        unused = {
            "--set": set_,
            "--suite": suite,
            "--data": data,
            "--input": input_,
            "--limit": limit,
            "--category": category,
            "--samples-per-category": samples_per_category,
            "--max-new-tokens": max_new_tokens,
            "--temperature": temperature,
            "--seed": seed,
        }
        if given := [name for name, value in unused.items() if value not in (None, [])]:
            raise UsageError(f"--trace runs no prompt, so {given[0]} has no meaning", "leave one of them out")
        from specctl.benchmark.traces import read_traces

        _show(
            read_traces(trace),
            None,
            None,
            {"command": _command(), "traces": list(map(str, trace))},
            report,
            json_,
            quiet,
        )
        return
    if input_ is not None and (suite is not None or data is not None):
        raise UsageError("--input takes the place of a suite", "leave out --suite and --data, or --input")

    from specctl.benchmark.suites import EMBEDDED, load_records, load_suite
    from specctl.profile import resolve

    given_flags = {
        "sampling.max_new_tokens": max_new_tokens,
        "sampling.temperature": temperature,
        "sampling.seed": seed,
    }
    flags = {key: value for key, value in given_flags.items() if value is not None}
    resolved = resolve(profile, overrides=set_ or (), flags=flags).profile
    if resolved.draft is None:
        raise UsageError("the profile has no draft to analyse", "name one with [draft] in the profile or --set")
    chosen: dict[str, Any] = {
        "limit": limit,
        "categories": category or [],
        "samples_per_category": samples_per_category,
        "seed": resolved.sampling.seed,
    }
    if input_ is not None:
        prompts = load_records(sys.stdin.buffer if input_ == "-" else Path(input_), **chosen)
    else:
        prompts = load_suite(suite or EMBEDDED, data=data, **chosen)
    readings, facts, failures = _read(resolved, prompts, quiet)
    for identity, reason in failures.items():
        print(f"warning: prompt {identity} is left out: {reason}", file=sys.stderr)
    if readings is None:
        raise UsageError("no prompt led to a token that could be analysed")
    from specctl.benchmark.readings import judge

    sources = {"command": _command(), **facts, "left_out": failures}
    _show(judge(readings), readings, resolved.sampling.temperature == 0, sources, report, json_, quiet)
    if failures:
        raise typer.Exit(1)


def _command() -> str:
    return shlex.join(["specctl", *sys.argv[1:]])


def _read(profile: "Profile", suite: "Suite", quiet: bool) -> tuple["Readings | None", dict[str, Any], dict[str, str]]:
    """Run the prompts; gives what was read, where it comes from, and the prompts that failed with their reasons."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from specctl.terminal.loading import loading, note

    console = Console(stderr=True, quiet=quiet)
    with loading(console, "starting") as say:
        from specctl.benchmark.provenance import describe
        from specctl.benchmark.teacher_forcing import ReadingRun
        from specctl.decoding.prompts import PromptFormat
        from specctl.models.engines import EngineSettings
        from specctl.models.pair import load_pair

        engines = EngineSettings.of(profile, notice=lambda text: note(console, text), progress=say)
        pair = load_pair(profile, progress=lambda what: say(f"loading {what}"), engines=engines)
        header = describe(pair, profile, suite, [], [profile.sampling.max_new_tokens], 1, False)
    run = ReadingRun(pair, profile.sampling, PromptFormat(pair.tokenizer, profile.prompt.chat, profile.prompt.system))
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_interactive
    ) as progress:
        for _ in progress.track(run.run(suite.prompts), total=len(suite.prompts)):
            pass
    names = ("created", "suite", "sampling", "devices", "versions", "profile")
    return run.readings(), {name: getattr(header, name) for name in names}, run.failures


def _show(
    judged: "Judged",
    readings: "Readings | None",
    greedy: bool | None,
    sources: dict[str, Any],
    report: Path | None,
    as_document: bool,
    quiet: bool,
) -> None:
    from rich.console import Console

    from specctl.benchmark.analysis import analyse, plain
    from specctl.benchmark.analysis_tables import analysis_tables, distributions
    from specctl.jsonl import write_line
    from specctl.terminal.bench import print_tables

    analysis = analyse(judged, readings)
    shown = analysis_tables(analysis, greedy=greedy)
    if as_document:
        about = {} if greedy is None else {"distributions": distributions(greedy)}
        source = "traces" if readings is None else "models"
        write_line(sys.stdout, {"provenance": sources, "source": source, **about, **plain(analysis)})
    else:
        print_tables(Console(), shown)
    if report is not None:
        from specctl.benchmark.analysis_figures import draw_analysis
        from specctl.benchmark.analysis_report import write_analysis

        for path in write_analysis(shown, draw_analysis(analysis, judged, readings), sources, report):
            if not quiet:
                print(f"wrote {path}", file=sys.stderr)
