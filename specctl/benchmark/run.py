"""Runs the candidates of a benchmark in turns, in this process or prompt by prompt in replicas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from specctl.benchmark.cost_model import bare_model, fit
from specctl.benchmark.plan import Plan
from specctl.benchmark.progress import BenchProgress
from specctl.decoding.draft_tokens import read_along
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot
from specctl.observing.progress import Progress
from specctl.observing.results import (
    BASELINE,
    RESULTS,
    SCIKIT_LEARN,
    Failed,
    Header,
    OraclePasses,
    Run,
    RunSet,
    Stretches,
    compare,
    device_name,
    gather,
    scikit_learn,
)
from specctl.observing.round_robin import PROMPTS_BETWEEN_COSTS, Emit, RoundRobin, turns
from specctl.outputs import OutputFile
from specctl.peers.engines import MOVING
from specctl.peers.process import MeasuredPeer, PeerProcess
from specctl.prompts.suites import SuitePrompt
from specctl.replay.bounds import LONGEST, oracle
from specctl.replay.pearl import cut
from specctl.replay.recording.collecting import Text, greedy_trace, signal_bound
from specctl.text_engine.dispatch import Asked, GivenUp, in_order
from specctl.text_engine.engine import Answer, TextEngine
from specctl.text_engine.job import ReplicaError
from specctl.text_engine.row_count import Batch, chosen_passes

Watch = Callable[[RunSet, int], BenchProgress]
"""Makes the progress table from the results so far and the total number of runs."""


def run_benchmark(
    pair: Pair,
    plan: Plan,
    output: OutputFile | None,
    watch: Watch,
    progress: Progress,
    earlier: RunSet | None = None,
    processes: Mapping[str, PeerProcess] = MappingProxyType({}),
) -> RunSet:
    """Run everything that is missing in the results file.

    Args:
        pair: has the drafts and heads of all candidates.
        plan: what to run.
        output: the results file; None to write none.
        watch: makes the watcher of the runs.
        progress: shows the work after the runs.
        earlier: the contents of a results file that is continued.
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
    header = header_of(pair, plan, peers, 1 if passes is None else passes[-1].slots)
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
) -> list[Passes] | None:
    """Batched passes over the requested number of prompts; None for one at a time."""
    settings = [one.setting for one in plan.candidates.all if one.setting is not None]
    return chosen_passes(pair, batch, len(plan.suite.prompts), max(plan.lengths), settings, warn)


