"""One calibration: collect traces, search in them, run the winner live."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.commands.loading import load
from specctl.commands.options import warn
from specctl.commands.replicating import Replication
from specctl.commands.tracing import REPLICA
from specctl.outputs import OutputFile
from specctl.terminal.output import tell, write_out

if TYPE_CHECKING:
    from specctl.calibration.compared_settings import Contest
    from specctl.calibration.live_check import Measured
    from specctl.calibration.search import Calibration
    from specctl.export.exports import Exports, Order
    from specctl.models.running.pair import Pair
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.replay.costs import CostTable
    from specctl.replay.trace_files import TraceSet


def calibrate_one(
    own: "Profile",
    asked: "Contest",
    heads: list[str],
    prompts: "Suite | None",
    traced: OutputFile | None,
    earlier: "TraceSet | None",
    *,
    verify: bool,
    foreign_head: bool,
    shown: bool | None,
    quiet: bool,
    replication: Replication | None = None,
    order: "Order | None" = None,
) -> "tuple[TraceSet, Calibration, CostTable, list[Measured], Exports | None]":
    """Collect the traces of the prompts, if there are any, search, run the winner live, and search engines' own rules.

    Args:
        own: the profile.
        asked: the settings that compete.
        heads: acceptance heads to choose among.
        prompts: None to search in an earlier trace alone.
        traced: where to write the trace.
        earlier: an earlier trace, to search in or to go on with.
        verify: whether to run the winner live.
        foreign_head: as in `load`.
        shown: whether to show progress; None for where it makes sense.
        quiet: show only warnings.
        replication: replicas that trace; None for none.
        order: what to export; None for nothing.
    """
    from rich.console import Console

    from specctl.calibration.decision import decide
    from specctl.terminal.work_progress import TerminalProgress, resumable

    console = Console(stderr=True, quiet=quiet)
    progress = TerminalProgress(console, shown)

    def loaded() -> "Pair":
        return load(own, console, heads=[heads] if heads else None, foreign_head=foreign_head, progress=progress)

    pair = loaded() if prompts is not None or verify else None
    traces = earlier
    if pair is not None and prompts is not None:
        from specctl.replay.collecting import collect_traces

        with resumable(console, traced and traced.path, "the same command continues"):
            tracers = None
            if replication is not None:
                setup = {"heads": heads, "depth": asked.depth, "foreign_head": foreign_head}
                draft = own.draft
                others = [draft.model_copy(update={"head": head}) for head in heads] if draft is not None else []
                tracers = partial(replication.start, own, REPLICA, setup, progress, others=others, spare=True)
            traces = collect_traces(pair, own, prompts, asked.depth, heads, traced, progress, earlier, tracers)
    assert traces is not None
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    found, costs, measured = decide(traces, asked, own, pair if verify else None, progress)
    exports = None
    if order is not None:
        from specctl.export.exports import export_to

        exports = export_to(order, own, asked, traces, found, lambda: pair or loaded(), progress)
    return traces, found, costs, measured, exports


def command_facts(traces: "TraceSet") -> dict[str, Any]:
    """Where and how a calibration by this command was made."""
    from specctl.calibration.calibrated import facts_of

    return facts_of(traces, shlex.join(["specctl", *sys.argv[1:]]))


def write_calibrated(
    resolved: "ResolvedProfile",
    found: "Calibration",
    costs: "CostTable",
    facts: dict[str, Any],
    output: OutputFile,
    *,
    quiet: bool,
) -> None:
    """Write the calibrated profile, and unless quiet say how to use it."""
    from specctl.calibration.calibrated import calibrated_profile, profile_text

    output.replace(profile_text(calibrated_profile(resolved, found, costs, facts, output.path), found))
    if not quiet:
        tell(f"wrote {output.path}; use it with: specctl generate -p {output.path}")


def show_calibration(
    resolved: "ResolvedProfile",
    traces: "TraceSet",
    found: "Calibration",
    costs: "CostTable",
    measured: list["Measured"],
    exports: "Exports | None",
    output: OutputFile | None,
    report: Path | None,
    *,
    json_: bool,
    quiet: bool,
) -> None:
    """Print the outcome, as tables with what to copy or as one JSON object, and write profile and report.

    Args:
        resolved: the profile that was calibrated.
        traces, found, costs, measured, exports: of `calibrate_one`.
        output: where the calibrated profile goes.
        report: folder of the report.
        json_: whether to print one JSON object.
        quiet: show only warnings.
    """
    import tomli_w
    from rich.console import Console

    from specctl.calibration.calibrated import draft_table
    from specctl.calibration.calibration_tables import as_document, calibration_tables, verdict
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    facts = command_facts(traces)
    shown = calibration_tables(found, costs, measured)
    document = {"provenance": facts, **as_document(found, costs, measured)}
    exported = []
    if exports is not None:
        from specctl.export.export_tables import export_document, export_tables, export_warnings, text_of

        exported = [text_of(one) for one in exports.found]
        shown += export_tables(exports)
        document["exports"] = export_document(exports)
        found.warnings.extend(export_warnings(exports))
    if json_:
        write_line(sys.stdout, document)
    else:
        print_tables(Console(), shown)
        write_out(verdict(found))
        if output is None:
            drafts = len(resolved.profile.draft.levels) if resolved.profile.draft is not None else 1
            write_out("\n" + tomli_w.dumps({"draft": draft_table(found.winner.score.setting, drafts)}).rstrip("\n"))
        for text in exported:
            write_out(f"\n{text}")
    for warning in found.warnings:
        warn(warning)
    if output is not None:
        write_calibrated(resolved, found, costs, facts, output, quiet=quiet)
    if report is not None:
        from specctl.calibration.calibration_figures import draw_calibration
        from specctl.reporting.document import write_document

        paths = write_document(
            "Calibration", shown, draw_calibration(found), facts, report, command="calibrate", verdict=verdict(found)
        )
        for path in paths if not quiet else []:
            tell(f"wrote {path}")
