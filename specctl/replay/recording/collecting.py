"""Collects traces: answers prompts live, reads each answer with every draft, and measures this machine's costs."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.composition import build_drafter, readable
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.predictors.predictor_checkpoint import disco_predictors
from specctl.models.running.pair import Pair
from specctl.observing.progress import SILENT, Advance, Progress
from specctl.observing.prompt_answers import AnsweredPrompt, answer_each, answer_prompt, prompt_writer
from specctl.observing.results import SignalBound, Skipped, gather
from specctl.outputs import OutputFile
from specctl.policies import POLICIES, Signal
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.records import Completion
from specctl.replay.bounds import LONGEST, play_best
from specctl.replay.costs import CostTable, signal_key
from specctl.replay.recording.metering import BATCH_PASSES, PASSES, measure, measure_batches, require_batches
from specctl.replay.recording.sequence_recording import read_sequence, verification_replayed
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, TraceSet, other_calibration
from specctl.replay.traces import Trace
from specctl.text_engine.dispatch import GivenUp, in_order
from specctl.text_engine.engine import Answer, TextEngine, Writer
from specctl.text_engine.here import HereEngine
from specctl.text_engine.row_count import Batch

PROVENANCE = ("created", "profile", "suite", "sampling", "devices", "engines", "versions")
"""The `Facts` of a run that a trace file contains."""


def collect_traces(
    pair: Pair,
    profile: Profile,
    suite: Suite,
    depth: int,
    heads: Sequence[str] = (),
    output: OutputFile | None = None,
    progress: Progress = SILENT,
    earlier: TraceSet | None = None,
    replicas: Callable[[], AbstractContextManager[TextEngine]] | None = None,
    batch: Batch = 1,
    sizes: Sequence[int] = (),
) -> TraceSet:
    """Trace every prompt that is missing in the file, and measure the costs.

    Args:
        pair: with a draft.
        profile: the pair's profile. Its policies run live, but the generated text does not depend on them; when
            sampling, the distribution of the text does not.
        suite: the prompts.
        depth: the longest draft to be replayed on the traces.
        heads: names of the draft's heads, if there are more than the profile's own.
        output: the trace file, written as prompts finish; None to write none.
        progress: receives counts of prompts and of measurements.
        earlier: the contents of a trace file that is continued.
        replicas: starts replicas that trace the prompts (`replica_of`) and end before costs are measured here; None to
            trace them in this process.
        batch: the batch size of answers in this process.
        sizes: numbers of texts, from 2 on, whose rounds are priced too.

    Raises:
        UsageError: the file contains another calibration's traces, or the pair cannot be recorded, or writes one text
            at a time where ``sizes`` are given.
        OutputError: the file cannot be written.
    """
    if sizes:
        require_batches(pair)
    sampling = Sampling.measured(profile.sampling, pair)
    facts, disco = gather(pair, profile, suite), [disco_predictors(named) for named in pair.named_predictors]
    header = TraceHeader(
        depth,
        sorted(pair.eos),
        sorted(readable(pair)),
        {name: getattr(facts, name) for name in PROVENANCE},
        list(heads),
        verification_replayed(sampling, len(pair.drafts)),
        disco if any(disco) else [],
    )
    traces = TraceSet(header)
    if output is not None and earlier is not None:
        _require_same(earlier.header, header, output.path)
        traces = earlier
    answerer = answerer_of(pair, profile)
    overheads: list[list[float]] = []
    write = TRACES.writing(output, header)
    done = traces.records.keys() | traces.failures.keys()
    left = sum(prompt.id not in done for prompt in suite.prompts)
    with ExitStack() as stack:
        if replicas is not None and left:
            started = stack.enter_context(replicas())
            advance = stack.enter_context(progress.counting("prompts", len(suite.prompts)))
            records = _by_replicas(started, suite.prompts, done, advance)
        else:
            engine = _engine(pair, profile, answerer, batch, left, progress.say)
            advance = stack.enter_context(progress.counting("prompts", len(suite.prompts)))
            records = _here(pair, answer_each(engine, suite.prompts, done, advance), depth, overheads)
        for record in records:
            traces.add(record)
            write(record)
    if not traces.traces:
        return traces
    if not overheads:  # every prompt was in the file, so one more run measures the overhead of a round
        first = next(prompt for prompt in suite.prompts if prompt.id in traces.records)
        overheads = [_overheads(completion) for completion in answerer.answer(first.record(1))]
    with progress.counting("costs", PASSES * len(pair.drafts) + BATCH_PASSES * len(sizes)) as advance:
        sets, levels = _signal_sets(readable(pair)), _medians(overheads, len(pair.drafts))
        costs = measure(pair, _contexts(traces.traces), depth, sets, sampling, levels, advance)
        if sizes:
            read = [signals for signals in sets if signals and signal_key(signals) in costs.signal_ms]
            costs = replace(costs, batches=measure_batches(pair, sizes, costs, read, sampling, advance))
    traces.add(costs)
    write(costs)
    return traces


def _engine(
    pair: Pair, profile: Profile, alone: Answerer, batch: Batch, prompts: int, warn: Callable[[str], None]
) -> HereEngine:
    """Answers prompts in this process; ``alone`` answers if prompts run one at a time."""
    assert profile.draft is not None
    limit, settings = profile.sampling.max_new_tokens, [profile.draft.setting]

    def writer(row: Pair) -> Writer:
        answerer = alone if row is pair else answerer_of(row, profile)
        return prompt_writer(lambda _: answerer)

    return HereEngine.of(pair, writer, batch, prompts, limit, settings, warn)


def _here(
    pair: Pair, found: Iterable[AnsweredPrompt | Skipped], depth: int, overheads: list[list[float]]
) -> Iterator[TracedPrompt | Skipped]:
    """Trace answers; the ``overheads`` of their rounds are added."""
    for one in found:
        if isinstance(one, AnsweredPrompt):
            overheads += map(_overheads, one.completions)
        yield one if isinstance(one, Skipped) else _traced(pair, one, depth)


def _by_replicas(
    replicas: TextEngine, prompts: Sequence[SuitePrompt], done: Container[str], advance: Advance
) -> Iterator[TracedPrompt | Skipped]:
    """The replicas' traces, in the order of the prompts."""
    tasks = (
        (prompt, None if prompt.id in done else {"number": number, "prompt": prompt})
        for number, prompt in enumerate(prompts)
    )
    for prompt, answer in in_order(replicas, tasks):
        if isinstance(answer, GivenUp):
            answer = {"record": Skipped(prompt.id, f"no replica survived it; {answer.why}"), "tokens": 0}
        if answer is not None:
            yield answer["record"]
        advance(answer["tokens"] if answer is not None else 0)


