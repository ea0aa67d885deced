"""`specctl calibrate`: the fastest policy and threshold for this pair, this machine and these prompts."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    RunOptions,
    ShowOptions,
    TemplateOption,
    batch_sizes,
    open_report,
    protect_profile,
    warn,
    warn_unused,
)
from specctl.commands.loading import load, start_replicas
from specctl.commands.requests import But, grouped, option
from specctl.errors import ProfileError, UsageError
from specctl.outputs import OutputFile, Outputs
from specctl.terminal.output import print_message, write_out

if TYPE_CHECKING:
    from specctl.calibration.compared_settings import ComparedSettings
    from specctl.calibration.decision import Decision
    from specctl.calibration.several_drafts import Entrant, Standing
    from specctl.export.exports import ExportRequest, Exports, GivenCosts
    from specctl.models.running.pair import Pair
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.trace_files import TraceSet
    from specctl.terminal.progress import TerminalProgress
    from specctl.text_engine.engine import Answer
    from specctl.text_engine.row_count import Batch


USUAL = (
    "profile target draft policy against suite input_ samples max_new_tokens temperature output trace report "
    "export json_"
)
"""The parameters that --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """The flags of `specctl calibrate`; UsageError for conflicting ones."""

    models: PairOptions
    policy: str | None = option(
        "Policy to calibrate, or all. Default: the profile's. In a hierarchy it applies to every draft; or name "
        "one for each with commas, the target's own draft first.",
        "NAME|all",
    )
    against: list[str] | None = option(
        "Calibrate this profile's drafts too, and recommend one; repeatable. Its target must be the same.",
        "PROFILE",
    )
    tokens: str | None = option(
        "Calibrate with a draft limited to N tokens of the vocabulary, for each N or all, and recommend one.",
        "N,N,...",
    )
    head: list[str] | None = option(
        "Also try this trained head, or those of train-head --sweep in a folder; repeatable. Without --policy, "
        "specdec++ is calibrated.",
        "PATH",
    )
    run: Annotated[RunOptions, But(("check",))]
    replicas: BareReplicaOptions
    batch: str | None = option(
        "Batch sizes: also choose a setting for each. auto: answer with the fastest batch size, and choose for one "
        "text at a time.",
        "N,N,...|auto",
        panel=REPLICAS,
    )
    prompts: Annotated[PromptOptions, But(("limit", "samples_per_category"))]
    samples: int = option("Prompts that choose the setting. As many others report on it.", "N", default=10, min=1)
    grid: Literal["paper", "dense"] = option(
        "Values to try: the papers', or fine steps over every setting.", default="dense"
    )
    sampling: FewSamplingOptions
    chat: TemplateOption = None
    output: Path | None = option("Write the calibrated profile here.", "-o --output FILE")
    trace: Path | None = option(
        "Write a trace here, from which an interrupted run continues. With --force it starts over.", "FILE"
    )
    from_: Path | None = option("Search in an earlier trace instead of recording one.", "--from FILE")
    verify: bool = option(
        "Run the chosen setting live and compare with the prediction.", "--verify/--no-verify", default=True
    )
    export: list[str] | None = option(
        "Also find the best setting of this engine's own rule; repeatable. It is shown as the engine reads it: "
        "transformers, vllm, vllm-plugin, sglang, llama.cpp, tensorrt-llm, mlx-lm, openvino, exllamav3 or "
        "onnxruntime-genai.",
        "ENGINE",
    )
    costs: list[str] | None = option(
        "For --export: milliseconds in the engine of a draft step, of a target pass over one token, of each further "
        "token in it, and of a pass without a draft; N: the same with N texts at once, repeatable. Default: those of "
        "specctl here.",
        "[N:]DRAFT,TARGET[,TOKEN[,ALONE]]",
    )
    show: ShowOptions

    def __post_init__(self) -> None:
        if self.trace is not None and self.from_ is not None:
            raise UsageError("use either --trace or --from, not both")
        if self.several and (self.trace or self.from_ or self.head or self.export):
            flag = "--against" if self.against else "--tokens"
            hint = "calibrate one profile with these"
            raise UsageError(f"{flag} cannot be combined with --trace, --from, --head or --export", hint)
        if self.against and self.tokens:
            raise UsageError("use either --against or --tokens, not both")
        if self.replicas.replication is not None and self.at_once != 1:
            raise UsageError("--batch works only in one process, and --workers starts several", "leave one out")
        if self.sizes and (self.several or self.head):
            what = "--batch with numbers cannot be combined with --against, --tokens or --head"
            raise UsageError(what, "calibrate one draft")

    @property
    def several(self) -> bool:
        """Whether several profiles are compared."""
        return bool(self.against or self.tokens)

    @property
    def at_once(self) -> "Batch":
        """The batch size of answers."""
        return batch_sizes(self.batch)[0]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes above 1 for which a setting is chosen too."""
        return batch_sizes(self.batch)[1]

    @property
    def flags(self) -> dict[str, Any]:
        """The profile values that the flags set, by dotted key."""
        return {**self.sampling.flags, "prompt.chat": self.chat}

    def resolve(self, heads: Sequence[str]) -> "ResolvedProfile":
        """The profile with the flags applied. Its policy may need one of the ``heads``, which only --head names.

        Raises:
            UsageError: there is no draft, or there are several together with batch sizes.
        """
        try:
            found = self.run.resolve(self.models, self.flags)
        except ProfileError:
            if not heads:
                raise
            found = self.run.resolve(self.models, {**self.flags, "draft.head": heads[0]})
        draft = found.profile.draft
        if draft is None:
            raise UsageError("the profile has no draft to calibrate", "name one with --draft or in the profile")
        if self.sizes and draft.draft is not None:
            raise UsageError("--batch chooses settings of one draft, and the profile has several", "leave --batch out")
        return found

    def rivals(self, first: "ResolvedProfile") -> "list[ResolvedProfile]":
        """The profiles to compare, from --against or --tokens.

        Raises:
            UsageError: --tokens is not a list of numbers.
        """
        if not self.tokens:
            return [first, *(self.run.resolve(PairOptions(name), self.flags) for name in self.against or ())]
        assert first.profile.draft is not None
        key = f"{'draft.' * len(first.profile.draft.levels)}tokens"
        found = []
        for name in (part.strip() for part in self.tokens.split(",")):
            if name != "all" and not name.isdecimal():
                what = f"--tokens {self.tokens}: {name!r} is neither a number nor all"
                raise UsageError(what, "such as --tokens all,2048,1024")
            # The upper limit is checked once the models are known.
            one = self.run.resolve(self.models, self.flags if name == "all" else {**self.flags, key: int(name)})
            if name == "all" and one.profile.draft is not None and one.profile.draft.levels[-1].tokens is not None:
                raise UsageError(f"--tokens all: the profile {one.name} sets {key}", "take it out of the profile")
            found.append(replace(one, name=f"{first.name}, {name} tokens"))
        return found

    def drawn(self, seed: int) -> "tuple[Suite, int]":
        """The prompts that choose and report, and the number before sampling; prints how many are left out."""
        from specctl.prompts.suites import sample

        offered, samples = self.prompts.chosen(seed), self.samples
        suite, count = sample(offered, 2 * samples, seed), len(offered.prompts)
        if (left := count - len(suite.prompts)) and not self.show.quiet:
            print_message(
                f"{left} of the {count} prompts are left out, drawn at random: --samples {samples} takes "
                f"{2 * samples}. --samples {-(-count // 2)} takes all.",
                "note",
            )
        return suite, count


@dataclass(frozen=True, slots=True)
class _Files:
    """The output files for the calibrated profile and for token counts of the target's output; None to write none."""

    profile: OutputFile | None
    counts: OutputFile | None


