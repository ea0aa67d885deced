"""One calibration: collect traces, search in them, run the winner live."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specctl.commands.option_groups import ShowOptions
from specctl.commands.options import warn
from specctl.commands.tasks.pair_loading import load
from specctl.commands.tasks.replication import Replication
from specctl.outputs import OutputFile
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.calibration.compared_settings import ComparedSettings
    from specctl.calibration.decision import Decision
    from specctl.export.exports import Exports
    from specctl.models.running.pair import Pair
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.trace_files import TraceSet
    from specctl.replicas.job import Answer
    from specctl.terminal.progress import TerminalProgress

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
                tracers = partial(replication.start, own, REPLICA, setup, progress, others=others, spare=True)
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


REPLICA = "specctl.commands.tasks.calibration_run:replica"
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
