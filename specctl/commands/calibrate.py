"""`specctl calibrate`: the fastest policy and threshold for this pair, this machine and these prompts."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specctl.commands.flags import (
    REPLICAS,
    BareReplicaOptions,
    FewSamplingOptions,
    PairOptions,
    PromptOptions,
    Replication,
    RunOptions,
    ShowOptions,
    TemplateOption,
    batch_sizes,
    open_report,
    spare_profile,
    warn,
    warn_unused,
)
from specctl.commands.loading import load, start_replicas
from specctl.commands.requests import But, grouped, option
from specctl.errors import ProfileError, UsageError
from specctl.outputs import OutputFile, Outputs
from specctl.terminal.output import tell, write_out

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.calibration.compared_settings import ComparedSettings, Grid
    from specctl.calibration.decision import Decision
    from specctl.calibration.several_drafts import Entrant, Standing
    from specctl.export.exports import Exports, GivenCosts, Order
    from specctl.models.running.pair import Pair
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.trace_files import TraceSet
    from specctl.replicas.job import Answer
    from specctl.terminal.progress import TerminalProgress


USUAL = (
    "profile target draft policy against suite input_ samples max_new_tokens temperature output trace report "
    "export json_"
)
"""The parameters that --help shows."""


@grouped(usual=USUAL)
def calibrate(
    *,
    models: PairOptions,
    policy: str | None = option(
        "Policy to calibrate, or all. Default: the profile's. In a hierarchy it applies to every draft; or name "
        "one for each with commas, the target's own draft first.",
        "NAME|all",
    ),
    against: list[str] | None = option(
        "Calibrate this profile's drafts too, and say which to use; repeatable. Its target must be the same.",
        "PROFILE",
    ),
    tokens: str | None = option(
        "Calibrate with a draft that can write N tokens, for each N or all, and say which to use.",
        "N,N,...",
    ),
    head: list[str] | None = option(
        "Also try this trained head, or those of train-head --sweep in a folder; repeatable. Without --policy, "
        "specdec++ is calibrated.",
        "PATH",
    ),
    run: Annotated[RunOptions, But(("check",))],
    replicas: BareReplicaOptions,
    batch: str | None = option(
        "Records per forward pass: choose a setting for each of these numbers too. auto: answer as many at once as is "
        "fastest, and choose for one.",
        "N,N,...|auto",
        panel=REPLICAS,
    ),
    prompts: Annotated[PromptOptions, But(("limit", "samples_per_category"))],
    samples: int = option("Prompts that choose the setting. As many others report on it.", "N", default=10, min=1),
    grid: Literal["paper", "dense"] = option(
        "Values to try: the papers', or fine steps over every setting.", default="dense"
    ),
    sampling: FewSamplingOptions,
    chat: TemplateOption = None,
    output: Path | None = option("Write the calibrated profile here.", "-o --output FILE"),
    trace: Path | None = option(
        "Write a trace here, from which an interrupted run continues. With --force it starts over.", "FILE"
    ),
    from_: Path | None = option("Search in an earlier trace instead of recording one.", "--from FILE"),
    verify: bool = option(
        "Run the chosen setting live and compare with the prediction.", "--verify/--no-verify", default=True
    ),
    export: list[str] | None = option(
        "Also find the best setting of this engine's own rule; repeatable. It is shown as the engine reads it: "
        "transformers, vllm, vllm-plugin, sglang, llama.cpp, tensorrt-llm, mlx-lm, openvino, exllamav3 or "
        "onnxruntime-genai.",
        "ENGINE",
    ),
    costs: list[str] | None = option(
        "For --export: milliseconds in the engine of a draft step, of a target pass over one token, of each further "
        "token in it, and of a pass without a draft; N: the same with N texts at once, repeatable. Default: those of "
        "specctl here.",
        "[N:]DRAFT,TARGET[,TOKEN[,ALONE]]",
    ),
    show: ShowOptions,
) -> None:
    """Find the stopping policy and threshold that are fastest on this pair, this machine and these prompts.

    The models run once. Every setting is replayed exactly on what they wrote and priced with costs measured here. Half
    of the prompts choose the setting, the other half report its speed.

    Examples:

    [cyan]specctl calibrate --target ./big --draft ./small --policy all -o fast.toml[/]

    [cyan]specctl calibrate -p my-profile -i prompts.jsonl -o fast.toml --report report[/]
    """
    if trace is not None and from_ is not None:
        raise UsageError("--trace and --from exclude each other", "leave one of them out")
    if (against or tokens) and (trace or from_ or head or export):
        flag = "--against" if against else "--tokens"
        raise UsageError(
            f"{flag} goes with neither --trace, --from, --head nor --export", "calibrate one profile with these"
        )
    if against and tokens:
        raise UsageError("--against and --tokens exclude each other", "leave one of them out")
    replication, (rows, sizes) = replicas.replication, batch_sizes(batch)
    if replication is not None and rows != 1:
        raise UsageError("--batch is for texts of one process, and --workers starts several", "leave one out")
    if sizes and (against or tokens or head):
        raise UsageError(
            "--batch with numbers of texts goes with neither --against, --tokens nor --head", "calibrate one draft"
        )
    from specctl.calibration.compared_settings import (
        compared_settings,
        computed_by,
        heads_among,
        heads_in,
        recordable,
        require_fits,
    )
    from specctl.export.engines import LONGEST
    from specctl.replay.play import replayable
    from specctl.replay.trace_files import TRACES, read_traces

    flags = {**sampling.flags, "prompt.chat": chat}
    given = heads_in(head or [])
    resolved = _resolved(partial(run.resolve, models), flags, given)
    own = resolved.profile
    if own.draft is None:
        raise UsageError("the profile has no draft to calibrate", "name one with --draft or in the profile")
    if sizes and own.draft.draft is not None:
        raise UsageError("--batch chooses settings of one draft, and the profile has several", "leave --batch out")
    heads = heads_among(given, own.draft)
    drafting = own.draft.model_copy(update={"head": heads[0] if heads else own.draft.head})
    own = own.model_copy(update={"draft": drafting})
    with Outputs(force=run.force) as outputs:
        prompts.read_by(outputs)
        outputs.reads("earlier trace", from_)
        spare_profile(outputs, resolved)
        for name in heads:
            outputs.spare("head", name)
        calibrated = outputs.file("output", output)
        few = tokens is not None or drafting.levels[-1].tokens is not None
        counted = outputs.file("token counts", output.with_suffix(COUNTS)) if output is not None and few else None
        traced = outputs.file("trace", trace, resumed=not run.force)
        open_report(outputs, show.report)
        earlier: TraceSet | None = None
        if from_ is not None:
            earlier = read_traces(from_)
        elif traced is not None and TRACES.continues(traced):
            earlier = read_traces(traced.path)
        recorded = set(earlier.header.signals) if earlier is not None and from_ is not None else recordable(own)
        computed = computed_by(drafting, heads, earlier.header if earlier is not None and from_ is not None else None)
        asked = compared_settings(drafting, policy, grid, heads, recorded, computed)
        if (order := export_order(export or [], costs or [], own, sizes)) is not None and from_ is None:
            asked = replace(asked, at_least=LONGEST)
        if against or tokens:
            if tokens:
                rivals = with_tokens(tokens, resolved, lambda more: run.resolve(models, {**flags, **more}))
            else:
                rivals = [resolved, *(run.resolve(PairOptions(name), flags) for name in against or ())]
            for rival in rivals:
                spare_profile(outputs, rival)
            offered = prompts.chosen(own.sampling.seed)
            calibrate_several(
                rivals,
                policy,
                grid,
                _drawn(offered, samples, own.sampling.seed, show),
                calibrated,
                show,
                counted=counted,
                verify=verify,
                foreign_head=run.foreign_head,
                replication=replication,
                batch=rows,
                given=len(offered.prompts),
            )
            return
        suite, count = None, None
        if from_ is None:
            offered = prompts.chosen(own.sampling.seed)
            suite, count = _drawn(offered, samples, own.sampling.seed, show), len(offered.prompts)
        if earlier is not None and (path := from_ or trace) is not None:
            require_fits(earlier.header, own, asked, heads, suite, path)
        if not replayable(asked.old, sampled=own.sampling.temperature > 0):
            warn(
                "the current setting cannot be replayed (keep_trigger = false on a middle draft while sampling); "
                "it is only measured live"
            )
        progress = show.bars()
        named = [heads] if heads else None

        @cache
        def pair() -> "Pair":
            return load(own, progress.console, heads=named, foreign_head=run.foreign_head, progress=progress)

        decision = calibrate_one(
            own,
            asked,
            heads,
            suite,
            pair,
            progress,
            verify=verify,
            foreign_head=run.foreign_head,
            traced=traced,
            earlier=earlier,
            replication=replication,
            batch=rows,
            sizes=sizes,
            given=count,
        )
        exports = None
        if order is not None:
            from specctl.export.exports import export_to

            exports = export_to(order, own, asked, decision, pair, progress)
        show_calibration(resolved, decision, exports, calibrated, show, counted)
    if decision.traces.failures:
        raise typer.Exit(1)


def _drawn(offered: "Suite", samples: int, seed: int, show: ShowOptions) -> "Suite":
    """The prompts that choose and report; how many others there are is said, unless nothing is to be said."""
    from specctl.prompts.suites import sample

    suite, count = sample(offered, 2 * samples, seed), len(offered.prompts)
    if (left := count - len(suite.prompts)) and not show.quiet:
        tell(
            f"{left} of the {count} prompts are left out, drawn at random: --samples {samples} takes {2 * samples}. "
            f"--samples {-(-count // 2)} takes all.",
            "note",
        )
    return suite


def _resolved(
    choose: "Callable[[Mapping[str, Any]], ResolvedProfile]", flags: dict[str, Any], heads: list[str]
) -> "ResolvedProfile":
    """The profile, whose policy may need a head that only --head names."""
    try:
        return choose(flags)
    except ProfileError:
        if not heads:
            raise
        return choose({**flags, "draft.head": heads[0]})


COUNTS = ".counts.json"
"""The end of the name of the file that tells how often tokens occur, in place of the calibrated profile's."""