@grouped(usual=USUAL)
def calibrate(request: CalibrateRequest) -> None:
    """Find the stopping policy and threshold that are fastest on this pair, this machine and these prompts.

    The models run once. Every setting is replayed exactly on their output and priced with costs measured here. Half of
    the prompts choose the setting, the other half report its speed.

    Examples:

    [cyan]specctl calibrate --target ./big --draft ./small --policy all -o fast.toml[/]

    [cyan]specctl calibrate -p my-profile -i prompts.jsonl -o fast.toml --report report[/]
    """
    from specctl.calibration.compared_settings import heads_among, heads_in

    given = heads_in(request.head or [])
    resolved = request.resolve(given)
    own = resolved.profile
    assert own.draft is not None
    heads = heads_among(given, own.draft)
    drafting = own.draft.model_copy(update={"head": heads[0] if heads else own.draft.head})
    own = own.model_copy(update={"draft": drafting})
    with Outputs(force=request.run.force) as outputs:
        request.prompts.read_by(outputs)
        outputs.reads("earlier trace", request.from_)
        protect_profile(outputs, resolved)
        for name in heads:
            outputs.protect("head", name)
        calibrated, counts = outputs.file("output", request.output), None
        if request.output is not None and (request.tokens is not None or drafting.levels[-1].tokens is not None):
            counts = outputs.file("token counts", request.output.with_suffix(COUNTS))
        traced = outputs.file("trace", request.trace, resumed=not request.run.force)
        open_report(outputs, request.show.report)
        files = _Files(calibrated, counts)
        if not request.several:
            _calibrate_one(request, resolved, own, heads, traced, files)
            return
        rivals = request.rivals(resolved)
        for rival in rivals:
            protect_profile(outputs, rival)
        _calibrate_several(request, rivals, files)


