"""Loads the models and peers of a benchmark and runs it. Torch is imported when a function runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specctl.commands.tasks.pair_loading import load
from specctl.commands.tasks.replication import Replication
from specctl.outputs import OutputFile

if TYPE_CHECKING:
    from specctl.benchmark.plan import Plan
    from specctl.models.running.pair import Pair
    from specctl.observing.results import RunSet
    from specctl.profile import Profile
    from specctl.replicas.job import Answer
    from specctl.replicas.replica import Replicas
    from specctl.terminal.progress import TerminalProgress

REPLICA = "specctl.commands.tasks.benchmark_run:replica"
"""What makes a replica that benchmarks, as `specctl.replicas.job.Job` names it."""


def run_plan(
    plan: "Plan",
    output: OutputFile | None,
    progress: "TerminalProgress",
    *,
    foreign_head: bool,
    stopped: "Callable[[RunSet], None]",
    replication: Replication | None = None,
) -> "RunSet":
    """Load the models of all candidates and run the benchmark, with a table that fills in as runs finish.

    With ``replication``, replicas load them, and each prompt runs on one of these. After Ctrl-C ``stopped`` gets the
    runs that are there, if there are any, before KeyboardInterrupt goes on.
    """
    from specctl.benchmark.papers import left_out_lines
    from specctl.benchmark.plan import require_same
    from specctl.observing.results import BASELINE, RESULTS, read_results
    from specctl.terminal.progress import BenchProgress, note, resumable

    console = progress.console
    earlier = None
    if output is not None and RESULTS.continues(output):
        earlier = read_results(output.path)
        require_same(earlier.header, plan, output.path)
    for line in left_out_lines(plan.papers or {}):
        note(console, line)
    begun: list[RunSet] = []

    def watch(results: "RunSet", total: int) -> BenchProgress:
        begun.append(results)
        labels = [candidate.label for candidate in results.header.candidates]
        return BenchProgress(progress, labels, BASELINE, total, results.runs, not plan.profile.sampling.temperature)

    try:
        with ExitStack() as stack:
            if replication is not None:
                from specctl.benchmark.run import run_by_replicas

                start = _starter(replication, plan, progress, foreign_head=foreign_head)
                stack.enter_context(resumable(console, output and output.path))
                return run_by_replicas(start, plan, output, watch, earlier)
            from specctl.peers.process import PeerProcess

            processes = {
                label: stack.enter_context(PeerProcess(label, launch.command))
                for label, launch in plan.candidates.launches.items()
            }
            pair = _load(plan, plan.tokens, progress, foreign_head=foreign_head)

            from specctl.benchmark.run import run_benchmark

            stack.enter_context(resumable(console, output and output.path))
            results = run_benchmark(pair, plan, output, watch, progress, earlier, processes)
    except KeyboardInterrupt:
        if output is None:
            note(console, "interrupted")
        if begun and begun[0].runs:
            stopped(begun[0])
        raise
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"preparing passes took {seconds:.1f} s; no result includes this time")
    return results


def _starter(
    replication: Replication, plan: "Plan", progress: "TerminalProgress", *, foreign_head: bool
) -> "Callable[[], AbstractContextManager[Replicas]]":
    """What starts the replicas of a benchmark."""
    setup = {"plan": plan, "foreign_head": foreign_head}
    others = [
        table.model_copy(update={"head": head})
        for table, heads in zip(plan.candidates.drafts, plan.candidates.heads, strict=True)
        for head in (*heads, None)
    ]
    return partial(
        replication.start, plan.profile, REPLICA, setup, progress, plan.tokens, others=others, exclusive=True
    )


def replica(*, number: int, profile: "Profile", plan: "Plan", foreign_head: bool, expected_tokens: int) -> "Answer":
    """A replica for `specctl.benchmark.run.run_by_replicas`.

    Args:
        number: from 0; the first one alone says what all have to say.
        profile: the plan's.
        plan, foreign_head: as in `run_plan`.
        expected_tokens: number of tokens that it will generate.
    """
    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True, quiet=number > 0), False)
    plan = replace(plan, profile=profile)
    pair = _load(plan, expected_tokens, silent, foreign_head=foreign_head)

    from specctl.benchmark.run import benchmarking

    return benchmarking(pair, plan)


def _load(plan: "Plan", expected_tokens: int, progress: "TerminalProgress", *, foreign_head: bool) -> "Pair":
    """Load the models of all candidates."""
    from specctl.peers.engines import ASSISTED

    candidates = plan.candidates
    return load(
        plan.profile,
        progress.console,
        expected_tokens=expected_tokens,
        drafts=candidates.drafts,
        above=candidates.above,
        heads=candidates.heads,
        foreign_head=foreign_head,
        tree=candidates.tree,
        longest=max((one.setting.longest_draft for one in candidates.all if one.setting is not None), default=0),
        torch_weights=any(candidate.peer in ASSISTED for candidate in candidates.all),
        progress=progress,
    )