def calibrate_one(
    own: "Profile",
    asked: "ComparedSettings",
    heads: list[str],
    prompts: "Suite | None",
    pair: "Callable[[], Pair]",
    progress: "TerminalProgress",
    *,
    verify: bool,
    foreign_head: bool,
    traced: OutputFile | None = None,
    earlier: "TraceSet | None" = None,
    replication: Replication | None = None,
    batch: "Batch" = 1,
    sizes: "Sequence[int]" = (),
    given: int | None = None,
) -> "Decision":
    """Collect the traces of the prompts, if there are any, search, and run the winner live.

    Args:
        own: the profile.
        asked: the settings that compete.
        heads: acceptance heads to choose among.
        prompts: None to search in an earlier trace alone.
        pair: gives the loaded models; asked only for traces or live runs.
        progress: shows the work.
        verify: whether to run the winner live.
        foreign_head: as in `load`.
        traced: where to write the trace.
        earlier: an earlier trace, to search in or to go on with.
        replication: replicas that trace; None for none.
        batch: how many prompts are answered at once.
        sizes: numbers of texts at once for which a setting is chosen too.
        given: how many prompts there were to draw from.
    """
    from specctl.calibration.decision import decide
    from specctl.terminal.progress import resumable

    loaded = pair() if prompts is not None or verify else None
    traces = earlier
    if loaded is not None and prompts is not None:
        from specctl.replay.recording.collecting import collect_traces

        with resumable(progress.console, traced and traced.path, "the same command continues"):
            tracers = None
            if replication is not None:
                setup = {"heads": heads, "depth": asked.depth, "foreign_head": foreign_head}
                draft = own.draft
                others = [draft.model_copy(update={"head": head}) for head in heads] if draft is not None else []
                tracers = partial(start_replicas, replication, own, REPLICA, setup, progress, others=others, spare=True)
            files = traced, progress, earlier
            traces = collect_traces(loaded, own, prompts, asked.depth, heads, *files, tracers, batch, sizes)
    assert traces is not None
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    return decide(traces, asked, own, loaded if verify else None, progress, sizes=sizes, given=given)


