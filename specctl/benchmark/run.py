"""Runs a benchmark: candidates take turns on every prompt; each run is written as it ends, and files are resumed."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import MappingProxyType
from typing import Protocol

import torch

from specctl.batching.row_count import Batch, chosen_passes
from specctl.benchmark.plan import Plan
from specctl.benchmark.policy_bounds import find_bounds
from specctl.decoding.prompt_format import PromptFormat
from specctl.models.running.pair import Pair
from specctl.models.running.runner import RowPasses
from specctl.observing.findings import Failed
from specctl.observing.progress import Progress
from specctl.observing.results import RESULTS, Header, Run, RunSet
from specctl.observing.round_robin import RoundRobin
from specctl.observing.run_facts import SCIKIT_LEARN, device_name, gather, scikit_learn
from specctl.outputs import OutputFile
from specctl.peers.measured import MeasuredPeer
from specctl.peers.names import MOVING
from specctl.peers.process import PeerProcess


class Watcher(Protocol):
    """Receives the name of each run before its clock starts, every finished run, and why a peer cannot go on."""

    def start(self, candidate: str, prompt: str) -> None: ...

    def add(self, run: Run) -> None: ...

    def fail(self, text: str) -> None: ...


Watch = Callable[[RunSet, int], AbstractContextManager[Watcher]]
"""Makes a watcher from the results so far and the total number of runs."""


def run_benchmark(
    pair: Pair,
    plan: Plan,
    output: OutputFile | None,
    watch: Watch,
    progress: Progress,
    earlier: RunSet | None = None,
    processes: Mapping[str, PeerProcess] = MappingProxyType({}),
) -> RunSet:
    """Run everything that the results file does not contain yet.

    Args:
        pair: has the drafts and heads of all candidates.
        plan: what to run.
        output: the results file; None to write none.
        watch: makes the watcher of the runs.
        progress: shows the work after the runs.
        earlier: what the results file contains, if it is continued.
        processes: of the plan's launches, by label.

    Raises:
        OutputError: the file cannot be written.
        PeerError, UsageError: a peer cannot run these models.
    """
    peers: dict[str, MeasuredPeer] = {}
    for label, launch in plan.candidates.launches.items():
        with progress.doing(f"loading {label}"):
            peers[label] = MeasuredPeer(pair, launch, processes[label])
    batch = plan.batch if earlier is None else earlier.header.batch
    passes = passes_for(pair, plan, batch, progress.say)
    header = header_of(pair, plan, peers, 1 if passes is None else passes[-1].rows)
    results = earlier or RunSet(header)
    prompt_format = PromptFormat.of(pair.tokenizer, plan.profile.prompt)
    write = RESULTS.writing(output, header)
    with watch(results, plan.runs(len(results.header.candidates))) as watcher:

        def emit(record: object) -> None:
            write(record)
            if isinstance(record, Failed):
                watcher.fail(f"{record.reason}; {record.candidate} runs no more")

        prompts, sampling = plan.suite.prompts, plan.profile.sampling
        runs = RoundRobin(pair, results, prompts, sampling, prompt_format, emit, peers, passes)
        for run in runs.run(before=watcher.start):
            watcher.add(run)
    if plan.oracle:
        with progress.doing("computing the bounds"):
            find_bounds(pair, runs, plan.suite.prompts, results, write)
    return results


def passes_for(
    pair: Pair, plan: Plan, batch: Batch, warn: Callable[[str], None] = lambda _: None
) -> list[RowPasses] | None:
    """Passes over as many prompts at once as are asked for; None for one by one."""
    settings = [one.setting for one in plan.candidates.all if one.setting is not None]
    return chosen_passes(pair, batch, len(plan.suite.prompts), max(plan.lengths), settings, warn)


def header_of(
    pair: Pair, plan: Plan, peers: Mapping[str, MeasuredPeer] = MappingProxyType({}), batch: int = 1
) -> Header:
    """The header of a benchmark that begins now; ``peers`` are those in processes of their own, by label.

    A candidate that is to run eagerly beside others is left out where all do.
    """
    candidates = plan.candidates
    facts = gather(pair, plan.profile, plan.suite)
    for label, peer in peers.items():
        facts.versions[candidates.launches[label].setting.peer] = peer.version
        facts.devices[candidates.launches[label].setting.peer] = device_name(torch.device("cpu"), pair.thread_count)
    if any(candidate.peer in MOVING for candidate in candidates.all):
        facts.versions[SCIKIT_LEARN] = scikit_learn()
    return Header(
        **asdict(facts),
        candidates=[one for one in candidates.all if one.engine is None or not pair.is_eager],
        repeats=plan.repeats,
        lengths=list(plan.lengths),
        oracle=plan.oracle,
        papers=None if plan.papers is None else dict(plan.papers),
        batch=batch,
        drafts=candidates.names if len(candidates.drafts) > 1 else [],
    )
