"""Traces as an engine keeps draft tokens: those of a calibration, or its texts read once more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from specctl.decoding.answers import Answerer
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import decode_after
from specctl.errors import UsageError
from specctl.export.foreign_engine import Acceptance, Confidence, Engine
from specctl.jsonl import Record
from specctl.models.running.pair import Pair
from specctl.profile.schema import Profile
from specctl.prompts.suites import SuitePrompt
from specctl.replay.recording.collecting import answerer_of
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.replay.steps import DraftSteps
from specctl.replay.trace_files import TraceSet
from specctl.replay.traces import Trace

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text has to be read so that its trace is one of an engine.

    Attributes:
        acceptance: which draft tokens are kept; None in greedy decoding, where all engines agree.
        blocks: whether they are verified as a block.
        confidence: what a threshold is compared with; None for none.
    """

    acceptance: Acceptance | None = None
    blocks: bool = False
    confidence: Confidence | None = None


def reading_of(engine: Engine, sampling: Sampling) -> Reading:
    """How an engine reads texts that were sampled in this way, verified as blocks where it can.

    Raises:
        UsageError: its rule for sampling cannot be replayed.
    """
    if sampling.greedy:
        return Reading(confidence=engine.confidence)
    if engine.acceptance is None:
        raise UsageError(
            f"when sampling, {engine.name} {engine.own_rule}: it cannot be replayed",
            "export for greedy decoding (-t 0), or measure lengths in the engine itself",
        )
    # Signals are of the softmax at temperature 1, and an engine looks at the distribution that it draws from.
    known = engine.confidence if sampling.plain or engine.confidence in ("top ten", "top logit") else None
    return Reading(engine.acceptance, engine.blocks and sampling.in_blocks, known)


def traces_as(reading: Reading, traces: TraceSet, profile: Profile, pair: Callable[[], Pair]) -> TraceSet:
    """The texts of a calibration with what an engine would draft along them; thresholds are compared with ``top_prob``.

    When sampling, a text follows the target's law whatever the draft was. Given the text, the draft tokens of an engine
    that takes the likeliest are fixed, and one is kept where the text has the same; those of an engine that draws apart
    from the target do not depend on the text's own token. So both can be read along a text that is already there, and
    the rounds have the law of that engine's.

    Args:
        reading: the engine's.
        traces: of one draft model, with the records of the prompts.
        profile: that the traces were made with.
        pair: gives the loaded models, asked for only if texts have to be read again.
    """
    apart = reading.acceptance in ("likeliest", "matched")
    other_verdicts = reading.acceptance == "ratio" and reading.blocks != (traces.verification == "block")
    lacking = reading.confidence == "top ten" and not all(map(_has_top_probs, traces.traces))
    lacking = lacking or reading.confidence == "top logit"
    if apart or other_verdicts or lacking:
        traces = _read_again(reading, traces, profile, pair())
    if reading.confidence not in ("chosen", "top ten") or (reading.confidence == "chosen" and not reading.acceptance):
        return traces  # in greedy decoding the likeliest token is chosen
    return replace(traces, traces=[_judged_by(one, reading.confidence) for one in traces.traces])


def _has_top_probs(trace: Trace) -> bool:
    return trace.draft.along is not None and trace.draft.along.top_probs is not None


def _read_again(reading: Reading, traces: TraceSet, profile: Profile, pair: Pair) -> TraceSet:
    answerer = answerer_of(pair, profile)
    generator = torch.Generator(pair.target.device).manual_seed(profile.sampling.seed)
    by_prompt: dict[str, list[Trace]] = {}
    for trace in traces.traces:
        by_prompt.setdefault(trace.prompt, []).append(trace)
    found = []
    for prompt, turns in by_prompt.items():
        record = SuitePrompt(prompt, **traces.records[prompt]).record(1)
        found += _read_turns(reading, record, turns, traces.header.depth, answerer, pair, generator)
    return replace(traces, traces=found)


def _read_turns(
    reading: Reading,
    record: Record,
    turns: Sequence[Trace],
    depth: int,
    answerer: Answerer,
    pair: Pair,
    generator: torch.Generator,
) -> list[Trace]:
    """The turns of a record, read again."""
    sampling = replace(
        Sampling.measured(answerer.settings_of(record), pair), verification="block" if reading.blocks else "token"
    )
    matched = reading.acceptance == "matched"
    found: list[Trace] = []
    answers: list[str] = []
    for trace in turns:
        ids = answerer.prompt_ids(record, answers)
        if len(ids) != trace.prompt_tokens:
            raise UsageError(
                f"the prompt {trace.prompt} has {len(ids)} tokens, and had {trace.prompt_tokens} when it was recorded",
                "record a new trace",
            )
        answers.append(decode_after(pair.tokenizer, ids, trace.tokens, pair.eos))
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)
        with torch.inference_mode():
            draft = read_sequence(
                pair,
                ids,
                trace.tokens,
                trace.limit,
                depth,
                GREEDY if reading.acceptance == "likeliest" else sampling,
                generator,
                matched=matched,
                tops=reading.confidence == "top ten",
                logits=reading.confidence == "top logit",
            )
        found.append(replace(trace, draft=draft))
    return found


def _judged_by(trace: Trace, confidence: Confidence) -> Trace:
    """The trace with an engine's confidence in the place of the largest probability."""

    def judged(steps: DraftSteps) -> DraftSteps:
        if confidence == "chosen":
            return replace(steps, top_prob=steps.token_prob)
        assert steps.top_probs is not None
        return replace(steps, top_prob=[ten[0] / sum(ten) for ten in steps.top_probs])

    return replace(trace, draft=trace.draft.each(judged))
