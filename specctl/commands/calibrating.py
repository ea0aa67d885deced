"""One calibration: collect traces, search in them, run the winner live."""

import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from specctl.commands.loading import load
from specctl.commands.options import warn
from specctl.commands.replicating import Replication
from specctl.commands.tracing import REPLICA
from specctl.errors import UsageError
from specctl.outputs import OutputFile
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.calibration.contest import Contest
    from specctl.calibration.live_check import Measured
    from specctl.calibration.search import Calibration
    from specctl.models.loading.pair import Pair
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
    replays_old: bool,
    verify: bool,
    foreign_head: bool,
    shown: bool | None,
    quiet: bool,
    replication: Replication | None = None,
) -> "tuple[TraceSet, Calibration, CostTable, list[Measured]]":
    """Collect the traces of the prompts, if there are any, search, and run the winner live.

    Args:
        own: the profile.
        asked: the settings that compete.
        heads: acceptance heads to choose among.
        prompts: None to search in an earlier trace alone.
        traced: where to write the trace.
        earlier: an earlier trace, to search in or to go on with.
        replays_old: whether the profile's own setting can be replayed.
        verify: whether to run the winner live.
        foreign_head: as in `load`.
        shown: whether to show progress; None for where it makes sense.
        quiet: show only warnings.
        replication: replicas that trace; None for none.
    """
    from rich.console import Console

    from specctl.calibration.search import search
    from specctl.terminal.loading import TerminalProgress, resumable

    console = Console(stderr=True, quiet=quiet)
    progress = TerminalProgress(console, shown)
    pair: Pair | None = None
    if prompts is not None or verify:
        pair = load(own, console, heads=[heads] if heads else None, foreign_head=foreign_head, progress=progress)
    traces = earlier
    if pair is not None and prompts is not None:
        from specctl.replay.collecting import collect_traces

        with resumable(console, traced and traced.path, "the same command continues"):
            tracers = None
            if replication is not None:
                setup = {"heads": heads, "depth": asked.depth, "foreign_head": foreign_head}
                tracers = partial(replication.start, own, REPLICA, setup, progress, spare=True)
            traces = collect_traces(pair, own, prompts, asked.depth, heads, traced, progress, earlier, tracers)
    assert traces is not None
    for identity, reason in traces.failures.items():
        warn(f"prompt {identity} is left out: {reason}")
    if not traces.traces or traces.costs is None:
        raise UsageError("no prompt could be run, so there is nothing to calibrate on")
    old = asked.old if replays_old else None
    with progress.counting("settings", asked.most(old)) as advance:
        found = search(traces, asked.candidates, old, traces.costs, asked.also_ranked, advance, space=asked.space)
    if traces.verification not in (None, own.sampling.verification):
        played, runs = (
            {"token": "one by one", "block": "as a block"}[each]
            for each in (traces.header.verification, own.sampling.verification)
        )
        found.warnings.append(
            f"predictions are of draft tokens verified {played}, and live runs verify them {runs} "
            "(sampling.verification): more are kept as a block"
        )
    measured: list[Measured] = []
    if verify and pair is not None:
        from specctl.calibration.live_check import check_live, doubts

        measured = check_live(pair, own, traces, found, asked.old, progress)
        found.warnings.extend(doubts(measured))
    return traces, found, traces.costs, measured


def facts_of(traces: "TraceSet") -> dict[str, Any]:
    """Where and how a calibration was made, for its profile and reports."""
    recorded = traces.header.provenance
    return {
        "created": recorded["created"],
        "command": shlex.join(["specctl", *sys.argv[1:]]),
        **{key: recorded[key] for key in ("suite", "devices", "engines", "versions")},
    }


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
    import tomli_w

    from specctl.calibration.calibrated import calibrated_profile

    output.replace(tomli_w.dumps(calibrated_profile(resolved, found, costs, facts, output.path)))
    if not quiet:
        tell(f"wrote {output.path}; use it with: specctl generate -p {output.path}")
