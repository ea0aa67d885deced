"""Runs a benchmark: candidates take turns on every prompt; each run is written as it ends, and files are resumed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from specctl.benchmark.bounds import find_bounds
from specctl.benchmark.plan import Plan
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import UsageError
from specctl.files import drop_torn_line
from specctl.models.loading.pair import Pair
from specctl.observing.facts import gather
from specctl.observing.field import Field
from specctl.observing.progress import Progress
from specctl.observing.results import RESULTS, Header, Run, RunSet, read_results
from specctl.observing.round_robin import RoundRobin
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite

_SAME = ("profile", "suite", "sampling", "candidates", "lengths", "repeats")


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
    path: Path | None,
    watch: Watch,
    progress: Progress,
    *,
    resume: bool = False,
) -> RunSet:
    """Run everything that the results file does not contain yet.

    Args:
        pair: has the drafts and heads of all candidates.
        profile: gives the sampling and prompt tables.
        field: the candidates and peers.
        suite: the prompts.
        plan: lengths and repeats.
        path: the results file; None to write none.
        watch: makes the watcher of the runs.
        progress: shows the work after the runs.
        resume: continue the file, if it exists.

    Raises:
        UsageError: the file holds another benchmark, or cannot be read or written.
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
    results = RunSet(header)
    if resume and path is not None and path.exists():
        results = read_results(path)
        _require_same(results.header, header, path)
        drop_torn_line(path)
    total = len(suite.prompts) * len(field.candidates) * len(plan.lengths) * plan.repeats
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    with RESULTS.writing(path, header, append=bool(results.runs)) as write:
        runs = RoundRobin(pair, results, suite.prompts, profile.sampling, prompt_format, write)
        with watch(results, total) as watcher:
            for run in runs.run(before=watcher.start):
                watcher.add(run)
        if plan.oracle:
            with progress.doing("computing the bounds"):
                find_bounds(pair, runs, suite.prompts, results, write)
    return results


def _require_same(old: Header, new: Header, path: Path) -> None:
    """Raise UsageError if a results file belongs to another benchmark."""
    for name in _SAME:
        if getattr(old, name) != getattr(new, name):
            raise UsageError(
                f"{path} holds another benchmark: its {name} differs",
                "resume with the same options, or start a new file",
            )
