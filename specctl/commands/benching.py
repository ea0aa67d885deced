"""Loads the models and peers of a benchmark and runs it. Torch is imported when a function runs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from specctl.commands.loading import load
from specctl.commands.replicating import Replication
from specctl.outputs import OutputFile

if TYPE_CHECKING:
    from specctl.benchmark.plan import Plan
    from specctl.models.running.pair import Pair
    from specctl.observing.candidates import Field
    from specctl.observing.results import RunSet
    from specctl.profile import Profile
    from specctl.prompts.suites import Suite
    from specctl.replicas.job import Answer
    from specctl.terminal.work_progress import TerminalProgress

REPLICA = "specctl.commands.benching:replica"
"""What makes a replica that benchmarks, as `specctl.replicas.job.Job` names it."""


def run_field(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
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
    from specctl.terminal.work_progress import note

    begun: list[RunSet] = []
    try:
        return _run_field(
            profile, field, suite, plan, output, progress, begun, foreign_head=foreign_head, replication=replication
        )
    except KeyboardInterrupt:
        if output is None:
            note(progress.console, "interrupted")
        if begun and begun[0].runs:
            stopped(begun[0])
        raise


def _run_field(
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    plan: "Plan",
    output: OutputFile | None,
    progress: "TerminalProgress",
    begun: "list[RunSet]",
    *,
    foreign_head: bool,
    replication: Replication | None,
) -> "RunSet":
    """`run_field`, which notes in ``begun`` the results that fill."""
    from specctl.benchmark.plan import require_same
    from specctl.benchmark.runnable_papers import left_out_lines
    from specctl.observing.results import BASELINE, RESULTS, read_results
    from specctl.peers.process import PeerProcess
    from specctl.terminal.benchmark_progress import BenchProgress
    from specctl.terminal.work_progress import note, resumable

    console = progress.console
    earlier = None
    if output is not None and RESULTS.continues(output):
        earlier = read_results(output.path)
        require_same(earlier.header, profile, field, suite, plan, output.path)
    expected = len(suite.prompts) * len(field.candidates) * sum(plan.lengths) * plan.repeats
    for line in left_out_lines(plan.papers or {}):
        note(console, line)

    def watch(results: "RunSet", total: int) -> BenchProgress:
        begun.append(results)
        labels = [candidate.label for candidate in results.header.candidates]
        return BenchProgress(progress, labels, BASELINE, total, results.runs, not profile.sampling.temperature)

    if replication is not None:
        from specctl.benchmark.replicated import run_by_replicas

        setup = {"field": field, "suite": suite, "plan": plan, "foreign_head": foreign_head}
        others = [
            table.model_copy(update={"head": head})
            for table, heads in zip(field.drafts, field.heads, strict=True)
            for head in (*heads, None)
        ]
        start = partial(replication.start, profile, REPLICA, setup, progress, expected, others=others, exclusive=True)
        with resumable(console, output and output.path):
            return run_by_replicas(start, suite, plan, output, watch, earlier)
    with ExitStack() as stack:
        processes = {
            label: stack.enter_context(PeerProcess(label, launch.command)) for label, launch in field.launches.items()
        }
        pair = _load(profile, field, expected, progress, foreign_head=foreign_head)

        from specctl.benchmark.run import run_benchmark

        with resumable(console, output and output.path):
            results = run_benchmark(pair, profile, field, suite, plan, output, watch, progress, earlier, processes)
    if (seconds := pair.preparing_seconds) is not None:
        note(console, f"preparing passes took {seconds:.1f} s; no result includes this time")
    return results


def replica(
    *,
    number: int,
    profile: "Profile",
    field: "Field",
    suite: "Suite",
    plan: "Plan",
    foreign_head: bool,
    expected_tokens: int,
) -> "Answer":
    """A replica for `specctl.benchmark.replicated.run_by_replicas`.

    Args:
        number: from 0; the first one alone says what all have to say.
        profile, field, suite, plan, foreign_head: as in `run_field`.
        expected_tokens: number of tokens that it will generate.
    """
    from rich.console import Console

    from specctl.terminal.work_progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True, quiet=number > 0), False)
    pair = _load(profile, field, expected_tokens, silent, foreign_head=foreign_head)

    from specctl.benchmark.replicated import benchmarking

    return benchmarking(pair, profile, field, suite, plan)


def _load(
    profile: "Profile", field: "Field", expected_tokens: int, progress: "TerminalProgress", *, foreign_head: bool
) -> "Pair":
    """Load the models of all candidates."""
    from specctl.peers.names import ASSISTED

    return load(
        profile,
        progress.console,
        expected_tokens=expected_tokens,
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
