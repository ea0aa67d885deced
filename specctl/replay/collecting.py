"""Collects a trace: prompts are answered and read once, then this machine's costs are measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session, build_drafter, readable
from specctl.errors import UsageError
from specctl.files import drop_torn_line
from specctl.models.loading.pair import Pair
from specctl.observing.answering import Answered, answer_each
from specctl.observing.facts import gather
from specctl.observing.progress import SILENT, Progress
from specctl.observing.results import Skipped
from specctl.policies import POLICIES, Signal
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite
from specctl.records import Completion
from specctl.replay.metering import PASSES, measure
from specctl.replay.recording import read_sequence
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceHeader, TraceSet, read_traces
from specctl.replay.traces import Trace

PROVENANCE = ("created", "profile", "suite", "sampling", "devices", "engines", "versions")
"""The facts of a run that a trace keeps."""


def collect_traces(
    pair: Pair,
    profile: Profile,
    suite: Suite,
    depth: int,
    heads: Sequence[str] = (),
    path: Path | None = None,
    progress: Progress = SILENT,
) -> TraceSet:
    """Trace every prompt that the file does not have yet, and measure the costs.

    Args:
        pair: with a draft.
        profile: the pair's; its policies play the runs. What they write does not depend on them (when sampling, its
            distribution does not).
        suite: the prompts.
        depth: the longest draft that the traces shall replay.
        heads: names of the draft's heads, where there are more than the profile's own.
        path: of the trace file; written as prompts finish, and continued if it exists. Without one nothing is kept.
        progress: receives counts of prompts and of measurements.

    Raises:
        UsageError: the file holds another calibration's trace, or cannot be written.
    """
    facts = gather(pair, profile, suite)
    provenance = {name: getattr(facts, name) for name in PROVENANCE}
    header = TraceHeader(depth, sorted(pair.eos), sorted(readable(pair)), provenance, list(heads))
    traces = TraceSet(header)
    if path is not None and path.exists():
        traces = _continued(path, header)
    fresh = not traces.traces and not traces.failures
    collection = _Collection(pair, profile, depth)
    overheads: list[list[float]] = []
    with TRACES.writing(path, header, append=not fresh) as write:
        with progress.counting("prompts", len(suite.prompts)) as advance:
            done = traces.records.keys() | traces.failures.keys()
            for found in answer_each(collection.answerer, suite.prompts, done, advance):
                record = found if isinstance(found, Skipped) else collection.traced(found)
                if isinstance(found, Answered):
                    overheads += map(_overheads, found.completions)
                traces.add(record)
                write(record)
        if traces.traces:
            if not overheads:  # every prompt was in the file: one more run shows the overhead of a round
                first = next(prompt for prompt in suite.prompts if prompt.id in traces.records)
                overheads = [_overheads(one) for one in collection.answerer.answer(first.record(1))]
            with progress.counting("costs", PASSES * len(pair.drafts)) as advance:
                costs = measure(
                    pair,
                    _contexts(traces.traces),
                    depth,
                    _signal_sets(readable(pair)),
                    Sampling.of(profile.sampling),
                    _medians(overheads, len(pair.drafts)),
                    advance,
                )
            traces.add(costs)
            write(costs)
    return traces


def _continued(path: Path, header: TraceHeader) -> TraceSet:
    """What an interrupted collection with the same header has left in a file."""
    traces = read_traces(path)
    created = traces.header.provenance.get("created")
    if traces.header != replace(header, provenance={**header.provenance, "created": created}):
        raise UsageError(
            f"{path} holds the trace of another calibration", "start a new file, or search in it with --from"
        )
    drop_torn_line(path)
    return traces


@dataclass(slots=True)
class _Collection:
    """Answers prompts with the profile's own policies and reads each answer with every draft."""

    pair: Pair
    profile: Profile
    depth: int

    @property
    def answerer(self) -> Answerer:
        """Stop strings are ignored: what ends a text early says nothing about where a draft should stop."""
        assert self.profile.draft is not None
        session = Session(self.pair, build_drafter(self.pair, self.profile.draft.setting))
        settings = self.profile.sampling.model_copy(update={"stop": []})
        return Answerer(session, PromptFormat.of(self.pair.tokenizer, self.profile.prompt), settings)

    def traced(self, found: Answered) -> TracedPrompt:
        """The traces of a prompt, one for each turn, with the record that makes it run again."""
        prompt = found.prompt
        record = {"category": prompt.category, "data": prompt.data, "chat": prompt.chat}
        turns = [self._trace(found, turn) for turn in range(len(found.completions))]
        return TracedPrompt(prompt.id, record, turns)

    def _trace(self, found: Answered, turn: int) -> Trace:
        completion, prompt = found.completions[turn], found.prompt
        settings = found.settings
        limit = min(settings.max_new_tokens, self.pair.room(completion.prompt))
        generator = torch.Generator(self.pair.target.device).manual_seed(completion.seed)
        text = completion.prompt, completion.tokens
        with torch.inference_mode():
            draft, chances = read_sequence(self.pair, *text, limit, self.depth, Sampling.of(settings), generator)
        origin = prompt.id, prompt.category, turn, completion.prompt_tokens, limit
        return Trace(*origin, list(completion.tokens), draft, completion.prefill_seconds * 1e3, chances)


def _contexts(traces: Sequence[Trace]) -> list[int]:
    """The shortest context of the traces, the longest, and one between, in tokens."""
    shortest = min(trace.prompt_tokens for trace in traces)
    longest = max(trace.prompt_tokens + len(trace.tokens) for trace in traces)
    return [shortest, (shortest + longest) // 2, longest]


def _signal_sets(known: frozenset[Signal]) -> list[frozenset[Signal]]:
    """The signals that policies read with their default settings, where all of them are known."""
    sets = dict.fromkeys(policy.signals_of({}) for policy in POLICIES.values())
    return [signals for signals in sets if signals <= known]


def _overheads(completion: Completion) -> list[float]:
    """Milliseconds of a round besides its two phases, for each level of a hierarchy that had rounds."""
    return list(_level_overheads(completion))


def _level_overheads(completion: Completion) -> Iterator[float]:
    whole, rounds = completion.total_seconds - completion.prefill_seconds, list(completion.rounds)
    while rounds:
        phases = sum(round_.draft_seconds + round_.verify_seconds for round_ in rounds)
        yield 1e3 * (whole - phases) / len(rounds)
        collected = [round_ for round_ in rounds if round_.inner]
        whole = sum(round_.draft_seconds for round_ in collected)
        rounds = [inner for round_ in collected for inner in round_.inner]


def _medians(overheads: Sequence[Sequence[float]], levels: int) -> list[float]:
    """The median overhead of each level; a level that had no rounds has that of the level above."""
    found: list[float] = []
    for level in range(levels):
        values = [each[level] for each in overheads if level < len(each)]
        found.append(median(values) if values else found[-1])
    return found