def _calibrate_one(
    request: CalibrateRequest,
    resolved: "ResolvedProfile",
    own: "Profile",
    heads: list[str],
    traced: OutputFile | None,
    files: _Files,
) -> None:
    """Calibrate one profile, and find the settings of other engines."""
    from specctl.calibration.compared_settings import compared_settings, computed_by, recordable, require_fits
    from specctl.export.engines import LONGEST
    from specctl.replay.play import replayable
    from specctl.replay.trace_files import TRACES, read_traces

    assert own.draft is not None
    earlier: TraceSet | None = None
    if request.from_ is not None:
        earlier = read_traces(request.from_)
    elif traced is not None and TRACES.continues(traced):
        earlier = read_traces(traced.path)
    fixed = earlier.header if earlier is not None and request.from_ is not None else None
    recorded = recordable(own) if fixed is None else {*fixed.signals}
    asked = compared_settings(
        own.draft, request.policy, request.grid, heads, recorded, computed_by(own.draft, heads, fixed)
    )
    order = export_order(request.export or [], request.costs or [], own, request.sizes)
    if order is not None and request.from_ is None:
        asked = replace(asked, at_least=LONGEST)
    suite, count = (None, None) if request.from_ is not None else request.drawn(own.sampling.seed)
    if earlier is not None and (path := request.from_ or request.trace) is not None:
        require_fits(earlier.header, own, asked, heads, suite, path)
    if not replayable(asked.old, sampled=own.sampling.temperature > 0):
        warn(
            "the current setting cannot be replayed (keep_trigger = false on a middle draft while sampling); it is "
            "only measured live"
        )
    progress, foreign_head = request.show.bars(), request.run.foreign_head
    named = [heads] if heads else None

    @cache
    def pair() -> "Pair":
        return load(own, progress, heads=named, foreign_head=foreign_head)

    decision = _decide(request, own, asked, heads, suite, count, pair, progress, traced, earlier, verify=request.verify)
    exports = None
    if order is not None:
        from specctl.export.exports import export_to

        exports = export_to(order, own, asked, decision, pair, progress)
    _show_one(request, resolved, decision, exports, files)
    if decision.traces.failures:
        raise typer.Exit(1)


COUNTS = ".counts.json"
"""Suffix of the token count file; replaces the suffix of the calibrated profile's name."""


def _decide(
    request: CalibrateRequest,
    own: "Profile",
    asked: "ComparedSettings",
    heads: list[str],
    prompts: "Suite | None",
    given: int | None,
    pair: "Callable[[], Pair]",
    progress: "TerminalProgress",
    traced: OutputFile | None = None,
    earlier: "TraceSet | None" = None,
    *,
    verify: bool,
) -> "Decision":
    """Collect the traces of the prompts, if any, search, and run the winner live."""
    from specctl.calibration.decision import decide
    from specctl.terminal.progress import resumable

    loaded = pair() if prompts is not None or verify else None
    traces, sizes = earlier, request.sizes
    if loaded is not None and prompts is not None:
        from specctl.replay.recording.collecting import collect_traces

        with resumable(progress.console, traced and traced.path, "the same command continues"):
            tracers = None
            if (replication := request.replicas.replication) is not None:
                setup = {"heads": heads, "depth": asked.depth, "foreign_head": request.run.foreign_head}
                others = [own.draft.model_copy(update={"head": head}) for head in heads] if own.draft else []
                tracers = partial(start_replicas, replication, own, REPLICA, setup, progress, others=others, spare=True)
            files = traced, progress, earlier
            traces = collect_traces(loaded, own, prompts, asked.depth, heads, *files, tracers, request.at_once, sizes)
    assert traces is not None
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    return decide(traces, asked, own, loaded if verify else None, progress, sizes=sizes, given=given)


def _facts(traces: "TraceSet") -> dict[str, Any]:
    from specctl.calibration.calibrated import facts_of

    return facts_of(traces, shlex.join(["specctl", *sys.argv[1:]]))


