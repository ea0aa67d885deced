"""`specctl calibrate`: the right policy and threshold for this pair, this machine and these prompts, in one pass."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl.commands.loading import load
from specctl.commands.options import (
    CategoryOption,
    ForceOption,
    InputOption,
    JsonOption,
    MaxNewTokensOption,
    ProfileOption,
    QuietOption,
    SetOption,
    SuiteDataOption,
    SuiteOption,
    chosen_prompts,
    warn,
)
from specctl.errors import ProfileError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from specctl.calibration.contest import Contest
    from specctl.calibration.live_check import Measured
    from specctl.calibration.search import Calibration
    from specctl.models.loading.pair import Pair
    from specctl.policies import Setting
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.costs import CostTable
    from specctl.replay.trace_files import TraceHeader, TraceSet


def calibrate(
    profile: ProfileOption = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME|all",
            help="Whose settings to find; without it, the profile's own. In a hierarchy at every level, or a name for "
            "each with commas, the target's own draft first.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="PATH",
            help="A head of the draft to choose beside the profile's own, or a folder of them, as train-head --sweep "
            "leaves one; may be repeated. Without --policy, for specdec++.",
        ),
    ] = None,
    set_: SetOption = None,
    suite: SuiteOption = None,
    data: SuiteDataOption = None,
    input_: InputOption = None,
    category: CategoryOption = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Prompts to choose on; as many again are held out to report on.")
    ] = 8,
    grid: Annotated[
        Literal["paper", "dense"], typer.Option(help="The papers' own values, or fine steps over every setting.")
    ] = "dense",
    max_new_tokens: MaxNewTokensOption = None,
    temperature: Annotated[
        float | None, typer.Option("-t", "--temperature", min=0, help="0 is greedy decoding.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the calibrated profile here.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of the run here; a stopped run continues from it."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Search in an earlier trace; no prompt is run.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Run the chosen setting live against the prediction.")
    ] = True,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None,
    force: ForceOption = False,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the stopping policy and threshold that are fastest on this pair, this machine and these prompts.

    The models run once. Every setting is then replayed on what they said, exactly, and priced with this machine's
    measured costs; half of the prompts choose, the other half report.
    """
    from rich.console import Console

    from specctl.calibration.contest import contest, heads_among, heads_in
    from specctl.policies import SIGNALS
    from specctl.profile import resolve
    from specctl.prompts.suites import sample
    from specctl.replay.play import replayable
    from specctl.replay.trace_files import read_traces

    if trace is not None and from_ is not None:
        raise UsageError("--from reads what --trace writes", "give one of them")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already", "choose another name, or remove it first")
    flags = {"sampling.max_new_tokens": max_new_tokens, "sampling.temperature": temperature, "sampling.seed": seed}
    given = heads_in(head or [])
    try:
        resolved = resolve(profile, overrides=set_ or (), flags=flags)
    except ProfileError:
        if not given:
            raise
        # Its policy may need a head and be given one here.
        resolved = resolve(profile, overrides=set_ or (), flags={**flags, "draft.head": given[0]})
    own = resolved.profile
    if own.draft is None:
        raise UsageError("the profile has no draft to calibrate", "name one with [draft] in the profile or --set")
    heads = heads_among(given, own.draft)
    draft = own.draft.model_copy(update={"head": heads[0] if heads else own.draft.head})
    own = own.model_copy(update={"draft": draft})
    kept: TraceSet | None = None
    if from_ is not None:
        kept = read_traces(from_)
        _require_same(kept.header, own, heads, from_)
    asked = contest(draft, policy, grid, heads, set(SIGNALS if kept is None else kept.header.signals))
    if kept is not None and asked.depth > kept.header.depth:
        raise UsageError(
            f"{from_} was recorded for drafts of {kept.header.depth} tokens, and these settings draft {asked.depth}",
            "record a new trace, or search other policies or --grid paper",
        )
    replays_old = replayable(asked.old, sampled=own.sampling.temperature > 0)
    if not replays_old:
        warn(
            "the profile's own setting is only run, not replayed: when sampling, the text behind a trigger that a "
            "middle draft drops (keep_trigger = false) would be drawn anew"
        )
    console = Console(stderr=True, quiet=quiet)
    pair: Pair | None = None
    if kept is None or verify:
        pair = load(own, console, heads=[heads] if heads else None, force=force)
    traces = kept
    if traces is None:
        assert pair is not None
        whole = chosen_prompts(suite, data, input_, None, category, None, own.sampling.seed)
        prompts = sample(whole, 2 * samples, own.sampling.seed)
        traces = _trace(pair, own, prompts, asked.depth, heads, trace, console)
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    if not traces.traces or traces.costs is None:
        raise UsageError("no prompt could be run, so there is nothing to calibrate on")
    found, costs = _search(traces, asked, replays_old, console)
    measured = _verify(pair, own, traces, found, asked.old, console) if verify and pair is not None else []
    _show(resolved, traces, found, costs, measured, output, report, json_, quiet)
    if traces.failures:
        raise typer.Exit(1)