def command_facts(traces: "TraceSet") -> dict[str, Any]:
    """Where and how a calibration by this command was made."""
    from specctl.calibration.calibrated import facts_of

    return facts_of(traces, shlex.join(["specctl", *sys.argv[1:]]))


def write_calibrated(
    resolved: "ResolvedProfile",
    decision: "Decision",
    facts: dict[str, Any],
    output: OutputFile,
    counted: OutputFile | None,
    *,
    quiet: bool,
) -> None:
    """Write the calibrated profile, and unless quiet say how to use it.

    Args:
        resolved: the profile that was calibrated.
        decision: of `calibrate_one`.
        facts: when, how and where.
        output: where the profile goes.
        counted: where it goes how often tokens occur in what the target wrote; None for a draft that writes all.
        quiet: whether nothing is said.
    """
    from specctl.calibration.calibrated import calibrated_profile, profile_text
    from specctl.models.files.token_counts import TokenCounts

    counts = None
    if counted is not None:
        counted.replace(TokenCounts.of(trace.tokens for trace in decision.traces.traces).text())
        counts = counted.path
    output.replace(
        profile_text(calibrated_profile(resolved, decision, facts, output.path, counts), decision.advice.verdict)
    )
    if not quiet:
        tell(f"wrote {output.path}; use it with: specctl generate -p {output.path}")