def replica_of(pair: Pair, profile: Profile, depth: int) -> Answer:
    """The work of a replica: it traces a prompt, or returns the reason why it cannot."""
    answerer = answerer_of(pair, profile)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        found = answer_prompt(answerer, question["prompt"], question["number"])
        if isinstance(found, Skipped):
            return {"record": found, "tokens": 0}
        tokens = sum(len(completion.tokens) for completion in found.completions)
        return {"record": _traced(pair, found, depth), "tokens": tokens}

    return answer


def _require_same(old: TraceHeader, new: TraceHeader, path: Path) -> None:
    """Raise UsageError if a trace belongs to another calibration; start times may differ."""
    created = old.provenance.get("created")
    if old != replace(new, provenance={**new.provenance, "created": created}):
        raise other_calibration(path)


def answerer_of(pair: Pair, profile: Profile) -> Answerer:
    """Answers with the profile's own policies, without stop strings."""
    assert profile.draft is not None
    session = Session(pair, build_drafter(pair, profile.draft.setting))
    settings = profile.sampling.model_copy(update={"stop": []})
    return Answerer(session, PromptFormat.of(pair.tokenizer, profile.prompt), settings)


def _traced(pair: Pair, answered: AnsweredPrompt, depth: int) -> TracedPrompt:
    prompt = answered.prompt
    record = {"category": prompt.category, "data": prompt.data}
    return TracedPrompt(prompt.id, record, trace_answers(pair, answered, depth))


