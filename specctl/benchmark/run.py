"""Runs a benchmark: candidates in turn on every prompt, written as they finish and continued where they stopped."""

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
from specctl.observing.entrants import Field
from specctl.observing.facts import gather
from specctl.observing.progress import Progress
from specctl.observing.results import RESULTS, Header, Run, RunSet, read_results
from specctl.observing.round_robin import RoundRobin
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite

_SAME = ("profile", "suite", "sampling", "entrants", "lengths", "repeats")


class Watcher(Protocol):
    """Receives what runs now, before its clock starts, and every finished run."""

    def start(self, entrant: str, prompt: str) -> None: ...

    def add(self, run: Run) -> None: ...


Watch = Callable[[RunSet, int], AbstractContextManager[Watcher]]
"""Makes a watcher of results so far and the number of runs in all."""


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
    """Run what the results file does not have yet.

    Args:
        pair: with the field's drafts and heads.
        profile: whose sampling and prompt tables are in force.
        field: what competes.
        suite: the prompts.
        plan: lengths and repeats.
        path: of the results file; None to keep nothing.
        watch: makes who watches the runs.
        progress: receives what comes after the runs.
        resume: continue the file, if it exists.

    Raises:
        UsageError: the file holds another benchmark, or cannot be read or written.
    """
    names = [draft.model for draft in field.drafts] if len(field.drafts) > 1 else []
    header = Header(
        **asdict(gather(pair, profile, suite)),
        entrants=field.entrants,
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
    total = len(suite.prompts) * len(field.entrants) * len(plan.lengths) * plan.repeats
    prompt_format = PromptFormat.of(pair.tokenizer, profile.prompt)
    with RESULTS.writing(path, header, append=bool(results.runs)) as write:
        runs = RoundRobin(pair, results, suite.prompts, profile.sampling, prompt_format, write)
        with watch(results, total) as watcher:
            for run in runs.run(before=watcher.start):
                watcher.add(run)
        if plan.oracle:
            with progress.doing("working out the bounds"):
                find_bounds(pair, runs, suite.prompts, results, write)
    return results


def _require_same(old: Header, new: Header, path: Path) -> None:
    """Two benchmarks must not be mixed in one file."""
    for name in _SAME:
        if getattr(old, name) != getattr(new, name):
            raise UsageError(
                f"{path} holds another benchmark: its {name} differs",
                "resume with the same options, or start a new file",
            )