def _trace(
    pair: "Pair",
    profile: "Profile",
    suite: "Suite",
    depth: int,
    heads: list[str],
    path: Path | None,
    console: "Console",
) -> "TraceSet":
    """Run the prompts that the file does not have yet, and measure the costs."""
    from dataclasses import replace

    from specctl.calibration.grids import grid
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.decoding.sampling import Sampling
    from specctl.decoding.session import Session, build_drafter, readable
    from specctl.errors import RecordError
    from specctl.files import drop_torn_line
    from specctl.observing.facts import describe
    from specctl.replay.metering import PASSES, measure
    from specctl.replay.recording import Collection
    from specctl.replay.trace_files import TRACES, Failure, TracedPrompt, TraceHeader, TraceSet, read_traces
    from specctl.terminal.loading import TerminalProgress

    assert profile.draft is not None
    facts = describe(pair, profile, suite, [], [profile.sampling.max_new_tokens], 1, False)
    names = ("created", "profile", "suite", "sampling", "devices", "engines", "versions")
    header = TraceHeader(
        depth, sorted(pair.eos), sorted(readable(pair)), {name: getattr(facts, name) for name in names}, heads
    )
    traces = TraceSet(header)
    if path is not None and path.exists():
        traces = read_traces(path)
        same = replace(header, provenance={**header.provenance, "created": traces.header.provenance.get("created")})
        if traces.header != same:
            raise UsageError(
                f"{path} holds the trace of another calibration", "start a new file, or search in it with --from"
            )
        drop_torn_line(path)
    fresh = not traces.traces and not traces.failures
    with ExitStack() as stack:
        from specctl.commands.streaming import open_output

        sink: IO[str] | None = None
        if path is not None:
            sink = stack.enter_context(open_output(str(path), append=not fresh))
            if fresh:
                TRACES.append(sink, header)

        def add(record: object) -> None:
            traces.add(record)
            if sink is not None:
                TRACES.append(sink, record)

        session = Session(pair, build_drafter(pair, profile.draft.setting))
        prompts = PromptFormat.of(pair.tokenizer, profile.prompt)
        collection = Collection(pair, session, profile.sampling, prompts, depth)
        advance = stack.enter_context(TerminalProgress(console).counting("prompts", len(suite.prompts)))
        rests: list[list[float]] = []
        for number, prompt in enumerate(suite.prompts):
            if prompt.id not in traces.records and prompt.id not in traces.failures:
                try:
                    answered, rest = collection.record(prompt, number + 1)
                except RecordError as error:
                    add(Failure(prompt.id, error.message))
                else:
                    record = {"category": prompt.category, "data": prompt.data, "chat": prompt.chat}
                    add(TracedPrompt(prompt.id, record, answered))
                    rests += rest
            advance()
        if traces.traces:
            table = profile.sampling
            ends = [trace.prompt_tokens + len(trace.tokens) for trace in traces.traces]
            starts = [trace.prompt_tokens for trace in traces.traces]
            contexts = [min(starts), (min(starts) + max(ends)) // 2, max(ends)]
            if not rests:
                # All was in the file: one prompt more tells what a round takes beside its forward passes.
                first = next(prompt for prompt in suite.prompts if prompt.id in traces.records)
                rests = collection.record(first, 1)[1]
            costs = measure(
                pair,
                contexts,
                depth,
                {one.signals for one in grid("all", "paper", readable(pair))},
                Sampling.of(table),
                _middles(rests, len(pair.drafts)),
                stack.enter_context(TerminalProgress(console).counting("costs", PASSES * len(pair.drafts))),
            )
            add(costs)
    return traces


def _middles(rests: Sequence[Sequence[float]], levels: int) -> list[float]:
    """The median of each level; of one that was idle that of the level above."""
    from statistics import median

    found: list[float] = []
    for level in range(levels):
        values = [rest[level] for rest in rests if level < len(rest)]
        found.append(median(values) if values else found[-1])
    return found


def _require_same(header: "TraceHeader", profile: "Profile", heads: list[str], path: Path) -> None:
    """A trace tells about one pair, one way of running it and one way of sampling."""
    recorded, asked = header.provenance["profile"], profile.model_dump(mode="json", exclude_none=True)
    for (place, was), (_, now) in zip_longest(_models(recorded), _models(asked), fillvalue=("draft", {})):
        if was.get("model") != now.get("model"):
            raise UsageError(
                f"{path} was recorded with {was.get('model')} as {place}, not {now.get('model')}",
                "name the profile that it was recorded with",
            )
        listens = "accept_prob" in header.signals and now.get("head") is not None
        if listens and now["head"] not in (was.get("head"), *header.heads):
            raise UsageError(
                f"{path} was recorded with {was.get('head')} as the draft's head, not {now['head']}",
                "record a new trace",
            )
    if missing := [name for name in heads if name not in (recorded["draft"].get("head"), *header.heads)]:
        raise UsageError(f"{path} was recorded without the head {missing[0]}", "record a new trace")
    for key in ("engine", "compile", "deterministic"):
        if recorded[key] != asked[key]:
            raise UsageError(f"{path} was recorded with another {key}", "its costs are other ones: record a new trace")
    for key in ("temperature", "top_k", "top_p", "min_p"):
        if header.provenance["sampling"][key] != asked["sampling"][key]:
            raise UsageError(f"{path} was recorded with another {key}", "record a new trace")


def _models(profile: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables of a profile's models, by role, the target's first."""
    tables = [("target", profile["target"])]
    below = profile.get("draft")
    while below is not None:
        tables.append(("draft", below))
        below = below.get("draft")
    return tables


def _search(
    traces: "TraceSet", asked: "Contest", replays_old: bool, console: "Console"
) -> tuple["Calibration", "CostTable"]:
    from specctl.calibration.search import contestants, search
    from specctl.terminal.loading import TerminalProgress

    assert traces.costs is not None
    costs = traces.costs
    old = asked.old if replays_old else None
    most = len(contestants(asked.candidates, old, asked.rivals)) + (asked.space.most if asked.space is not None else 0)
    with TerminalProgress(console).counting("settings", most) as advance:
        found = search(traces, asked.candidates, old, costs, asked.rivals, advance, space=asked.space)
    return found, costs


def _verify(
    pair: "Pair", profile: "Profile", traces: "TraceSet", found: "Calibration", old: "Setting", console: "Console"
) -> list["Measured"]:
    """Run the chosen setting, the profile's own, the best constant and none on the prompts reported on."""
    from dataclasses import replace

    from specctl.calibration.live_check import verify
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.observing.entrants import field_of
    from specctl.observing.facts import describe
    from specctl.policies import NONE
    from specctl.prompts.suites import Suite, SuitePrompt
    from specctl.terminal.loading import TerminalProgress

    assert profile.draft is not None
    constant = found.ranked("constant")
    names = {found.winner.score.setting, old, NONE} | ({constant.score.setting} if constant else set())
    predicted: dict[Setting, float | None] = {
        entry.score.setting: entry.score.tokens_per_second for entry in found.ranking if entry.score.setting in names
    }
    predicted.setdefault(old, None)
    prompts = [SuitePrompt(identity, **traces.records[identity]) for identity in found.reported_on]
    drafting = [one for one in predicted if one != NONE]
    field = field_of([profile.draft.stopped_by(one) for one in drafting], ())
    entrants = field.entrants
    # An entrant names its head only where they differ in it; else the first one is meant.
    own = [
        {names[0]: named[names[0]], **named} if names else {}
        for named, names in zip(pair.named_heads, field.heads, strict=False)
    ]
    pair = replace(pair, named_heads=(*own, *pair.named_heads[len(own) :]))
    labels = {one: entrant.label for one, entrant in zip([NONE, *drafting], entrants, strict=True)}
    limits = [profile.sampling.max_new_tokens]
    models = [level.model for level in profile.draft.levels] if len(pair.drafts) > 1 else []
    header = describe(pair, profile, Suite("", tuple(prompts), ""), entrants, limits, 1, False, models)
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    with TerminalProgress(console).counting("verifying", len(prompts) * len(entrants)) as advance:
        return verify(pair, header, prompts, profile.sampling, prompt_format, predicted, labels, advance)


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