def show_calibration(
    resolved: "ResolvedProfile",
    decision: "Decision",
    exports: "Exports | None",
    output: OutputFile | None,
    show: ShowOptions,
    counted: OutputFile | None = None,
) -> None:
    """Print the outcome, as tables with what to copy or as one JSON object, and write profile and report.

    Args:
        resolved: the profile that was calibrated.
        decision: of `calibrate_one`.
        exports: best settings of other engines.
        output: where the calibrated profile goes.
        show: the report, and whether one JSON object is printed.
        counted: as of `write_calibrated`.
    """
    import tomli_w

    from specctl.calibration.calibrated import draft_table
    from specctl.calibration.calibration_report import as_document, calibration_tables, warning_tables

    facts, found = command_facts(decision.traces), decision.found
    shown = calibration_tables(decision)
    document = {"provenance": facts, **as_document(decision)}
    exported = []
    if exports is not None:
        from specctl.export.exports import export_document, export_tables, export_warnings, text_of

        exported = [text_of(one) for one in exports.found]
        shown += export_tables(exports)
        document["exports"] = export_document(exports)
        found.warnings.extend(export_warnings(exports))
    verdict = decision.advice.verdict
    texts = [verdict]
    if output is None:
        drafts = len(resolved.profile.draft.levels) if resolved.profile.draft is not None else 1
        texts.append("\n" + tomli_w.dumps({"draft": draft_table(decision.setting, drafts)}).rstrip("\n"))
    show.outcome(document, shown, *texts, *(f"\n{text}" for text in exported))
    for warning in found.warnings:
        warn(warning)
    if output is not None:
        write_calibrated(resolved, decision, facts, output, counted, quiet=show.quiet)
    if show.report is not None:
        from specctl.calibration.calibration_report import draw_calibration
        from specctl.reporting.document import write_document

        paths = write_document(
            "Calibration",
            [*warning_tables(found), *shown],
            draw_calibration(found),
            facts,
            show.report,
            command="calibrate",
            verdict=verdict,
        )
        show.written(paths)
    if decision.interrupted:
        raise KeyboardInterrupt


REPLICA = "specctl.commands.calibrate:replica"
"""What makes such a replica, as `specctl.replicas.job.Job` names it."""


def replica(*, number: int, profile: "Profile", heads: Sequence[str], depth: int, foreign_head: bool) -> "Answer":
    """A replica for `specctl.replay.recording.collecting.collect_traces`.

    Args:
        number: from 0; no replica says what the command has said already.
        profile, heads, depth: as in `collect_traces`.
        foreign_head: as in `load`.
    """
    del number
    from rich.console import Console

    console = Console(stderr=True, quiet=True)
    named = [list(heads)] if heads else None
    pair = load(profile, console, heads=named, foreign_head=foreign_head, quiet=True)

    from specctl.replay.recording.collecting import replica_of

    return replica_of(pair, profile, depth)


def with_tokens(
    counts: str, resolved: "ResolvedProfile", resolve: "Callable[[dict[str, int]], ResolvedProfile]"
) -> "list[ResolvedProfile]":
    """A profile with its lowest draft writing each of several numbers of tokens.

    Args:
        counts: numbers, or ``all``, with commas between them.
        resolved: the profile, with a draft.
        resolve: gives it with other values, by dotted key.

    Raises:
        UsageError: something else is named.
    """
    assert resolved.profile.draft is not None
    key = f"{'draft.' * len(resolved.profile.draft.levels)}tokens"
    found = []
    for name in (part.strip() for part in counts.split(",")):
        if name != "all" and not name.isdecimal():
            raise UsageError(
                f"--tokens {counts}: {name!r} is neither a number nor all", "such as --tokens all,2048,1024"
            )
        # Of no more than there are, which is told once the models are known.
        one = resolve({} if name == "all" else {key: int(name)})
        if name == "all" and one.profile.draft is not None and one.profile.draft.levels[-1].tokens is not None:
            raise UsageError(f"--tokens all: the profile {one.name} sets {key}", "take it out of the profile")
        found.append(replace(one, name=f"{resolved.name}, {name} tokens"))
    return found


