"""Runs a benchmark: candidates take turns on every prompt; each run is written as it ends, and files are resumed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Protocol

from specctl.benchmark.bounds import find_bounds
from specctl.benchmark.plan import Plan
from specctl.decoding.prompt_format import PromptFormat
from specctl.models.loading.pair import Pair
from specctl.observing.facts import gather
from specctl.observing.field import Field
from specctl.observing.progress import Progress
from specctl.observing.results import RESULTS, Header, Run, RunSet
from specctl.observing.round_robin import RoundRobin
from specctl.outputs import OutputFile
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite


class Watcher(Protocol):
    """Receives the name of each run before its clock starts, and every finished run."""

    def start(self, candidate: str, prompt: str) -> None: ...

    def add(self, run: Run) -> None: ...


Watch = Callable[[RunSet, int], AbstractContextManager[Watcher]]
"""Makes a watcher from the results so far and the total number of runs."""


def run_benchmark(
    pair: Pair,
    profile: Profile,
    field: Field,
    suite: Suite,
    plan: Plan,
    output: OutputFile | None,
    watch: Watch,
    progress: Progress,
    earlier: RunSet | None = None,
) -> RunSet:
    """Run everything that the results file does not contain yet.

    Args:
        pair: has the drafts and heads of all candidates.
        profile: gives the sampling and prompt tables.
        field: the candidates and peers.
        suite: the prompts.
        plan: lengths and repeats.
        output: the results file; None to write none.
        watch: makes the watcher of the runs.
        progress: shows the work after the runs.
        earlier: what the results file contains, if it is continued.

    Raises:
        OutputError: the file cannot be written.
    """
    names = [draft.model for draft in field.drafts] if len(field.drafts) > 1 else []
    header = Header(
        **asdict(gather(pair, profile, suite)),
        candidates=field.candidates,
        repeats=plan.repeats,
        lengths=list(plan.lengths),
        oracle=plan.oracle,
        drafts=names,
    )
    results = earlier or RunSet(header)
    total = len(suite.prompts) * len(field.candidates) * len(plan.lengths) * plan.repeats
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    write = RESULTS.writing(output, header)
    runs = RoundRobin(pair, results, suite.prompts, profile.sampling, prompt_format, write)
    with watch(results, total) as watcher:
        for run in runs.run(before=watcher.start):
            watcher.add(run)
    if plan.oracle:
        with progress.doing("computing the bounds"):
            find_bounds(pair, runs, suite.prompts, results, write)
    return results