def _write_profile(resolved: "ResolvedProfile", decision: "Decision", files: _Files, *, quiet: bool) -> None:
    """Write the calibrated profile and, unless quiet, print how to use it."""
    from specctl.calibration.calibrated import calibrated_profile, profile_text
    from specctl.models.files.token_counts import TokenCounts

    if files.profile is None:
        return
    counts, path = None, files.profile.path
    if files.counts is not None:
        files.counts.replace(TokenCounts.of(trace.tokens for trace in decision.traces.traces).text())
        counts = files.counts.path
    written = calibrated_profile(resolved, decision, _facts(decision.traces), path, counts)
    files.profile.replace(profile_text(written, decision.advice.verdict))
    if not quiet:
        print_message(f"wrote {path}; use it with: specctl generate -p {path}")


def _show_one(
    request: CalibrateRequest,
    resolved: "ResolvedProfile",
    decision: "Decision",
    exports: "Exports | None",
    files: _Files,
) -> None:
    """Print the outcome as tables with settings to copy, or as one JSON object; write profile and report."""
    import tomli_w

    from specctl.calibration.calibrated import draft_table
    from specctl.calibration.calibration_report import as_document, calibration_tables, draw_calibration, warning_tables

    facts, found, show = _facts(decision.traces), decision.found, request.show
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
    if files.profile is None:
        drafts = len(resolved.profile.draft.levels) if resolved.profile.draft is not None else 1
        texts.append("\n" + tomli_w.dumps({"draft": draft_table(decision.setting, drafts)}).rstrip("\n"))
    show.outcome(document, shown, *texts, *(f"\n{text}" for text in exported))
    for warning in found.warnings:
        warn(warning)
    _write_profile(resolved, decision, files, quiet=show.quiet)
    if show.report is not None:
        tables = [*warning_tables(found), *shown]
        show.document("Calibration", tables, draw_calibration(found), facts, command="calibrate", verdict=verdict)
    if decision.interrupted:
        raise KeyboardInterrupt


REPLICA = "specctl.commands.calibrate:replica"  # The factory of such replicas; see `specctl.text_engine.job.Job`


def replica(*, number: int, profile: "Profile", heads: Sequence[str], depth: int, foreign_head: bool) -> "Answer":
    """A replica for `specctl.replay.recording.collecting.collect_traces`."""
    del number
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True, quiet=True), False)
    named = [list(heads)] if heads else None
    pair = load(profile, silent, heads=named, foreign_head=foreign_head, quiet=True)

    from specctl.replay.recording.collecting import replica_of

    return replica_of(pair, profile, depth)


def _calibrate_several(request: CalibrateRequest, rivals: "Sequence[ResolvedProfile]", files: _Files) -> None:
    """Calibrate each profile's drafts on the same prompts, run the chosen settings in turn, and recommend one."""
    from specctl.calibration.compared_settings import compared_settings, computed_by, recordable
    from specctl.calibration.several_drafts import Entrant, candidates_of_entrants, predicted, run_live
    from specctl.observing.candidates import require_one_target

    require_one_target(one.profile for one in rivals)
    warn_unused(rivals)
    rivals = [one.under(rivals[0].profile, "--against") for one in rivals]
    if len({one.name for one in rivals}) < len(rivals):
        raise UsageError("a profile is named twice", "name each once")
    compared: list[tuple[Profile, ComparedSettings]] = []
    for one in rivals:
        own = one.profile
        if own.draft is None:
            raise UsageError(f"the profile {one.name} has no draft to calibrate", "leave it out")
        computed = computed_by(own.draft, (), None)
        asked = compared_settings(own.draft, request.policy, request.grid, [], recordable(own), computed)
        compared.append((own, asked))
    prompts, given = request.drawn(rivals[0].profile.sampling.seed)
    progress, foreign_head = request.show.bars(), request.run.foreign_head
    entrants: list[Entrant] = []
    for one, (own, asked) in zip(rivals, compared, strict=True):
        pair = partial(load, own, progress, foreign_head=foreign_head)
        decision = _decide(request, own, asked, [], prompts, given, pair, progress, verify=False)
        entrants.append(Entrant(one.name, own, decision))
    standings, interrupted = predicted(entrants), False
    candidates = candidates_of_entrants(entrants)
    if request.verify and candidates.drafts:
        together = load(
            entrants[0].profile,
            progress,
            drafts=candidates.drafts,
            above=candidates.above,
            heads=candidates.heads,
            foreign_head=foreign_head,
        )
        live, interrupted = run_live(together, candidates, entrants, progress)
        standings = live or standings
    _show_several(request, rivals, entrants, standings, files)
    if interrupted:
        raise KeyboardInterrupt