def calibrate_several(
    resolved: "Sequence[ResolvedProfile]",
    policy: str | None,
    grid: "Grid",
    prompts: "Suite",
    output: OutputFile | None,
    show: ShowOptions,
    *,
    counted: OutputFile | None = None,
    verify: bool,
    foreign_head: bool,
    replication: Replication | None = None,
    batch: "Batch" = 1,
    given: int | None = None,
) -> None:
    """Calibrate each profile's drafts on the same prompts, run the chosen settings in turn, and show which to use.

    Args:
        resolved: the profiles, the first with the prompts' sampling settings.
        policy: as in `compared_settings`, for every profile.
        grid: of the settings.
        prompts: that all are calibrated on.
        output: where to write the calibrated profile of the fastest.
        show: the report, and whether one JSON object is printed.
        counted: as of `write_calibrated`.
        verify: whether to run the chosen settings live.
        foreign_head, replication, batch, given: as in `calibrate_one`.

    Raises:
        UsageError: the profiles have other targets, or one has no draft or a hierarchy with a draft head.
    """
    from specctl.calibration.compared_settings import compared_settings, computed_by, recordable
    from specctl.calibration.several_drafts import Entrant, candidates_of_entrants, predicted, run_live
    from specctl.observing.candidates import require_one_target

    require_one_target(one.profile for one in resolved)
    warn_unused(resolved)
    resolved = [one.under(resolved[0].profile, "--against") for one in resolved]
    if len({one.name for one in resolved}) < len(resolved):
        raise UsageError("a profile is named twice", "name each once")
    compared: list[tuple[Profile, ComparedSettings]] = []
    for one in resolved:
        own = one.profile
        if own.draft is None:
            raise UsageError(f"the profile {one.name} has no draft to calibrate", "leave it out")
        computed = computed_by(own.draft, (), None)
        compared.append((own, compared_settings(own.draft, policy, grid, [], recordable(own), computed)))
    progress = show.bars()
    entrants: list[Entrant] = []
    for one, (own, asked) in zip(resolved, compared, strict=True):
        pair = partial(load, own, progress.console, foreign_head=foreign_head, progress=progress)
        decision = calibrate_one(
            own,
            asked,
            [],
            prompts,
            pair,
            progress,
            verify=False,
            foreign_head=foreign_head,
            replication=replication,
            batch=batch,
            given=given,
        )
        entrants.append(Entrant(one.name, own, decision))
    standings, interrupted = predicted(entrants), False
    candidates = candidates_of_entrants(entrants)
    if verify and candidates.drafts:
        together = load(
            entrants[0].profile,
            progress.console,
            drafts=candidates.drafts,
            above=candidates.above,
            heads=candidates.heads,
            foreign_head=foreign_head,
            progress=progress,
        )
        live, interrupted = run_live(together, candidates, entrants, progress)
        standings = live or standings
    _show(resolved, entrants, standings, output, show, counted)
    if interrupted:
        raise KeyboardInterrupt


def _show(
    resolved: "Sequence[ResolvedProfile]",
    entrants: "Sequence[Entrant]",
    standings: "Sequence[Standing]",
    output: OutputFile | None,
    show: ShowOptions,
    counted: OutputFile | None,
) -> None:
    from rich.console import Console

    from specctl.calibration.calibration_report import as_document, calibration_tables, plain_interval
    from specctl.calibration.several_drafts import standings_table, verdict_of
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    facts = command_facts(entrants[0].decision.traces)
    tables = {one.name: calibration_tables(one.decision) for one in entrants}
    live = {one.entrant.name: one.decision for one in standings}
    if show.json_:
        document = {
            "provenance": facts,
            "verdict": verdict_of(standings),
            "profiles": {one.name: as_document(live.get(one.name, one.decision)) for one in entrants},
            "side_by_side": [
                {
                    "profile": one.entrant.name,
                    "policy": one.entrant.setting.table,
                    "predicted_tokens_per_second": round(one.entrant.ranked.score.tokens_per_second, 2),
                    "measured_tokens_per_second": None if one.measured is None else round(one.measured, 2),
                    "speedup": plain_interval(one.speedup),
                }
                for one in standings
            ],
        }
        write_line(sys.stdout, document)
    else:
        for name, shown in tables.items():
            write_out(f"== {name} ==")
            print_tables(Console(), shown[:1])
        print_tables(Console(), [standings_table(standings)])
        write_out(verdict_of(standings))
    for one in entrants:
        for warning in one.found.warnings:
            warn(f"{one.name}: {warning}")
    if output is not None:
        best = standings[0].entrant
        source = next(one for one in resolved if one.name == best.name)
        write_calibrated(source, standings[0].decision, facts, output, counted, quiet=show.quiet)
    if show.report is not None:
        from specctl.reporting.document import write_document

        together = [standings_table(standings), *(shown[0] for shown in tables.values())]
        paths = write_document(
            "Calibration", together, {}, facts, show.report, command="calibrate", verdict=verdict_of(standings)
        )
        show.written(paths)


