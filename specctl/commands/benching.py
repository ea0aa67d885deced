"""Loads the models and peers of a benchmark and runs it. Torch is imported when a function runs."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from specctl.commands.loading import load
from specctl.outputs import OutputFile

if TYPE_CHECKING:
    from specctl.benchmark.plan import Plan
    from specctl.observing.field import Field
    from specctl.observing.results import RunSet
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite
    from specctl.terminal.loading import TerminalProgress


def run_field(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    plan: "Plan",
    output: OutputFile | None,
    progress: "TerminalProgress",
    *,
    foreign_head: bool,
) -> "RunSet":
    """Load the models of all candidates and run the benchmark, with a table that fills in as runs finish."""
    from specctl.benchmark.lineup import left_out_lines
    from specctl.benchmark.plan import require_same
    from specctl.observing.results import BASELINE, RESULTS, read_results
    from specctl.peers.names import ASSISTED
    from specctl.peers.process import PeerProcess
    from specctl.terminal.loading import note, resumable
    from specctl.terminal.progress import BenchProgress

    console = progress.console
    earlier = None
    if output is not None and RESULTS.continues(output):
        earlier = read_results(output.path)
        require_same(earlier.header, profile, field, suite, plan, output.path)
    expected = len(suite.prompts) * len(field.candidates) * sum(plan.lengths) * plan.repeats
    for line in left_out_lines(plan.papers or {}):
        note(console, line)
    with ExitStack() as stack:
        processes = {
            label: stack.enter_context(PeerProcess(label, launch.command)) for label, launch in field.launches.items()
        }
        pair = load(
            profile,
            console,
            expected_tokens=expected,
            drafts=field.drafts,
            above=field.above,
            heads=field.heads,
            foreign_head=foreign_head,
            leaves=field.leaves,
            tree=field.tree,
            longest=max((one.setting.longest_draft for one in field.candidates if one.setting is not None), default=0),
            torch_weights=any(candidate.peer in ASSISTED for candidate in field.candidates),
            progress=progress,
        )

        from specctl.benchmark.run import run_benchmark

        def watch(results: "RunSet", total: int) -> BenchProgress:
            labels = [candidate.label for candidate in results.header.candidates]
            return BenchProgress(progress, labels, BASELINE, total, results.runs, not profile.sampling.temperature)

        with resumable(console, output and output.path):
            results = run_benchmark(pair, profile, field, suite, plan, output, watch, progress, earlier, processes)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"preparing passes took {seconds:.1f} s; no result includes this time")
    return results
