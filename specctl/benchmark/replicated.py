"""A benchmark split by prompt over replicas on equal devices that nothing else uses."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

from specctl.benchmark.plan import Plan
from specctl.benchmark.run import Watch, header_of, passes_for
from specctl.decoding.prompt_format import PromptFormat
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.observing.findings import Failed
from specctl.observing.identity import compare
from specctl.observing.results import RESULTS, Header, Run, RunSet
from specctl.observing.round_robin import PROMPTS_BETWEEN_COSTS, RoundRobin, turns
from specctl.outputs import OutputFile
from specctl.replicas.job import Answer, ReplicaError
from specctl.replicas.replica import Replicas
from specctl.replicas.window import GivenUp, Task, in_order


def benchmarking(pair: Pair, plan: Plan) -> Answer:
    """What a replica does: all candidates take turns on prompts, and the costs of passes are measured now and then.

    Its answers hold the records of the results file, and the header that it would write, which names its devices.
    """
    passes = passes_for(pair, plan, plan.batch)
    header = header_of(pair, plan, batch=1 if passes is None else passes[-1].rows)
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
    replicas: Callable[[], AbstractContextManager[Replicas]],
    plan: Plan,
    output: OutputFile | None,
    watch: Watch,
    earlier: RunSet | None = None,
) -> RunSet:
    """Run everything that the results file does not contain yet, each prompt with all its candidates on one replica, as
    many of them as a replica runs in a turn.

    Args:
        replicas: starts replicas that answer as `benchmarking` says, each on devices of its own.
        plan, output, watch, earlier: as in `run_benchmark`.

    Raises:
        UsageError: the replicas, or those of the earlier benchmark, run on unlike devices.
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


def _tasks(plan: Plan, earlier: RunSet | None) -> list[Task[str]]:
    """What is left to ask, in the order of one process."""
    done: dict[tuple[str, int], list[Run]] = {}
    for run in earlier.runs if earlier is not None else ():
        done.setdefault((run.prompt, run.repeat), []).append(run)
    tasks, prompts = [], plan.suite.prompts
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
                tasks.append(Task(of, {"numbers": list(turn), "repeat": repeat, "done": there}))
    return tasks


def _uncompared(earlier: RunSet, runs: list[Run]) -> bool:
    """Whether a benchmark ended between a prompt's last run and its comparison with the baseline's tokens."""
    if earlier.header.sampling.get("temperature"):
        return False
    found = compare(replace(earlier, runs=runs))
    return any(difference is not None and run.difference is None for run, difference in found)


def _answers(replicas: Replicas, tasks: Iterable[Task[str]]) -> Iterator[dict[str, Any]]:
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
                f"the replicas' {what} are unlike ({_text(ours)} and {_text(theirs)}), so their times cannot be pooled",
                "run each on machines that are alike, into files of their own; bench --compare compares them",
            )


def _text(facts: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
