"""`specctl analyze`: how well a draft's signals predict acceptance on this pair and these prompts."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    ProfileOption,
    QuietOption,
    SamplesOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    TargetOption,
    chosen_profile,
    chosen_prompts,
    sampling_flags,
    warn,
)
from specctl.errors import UsageError

if TYPE_CHECKING:
    from specctl.analysis.readings import Judged, Readings
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite


def analyze(
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    set_: SetOption = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="Analyse traces of generate or calibrate; no model runs."),
    ] = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    limit: LimitOption = None,
    category: CategoryOption = None,
    samples_per_category: SamplesOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how well the draft's signals predict acceptance, and the bounds between entropy and acceptance.

    The target answers every prompt, then target and draft both read the answer. With --from, the rounds or texts of
    earlier runs are analysed instead.
    """
    if from_:
        unused = {
            "--target": target,
            "--draft": draft,
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
            "--force": force or None,
        }
        if given := [name for name, value in unused.items() if value not in (None, [])]:
            raise UsageError(f"--from runs no prompt, so {given[0]} has no effect", "leave one of them out")
        from specctl.analysis.verdicts import read_traces

        _show(
            read_traces(from_),
            None,
            None,
            {"command": _command(), "traces": list(map(str, from_))},
            report,
            json_,
            quiet,
        )
        return
    flags = sampling_flags(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    resolved = chosen_profile(profile, target, draft, set_, flags).profile
    if resolved.draft is None:
        raise UsageError("the profile has no draft to analyse", "name one with --draft or in the profile")
    prompts = chosen_prompts(suite, data, input_, limit, category, samples_per_category, resolved.sampling.seed)
    readings, facts, failures = _read(resolved, prompts, quiet, force)
    for identity, reason in failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    if readings is None:
        raise UsageError("no prompt produced a token that can be analysed")
    from specctl.analysis.readings import judge

    sources = {"command": _command(), **facts, "left_out": failures}
    _show(judge(readings), readings, resolved.sampling.temperature == 0, sources, report, json_, quiet)
    if failures:
        raise typer.Exit(1)


def _command() -> str:
    return shlex.join(["specctl", *sys.argv[1:]])


def _read(
    profile: "Profile", suite: "Suite", quiet: bool, force: bool
) -> tuple["Readings | None", dict[str, Any], dict[str, str]]:
    """Run the prompts: readings (None without any), facts of the run, and by prompt id why a prompt failed."""
    from rich.console import Console

    from specctl.terminal.loading import TerminalProgress

    console = Console(stderr=True, quiet=quiet)
    # In a hierarchy only the draft that the target verifies is analysed.
    pair = load(profile, console, drafts=[profile.draft] if profile.draft is not None else [], force=force)

    from specctl.analysis.teacher_forcing import read_prompts
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.observing.facts import gather

    facts = gather(pair, profile, suite)
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    with TerminalProgress(console).counting("prompts", len(suite.prompts)) as advance:
        readings, failures = read_prompts(pair, suite.prompts, profile.sampling, prompt_format, advance)
    names = ("created", "suite", "sampling", "devices", "versions", "profile")
    return readings, {name: getattr(facts, name) for name in names}, failures


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

    from specctl.analysis.numbers import analyse
    from specctl.analysis.tables import analysis_tables, distributions
    from specctl.files import write_line
    from specctl.reporting.console import print_tables
    from specctl.reporting.plain import plain

    analysis = analyse(judged, readings)
    shown = analysis_tables(analysis, greedy=greedy)
    if as_document:
        about = {} if greedy is None else {"distributions": distributions(greedy)}
        source = "traces" if readings is None else "models"
        write_line(sys.stdout, {"provenance": sources, "source": source, **about, **plain(analysis)})
    else:
        print_tables(Console(), shown)
    if report is not None:
        from specctl.analysis.figures import draw_analysis
        from specctl.reporting.document import write_document

        for path in write_document(
            "Draft signals and acceptance", shown, draw_analysis(analysis, judged, readings), sources, report
        ):
            if not quiet:
                print(f"wrote {path}", file=sys.stderr)