def header_of(
    pair: Pair, plan: Plan, peers: Mapping[str, MeasuredPeer] = MappingProxyType({}), batch: int = 1
) -> Header:
    """The header of a benchmark that begins now; ``peers`` are those in processes of their own, by label.

    An additional eager candidate is left out if all candidates run eagerly.
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


def benchmarking(pair: Pair, plan: Plan) -> Answer:
    """The work of a replica: all candidates take turns on prompts, and pass times are measured now and then.

    Its answers hold records of the results file and a header, which names the replica's devices.
    """
    passes = passes_for(pair, plan, plan.batch)
    header = header_of(pair, plan, batch=1 if passes is None else passes[-1].slots)
    prompt_format = PromptFormat.of(pair.tokenizer, plan.profile.prompt)
    records: list[object] = []
    results = RunSet(header)
    prompts, sampling = plan.suite.prompts, plan.profile.sampling
    runs = RoundRobin(pair, results, prompts, sampling, prompt_format, records.append, passes=passes)
    runs.begin()
    served = 0

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal served
        results.runs[:] = question["done"]
        done = {run.key for run in results.runs}
        for _ in runs.run_prompts(question["numbers"], question["repeat"], done):
            pass
        served += (count := len(question["numbers"]))
        if served % PROMPTS_BETWEEN_COSTS < count:
            runs.measure_costs()
        found = {"header": header, "records": list(records)}
        records.clear()
        return found

    return answer


def run_by_replicas(
    replicas: Callable[[], AbstractContextManager[TextEngine]],
    plan: Plan,
    output: OutputFile | None,
    watch: Watch,
    earlier: RunSet | None = None,
) -> RunSet:
    """Run everything that is missing in the results file, each prompt with all its candidates on one replica.

    Args:
        replicas: starts replicas that run `benchmarking`, each on devices of its own.
        plan, output, watch, earlier: see `run_benchmark`.

    Raises:
        UsageError: the replicas' devices differ from each other or from those of the earlier benchmark.
        ReplicaError: no replica survived a prompt, or none is left.
    """
    tasks = _tasks(plan, earlier)
    if not tasks:
        assert earlier is not None, "a suite has prompts"
        return earlier
    with replicas() as started:
        answers = _answers(started, tasks)
        first = next(answers)
        header: Header = first["header"]
        results = earlier or RunSet(header)
        write = RESULTS.writing(output, header)
        with watch(results, plan.runs(len(results.header.candidates))) as watcher:
            for answer in chain([first], answers):
                _require_equal(results.header, answer["header"])
                for record in answer["records"]:
                    results.add(record)
                    write(record)
                    if isinstance(record, Run):
                        watcher.add(record)
                    elif isinstance(record, Failed):
                        watcher.fail(f"{record.reason}; {record.candidate} runs no more")
    return results


def _tasks(plan: Plan, earlier: RunSet | None) -> list[Asked[str]]:
    """The missing prompts, in the order of a single process."""
    done: dict[tuple[str, int], list[Run]] = {}
    for run in earlier.runs if earlier is not None else ():
        done.setdefault((run.prompt, run.repeat), []).append(run)
    tasks: list[Asked[str]] = []
    prompts = plan.suite.prompts
    candidates = 1 if earlier is None else len(earlier.header.candidates)
    assert plan.batch != "auto", "each replica would take another number"
    for repeat in range(plan.repeats):
        for turn in turns(len(prompts), plan.batch):
            left, there = [], []
            for number in turn:
                if earlier is not None and prompts[number].id in earlier.skipped:
                    continue
                runs = done.get((prompts[number].id, repeat), [])
                there += runs
                if len(runs) < candidates * len(plan.lengths) or (earlier is not None and _uncompared(earlier, runs)):
                    left.append(number)
            if left:
                of = ", ".join(prompts[number].id for number in left)
                tasks.append((of, {"numbers": list(turn), "repeat": repeat, "done": there}))
    return tasks


def _uncompared(earlier: RunSet, runs: list[Run]) -> bool:
    """Whether a benchmark was interrupted between a prompt's last run and the comparison with the baseline's tokens."""
    if earlier.header.sampling.get("temperature"):
        return False
    found = compare(replace(earlier, runs=runs))
    return any(difference is not None and run.difference is None for run, difference in found)


def _answers(replicas: TextEngine, tasks: Iterable[Asked[str]]) -> Iterator[dict[str, Any]]:
    for prompt, answer in in_order(replicas, tasks):
        if isinstance(answer, GivenUp):
            raise ReplicaError(
                f"no replica survived prompt {prompt}; {answer.why}", "what was finished is kept; --resume goes on"
            )
        yield answer


def _require_equal(first: Header, other: Header) -> None:
    """Raise UsageError where times of two replicas cannot be pooled."""
    for what in ("devices", "engines", "versions"):
        ours, theirs = getattr(first, what), getattr(other, what)
        if ours != theirs:
            raise UsageError(
                f"the replicas' {what} differ ({_text(ours)} and {_text(theirs)}), so their times cannot be pooled",
                "run each on machines that are alike, into files of their own; bench --compare compares them",
            )


def _text(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def find_bounds(pair: Pair, runs: RoundRobin, prompts: Iterable[SuitePrompt], results: RunSet, emit: Emit) -> None:
    """Add bounds to finished results: Theorem 4.1's oracle, the first draft's stretches and the signal bound.

    Bounds that the results already contain are kept.
    """
    if not pair.drafts:
        return
    baselines = list(_baselines(prompts, results))
    with torch.inference_mode():
        for prompt, run in baselines:
            for found in _oracle(pair, runs.prompt_ids(prompt, run), run, results):
                results.add(found)
                emit(found)
    model = fit(results) or (bare_model(results.costs) if results.costs else None)
    if results.signal_bound is not None or model is None or not baselines:
        return
    texts = [
        Text(prompt.id, prompt.category, ids, list(turn.tokens), min(run.length, pair.room(ids)))
        for prompt, run in baselines
        for ids, turn in zip(runs.prompt_ids(prompt, run), run.turns, strict=True)
        if pair.drafts[0].room(len(ids))
    ]
    if not texts:  # no prompt fits the draft's context
        return
    bound = signal_bound(pair, texts, model.table(LONGEST))
    results.add(bound)
    emit(bound)


def _baselines(prompts: Iterable[SuitePrompt], results: RunSet) -> Iterator[tuple[SuitePrompt, Run]]:
    """Each prompt with the baseline's run at the first length limit; prompts without one are left out."""
    first = results.header.lengths[0]
    runs: dict[str, Run] = {}
    for run in results.of(BASELINE):
        if run.length == first:
            runs.setdefault(run.prompt, run)
    return ((prompt, runs[prompt.id]) for prompt in prompts if prompt.id in runs)


def _oracle(pair: Pair, prompt_ids: list[list[int]], run: Run, results: RunSet) -> Iterator[OraclePasses | Stretches]:
    """Oracle records and stretches of a run's text that the results lack; needs one reading by the first draft.

    The fewest target passes (SpecDec++, arXiv 2405.19715, Theorem 4.1) are, of a draft model, in each turn one more
    than the number of positions at which draft and target disagree. A draft head, whose tokens depend on where a round
    begins, has no stretches.
    """
    draft, known = pair.drafts[0], run.prompt in results.oracle
    texts = list(zip(prompt_ids, run.turns, strict=True))
    if draft.drafts_by_round:
        if not known:
            limits = [min(run.length, pair.room(ids)) for ids in prompt_ids]
            traces = (
                greedy_trace(pair, Text(run.prompt, "", ids, list(turn.tokens), limit))
                for (ids, turn), limit in zip(texts, limits, strict=True)
            )
            yield OraclePasses(run.prompt, sum(len(oracle(trace).top.starts) for trace in traces))
        return
    if known and run.prompt in results.stretches:
        return
    wrong = [_disagreements(draft, ids, turn.tokens) for ids, turn in texts]
    if not known:
        yield OraclePasses(run.prompt, sum(len(places) + 1 for places in wrong))
    if run.prompt not in results.stretches:
        yield Stretches(
            run.prompt, [cut(places, len(turn.tokens)) for places, (_, turn) in zip(wrong, texts, strict=True)]
        )


def _disagreements(draft: Slot, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The positions of a text at which the draft's likeliest token differs, or which exceed the draft's context."""
    guesses: list[int] = []
    within = tokens[: draft.room(len(prompt))]
    for _, (forward,) in read_along([draft], prompt, within) if within else ():
        guesses += forward.logits.argmax(-1).tolist()
    wrong = [place for place, (guess, token) in enumerate(zip(guesses, within, strict=True)) if guess != token]
    return [*wrong, *range(len(within), len(tokens))]
