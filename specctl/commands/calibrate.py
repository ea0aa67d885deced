"""`specctl calibrate`: the fastest policy and threshold for this pair, this machine and these prompts."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specctl.commands.loading import load
from specctl.commands.options import (
    CategoryOption,
    DraftOption,
    ForceOption,
    InputOption,
    JsonOption,
    MaxNewTokensOption,
    ProfileOption,
    QuietOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    TargetOption,
    chosen_profile,
    chosen_prompts,
    sampling_flags,
    warn,
)
from specctl.errors import ProfileError, UsageError

if TYPE_CHECKING:
    from specctl.calibration.live_check import Measured
    from specctl.calibration.search import Calibration
    from specctl.models.loading.pair import Pair
    from specctl.profile import ResolvedProfile
    from specctl.replay.costs import CostTable
    from specctl.replay.trace_files import TraceSet


def calibrate(
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME|all",
            help="Policy to calibrate. Default: the profile's. In a hierarchy it applies to every draft, "
            "or name one for each draft with commas, the target's own draft first.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="PATH",
            help="A trained head to try besides the profile's own, or the folder of train-head --sweep; repeatable. "
            "Without --policy, specdec++ is calibrated.",
        ),
    ] = None,
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    category: CategoryOption = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Prompts that choose the setting; the same number is held out to report on.")
    ] = 8,
    grid: Annotated[
        Literal["paper", "dense"],
        typer.Option(help="Values to try: those of the papers, or fine steps over every setting."),
    ] = "dense",
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the calibrated profile here.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of the run here; an interrupted run continues from it."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Search in an earlier trace instead of recording one.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Run the chosen setting live and compare with the prediction.")
    ] = True,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the stopping policy and threshold that are fastest on this pair, this machine and these prompts.

    The models run once. Every setting is then replayed exactly on what they wrote, and its time is predicted from costs
    measured on this machine. Half of the prompts choose the setting, the other half report its speed.
    """
    from rich.console import Console

    from specctl.calibration.contest import contest, heads_among, heads_in
    from specctl.calibration.earlier_trace import require_depth, require_same_pair
    from specctl.calibration.search import search
    from specctl.policies import SIGNALS
    from specctl.prompts.suites import sample
    from specctl.replay.play import replayable
    from specctl.replay.trace_files import read_traces
    from specctl.terminal.loading import TerminalProgress, resumable

    if trace is not None and from_ is not None:
        raise UsageError("--trace and --from exclude each other", "leave one of them out")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already", "choose another name, or remove it first")
    flags = sampling_flags(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    given = heads_in(head or [])
    try:
        resolved = chosen_profile(profile, target, draft, set_, flags)
    except ProfileError:
        if not given:
            raise
        # The profile's policy may need a head that only --head names.
        resolved = chosen_profile(profile, target, draft, set_, {**flags, "draft.head": given[0]})
    own = resolved.profile
    if own.draft is None:
        raise UsageError("the profile has no draft to calibrate", "name one with --draft or in the profile")
    heads = heads_among(given, own.draft)
    drafting = own.draft.model_copy(update={"head": heads[0] if heads else own.draft.head})
    own = own.model_copy(update={"draft": drafting})
    traces: TraceSet | None = None
    if from_ is not None:
        traces = read_traces(from_)
        require_same_pair(traces.header, own, heads, from_)
    asked = contest(drafting, policy, grid, heads, set(SIGNALS if traces is None else traces.header.signals))
    if from_ is not None and traces is not None:
        require_depth(traces.header, asked, from_)
    replays_old = replayable(asked.old, sampled=own.sampling.temperature > 0)
    if not replays_old:
        warn(
            "the current setting cannot be replayed (keep_trigger = false on a middle draft while sampling); "
            "it is only measured live"
        )
    console = Console(stderr=True, quiet=quiet)
    progress = TerminalProgress(console)
    pair: Pair | None = None
    if traces is None or verify:
        pair = load(own, console, heads=[heads] if heads else None, force=force)
    if traces is None:
        assert pair is not None
        from specctl.replay.collecting import collect_traces

        whole = chosen_prompts(suite, data, input_, None, category, None, own.sampling.seed)
        prompts = sample(whole, 2 * samples, own.sampling.seed)
        with resumable(console, trace, "the same command continues"):
            traces = collect_traces(pair, own, prompts, asked.depth, heads, trace, progress)
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    if not traces.traces or traces.costs is None:
        raise UsageError("no prompt could be run, so there is nothing to calibrate on")
    old = asked.old if replays_old else None
    with progress.counting("settings", asked.most(old)) as advance:
        found = search(traces, asked.candidates, old, traces.costs, asked.also_ranked, advance, space=asked.space)
    measured: list[Measured] = []
    if verify and pair is not None:
        from specctl.calibration.live_check import check_live

        measured = check_live(pair, own, traces, found, asked.old, progress)
    _show(resolved, traces, found, traces.costs, measured, output, report, json_, quiet)
    if traces.failures:
        raise typer.Exit(1)


def _show(
    resolved: "ResolvedProfile",
    traces: "TraceSet",
    found: "Calibration",
    costs: "CostTable",
    measured: list["Measured"],
    output: Path | None,
    report: Path | None,
    as_document_: bool,
    quiet: bool,
) -> None:
    import shlex

    import tomli_w
    from rich.console import Console

    from specctl.calibration.calibrated import calibrated_profile, draft_table
    from specctl.calibration.tables import as_document, calibration_tables, verdict
    from specctl.files import write_line
    from specctl.profile import write_profile
    from specctl.reporting.console import print_tables

    recorded = traces.header.provenance
    facts = {
        "created": recorded["created"],
        "command": shlex.join(["specctl", *sys.argv[1:]]),
        "suite": recorded["suite"],
        "devices": recorded["devices"],
        "engines": recorded["engines"],
        "versions": recorded["versions"],
    }
    shown = calibration_tables(found, costs, measured)
    if as_document_:
        write_line(sys.stdout, {"provenance": facts, **as_document(found, costs, measured)})
    else:
        print_tables(Console(), shown)
        print(verdict(found))
        if output is None:
            drafts = len(resolved.profile.draft.levels) if resolved.profile.draft is not None else 1
            print(f"\n{tomli_w.dumps({'draft': draft_table(found.winner.score.setting, drafts)})}", end="")
    for warning in found.warnings:
        warn(warning)
    if output is not None:
        write_profile(output, calibrated_profile(resolved, found, costs, facts, output))
        if not quiet:
            print(f"wrote {output}; use it with: specctl generate -p {output}", file=sys.stderr)
    if report is not None:
        from specctl.calibration.figures import draw_calibration
        from specctl.reporting.document import write_document

        paths = write_document(
            "Calibration", shown, draw_calibration(found), {"Verdict": verdict(found), **facts}, report
        )
        for path in paths if not quiet else []:
            print(f"wrote {path}", file=sys.stderr)