def export_order(
    names: Sequence[str], costs: Sequence[str], profile: "Profile", sizes: Sequence[int] = ()
) -> "Order | None":
    """What to export, checked before a model is loaded; None for nothing.

    Args:
        names: of engines.
        costs: the texts of ``--costs``, for several texts at once with their number before a colon.
        profile: with a draft.
        sizes: numbers of texts at once, from 2 on, for which lengths are exported.

    Raises:
        UsageError: an engine is not known, takes no such draft or samples by a rule that cannot be replayed; the draft
            is a lookup or not the only one; or the costs are no costs, or those of no engine.
        ModelError: a model cannot be found.
    """
    if not names:
        if costs:
            raise UsageError("--costs are those of an engine", "name it with --export")
        return None
    from specctl.decoding.sampling import Sampling
    from specctl.export.engines import engine_of
    from specctl.export.exports import Order
    from specctl.export.search import reading_of
    from specctl.models.loading.pair_members import find_head

    draft = profile.draft
    assert draft is not None
    engines = tuple(engine_of(name) for name in dict.fromkeys(names))
    if draft.draft is not None:
        raise UsageError("--export is for one draft model, and the profile has several", "no other engine takes these")
    if draft.is_lookup:
        raise UsageError("--export is for a draft that is a model of its own or a head", "choose a profile with one")
    found = find_head("draft", draft, ("target", profile.target))
    head, sampling = None if found is None else found.kind, Sampling.of(profile.sampling)
    for engine in engines:
        if head is not None and head not in engine.heads:
            raise UsageError(
                f"no settings for {engine.name} are written for {head} heads",
                f"choose a profile whose draft is a model of its own{_others(head)}",
            )
        if head is not None and not sampling.greedy:
            raise UsageError("--export for a draft head is for greedy decoding", "export with -t 0")
        reading_of(engine, sampling)
    given: dict[int, GivenCosts] = {}
    for text in costs:
        number, colon, times = text.rpartition(":")
        if colon and not (number.isdecimal() and int(number)):
            raise UsageError(f"--costs {text}: {number} is not a number of texts", "e.g. --costs 4:1.5,12,0.2")
        if (rows := int(number) if colon else 1) in given:
            texts = f"{rows} texts at once" if rows > 1 else "one text"
            raise UsageError(f"--costs {text}: those for {texts} are given already", "give them once for each number")
        given[rows] = _given(times)
    if given and (missing := [rows for rows in (1, *sizes) if rows not in given]):
        texts = f"{missing[0]} texts at once" if missing[0] > 1 else "one text"
        place = f"as {missing[0]}:DRAFT,TARGET,TOKEN" if missing[0] > 1 else "without a number"
        raise UsageError(f"--costs are not given for {texts}", f"give them {place}")
    if others := [rows for rows in given if rows not in (1, *sizes)]:
        raise UsageError(f"--costs are given for {others[0]} texts at once", "name that number with --batch too")
    return Order(engines, given.pop(1, None), given, head)


def _others(head: str) -> str:
    """The engines that take such a head, as the end of a hint."""
    from specctl.export.engines import ENGINES

    taking = [f"--export {engine.name}" for engine in ENGINES.values() if head in engine.heads]
    return f", or {' or '.join(taking)}" if taking else ""


def _given(text: str) -> "GivenCosts":
    from specctl.export.exports import GivenCosts

    try:
        draft, target, *more = map(float, text.split(","))
        each, alone, *others = [*more, *(0.0, target)[len(more) :]]
        if others or not (0 < draft < 1e9 and 0 < target < 1e9 and 0 <= each < 1e9 and 0 < alone < 1e9):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--costs {text} is not DRAFT_MS,TARGET_MS[,PER_TOKEN_MS[,ALONE_MS]]",
            "milliseconds of a draft step, of a target pass over one token, of each further token of that pass, and of "
            "a pass without a draft: e.g. --costs 1.5,12,0.2",
        ) from None
    return GivenCosts(draft, target, each, alone)