def _show_several(
    request: CalibrateRequest,
    rivals: "Sequence[ResolvedProfile]",
    entrants: "Sequence[Entrant]",
    standings: "Sequence[Standing]",
    files: _Files,
) -> None:
    from rich.console import Console

    from specctl.calibration.calibration_report import as_document, calibration_tables, plain_interval
    from specctl.calibration.several_drafts import standings_table, verdict_of
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    facts, show, verdict = _facts(entrants[0].decision.traces), request.show, verdict_of(standings)
    tables = {one.name: calibration_tables(one.decision) for one in entrants}
    live = {one.entrant.name: one.decision for one in standings}
    if show.json_:
        document = {
            "provenance": facts,
            "verdict": verdict,
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
        write_out(verdict)
    for one in entrants:
        for warning in one.found.warnings:
            warn(f"{one.name}: {warning}")
    source = next(one for one in rivals if one.name == standings[0].entrant.name)
    _write_profile(source, standings[0].decision, files, quiet=show.quiet)
    together = [standings_table(standings), *(shown[0] for shown in tables.values())]
    show.document("Calibration", together, (), facts, command="calibrate", verdict=verdict)


def export_order(
    names: Sequence[str], costs: Sequence[str], profile: "Profile", sizes: Sequence[int] = ()
) -> "ExportRequest | None":
    """The exports asked for, checked before a model is loaded; None for none.

    Args:
        names: of engines.
        costs: the values of ``--costs``, with a batch size before a colon for several texts at once.
        profile: with a draft.
        sizes: batch sizes, from 2, for which lengths are exported.

    Raises:
        UsageError: an engine is unknown, does not support the draft or samples by a rule that cannot be replayed; the
            draft is a lookup or not the only one; or the costs are invalid or have no engine.
        ModelError: a model cannot be found.
    """
    if not names:
        if costs:
            raise UsageError("--costs are the costs of an engine", "name it with --export")
        return None
    from specctl.decoding.sampling import Sampling
    from specctl.export.engines import engine_of
    from specctl.export.exports import ExportRequest
    from specctl.export.search import reading_of
    from specctl.models.loading.pair_members import find_head

    draft = profile.draft
    assert draft is not None
    engines = tuple(engine_of(name) for name in dict.fromkeys(names))
    if draft.draft is not None:
        raise UsageError("--export works with one draft, and the profile has several", "other engines use one")
    if draft.is_lookup:
        raise UsageError("--export needs a draft model or a draft head", "choose a profile with one")
    found = find_head("draft", draft, ("target", profile.target))
    head, sampling = None if found is None else found.kind, Sampling.of(profile.sampling)
    for engine in engines:
        if head is not None and head not in engine.heads:
            raise UsageError(
                f"no settings for {engine.name} are written for {head} heads",
                f"choose a profile whose draft is a model of its own{_others(head)}",
            )
        if head is not None and not sampling.greedy:
            raise UsageError("--export for a draft head works only in greedy decoding", "export with -t 0")
        reading_of(engine, sampling)
    given: dict[int, GivenCosts] = {}
    for text in costs:
        number, colon, times = text.rpartition(":")
        if colon and not (number.isdecimal() and int(number)):
            raise UsageError(f"--costs {text}: {number} is not a number of texts", "e.g. --costs 4:1.5,12,0.2")
        if (rows := int(number) if colon else 1) in given:
            texts = f"{rows} texts at once" if rows > 1 else "one text"
            raise UsageError(f"--costs {text}: costs for {texts} are already given", "give them once for each number")
        given[rows] = _given(times)
    if given and (missing := [rows for rows in (1, *sizes) if rows not in given]):
        texts = f"{missing[0]} texts at once" if missing[0] > 1 else "one text"
        place = f"as {missing[0]}:DRAFT,TARGET,TOKEN" if missing[0] > 1 else "without a number"
        raise UsageError(f"--costs lacks costs for {texts}", f"give them {place}")
    if others := [rows for rows in given if rows not in (1, *sizes)]:
        raise UsageError(f"--costs has costs for {others[0]} texts at once", "name that number with --batch too")
    return ExportRequest(engines, given.pop(1, None), given, head)


def _others(head: str) -> str:
    """The engines that support such a head, as the end of a hint."""
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