def trace_answers(pair: Pair, answered: AnsweredPrompt, depth: int) -> list[Trace]:
    """Read every answer to a prompt with every draft.

    Args:
        pair: with a draft.
        answered: a prompt with its answers.
        depth: the longest draft to be replayed.

    Raises:
        UsageError: the pair cannot be recorded.
    """
    traces, settings, prompt = [], answered.settings, answered.prompt
    for turn, done in enumerate(answered.completions):
        limit = min(settings.max_new_tokens, pair.room(done.prompt))
        generator = torch.Generator(pair.target.device).manual_seed(done.seed)
        sampling = Sampling.measured(settings, pair)
        with torch.inference_mode():
            draft = read_sequence(pair, done.prompt, done.tokens, limit, depth, sampling, generator)
        origin = prompt.id, prompt.category, turn, done.prompt_tokens, limit
        prefill_ms = done.prefill_seconds * 1e3
        traces.append(Trace(*origin, list(done.tokens), draft, prefill_ms, prompt_ids=list(done.prompt)))
    return traces


def _contexts(traces: Sequence[Trace]) -> list[int]:
    """The shortest, middle and longest context of the traces, in tokens."""
    shortest = min(trace.prompt_tokens for trace in traces)
    longest = max(trace.prompt_tokens + len(trace.tokens) for trace in traces)
    return [shortest, (shortest + longest) // 2, longest]


def _signal_sets(known: frozenset[Signal]) -> list[frozenset[Signal]]:
    """The set of signals that each policy reads by default, if all of them are known."""
    sets = dict.fromkeys(policy.signals_of({}) for policy in POLICIES.values())
    return [signals for signals in sets if signals <= known]


def _overheads(completion: Completion) -> list[float]:
    """Milliseconds of a round outside its two phases, for each level that had rounds, from the top down."""
    overheads = []
    seconds, rounds = completion.total_seconds - completion.prefill_seconds, list(completion.rounds)
    while rounds:
        phases = sum(round_.draft_seconds + round_.verify_seconds for round_ in rounds)
        overheads.append(1e3 * (seconds - phases) / len(rounds))
        collected = [round_ for round_ in rounds if round_.inner]
        seconds = sum(round_.draft_seconds for round_ in collected)
        rounds = [inner for round_ in collected for inner in round_.inner]
    return overheads


def _medians(overheads: Sequence[Sequence[float]], levels: int) -> list[float]:
    """The median overhead of each level; a level without rounds gets the value of the level above."""
    medians: list[float] = []
    for level in range(levels):
        values = [each[level] for each in overheads if level < len(each)]
        medians.append(median(values) if values else medians[-1])
    return medians


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy output."""

    # prompt, category: the prompt's id and category
    prompt: str
    category: str
    ids: list[int]  # token ids of the prompt
    tokens: list[int]  # token ids of the output
    limit: int  # the token limit of the output


def signal_bound(pair: Pair, texts: Iterable[Text], costs: CostTable) -> SignalBound:
    """Read each output with the draft, and replay the best stopping rule of each category on the draft's signals.

    Args:
        pair: with a draft; only its first draft is used.
        texts: at least one.
        costs: of the first draft and the target.
    """
    traces = [greedy_trace(pair, text) for text in texts]
    replays = play_best(traces, costs, frozenset(pair.eos))
    return SignalBound(
        prompts=len({trace.prompt for trace in traces}),
        tokens=sum(replay.tokens for replay in replays),
        drafted=sum(sum(replay.top.drafted) for replay in replays),
        passes=sum(len(replay.top.starts) for replay in replays),
    )


def greedy_trace(pair: Pair, text: Text) -> Trace:
    """The trace of a text with the first draft."""
    unused = torch.Generator(pair.target.device)  # nothing is drawn in greedy decoding
    first = replace(pair, drafts=pair.drafts[:1], named_predictors=({},))
    with torch.inference_mode():
        draft = read_sequence(first, text.ids, text.tokens, text.limit, LONGEST, Sampling(), unused)
    origin = text.prompt, text.category, 0, len(text.ids), text.limit
    return Trace(*origin, text.tokens, draft, 0.0)
