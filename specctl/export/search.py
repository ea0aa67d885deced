"""The search for an engine's fastest setting, by replaying and pricing the engine's own rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np
import torch

from specctl.calibration.search import Ranked, Score, choose, score, with_batches
from specctl.decoding.answers import Answerer
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import decode_after
from specctl.errors import UsageError
from specctl.export.engines import (
    ADAPTIVE_VERIFICATION,
    LONGEST,
    THRESHOLD,
    UNCAPPED,
    Acceptance,
    Confidence,
    Engine,
    Pairing,
    Written,
    length_of,
    rule_space,
    words_of,
)
from specctl.jsonl import Record
from specctl.models.running.pair import Pair
from specctl.policies import NONE, Rule, Setting, StoppingPolicy
from specctl.policies.base import read
from specctl.policies.foreign_rules import AcceptanceEstimate
from specctl.profile.schema import Profile
from specctl.prompts.suites import SuitePrompt
from specctl.records import DraftStep, Round, StopReason
from specctl.replay.costs import Clock, CostTable
from specctl.replay.play import rounds
from specctl.replay.recording.collecting import answerer_of
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.replay.trace_files import TraceSet
from specctl.replay.traces import DraftSteps, Recorded, Trace


@dataclass(slots=True)
class AdaptiveVerification(Rule):
    """The number of draft tokens that vLLM 0.33.0 verifies (vllm/v1/worker/gpu/spec_decode/adaptive_verification.py).

    K tokens are drafted, and the first n of them verified. n maximises (1 + S_1 + ... + S_n) / (D + V(n)), with the
    acceptance estimated for the draft *before*, because the newest one is not on the host yet. All tokens of a text's
    first draft count as certain.

    Args:
        draft: milliseconds of a whole draft.
        verify: milliseconds of target passes over a draft of 0, 1, ... K tokens.
    """

    draft: float
    verify: Sequence[float]
    _estimate: AcceptanceEstimate = field(init=False)
    _survival: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._estimate = AcceptanceEstimate(self.whole)
        self.reset()

    @property
    def whole(self) -> int:
        """The number of drafted tokens."""
        return len(self.verify) - 1

    def reset(self) -> None:
        self._survival = [1.0] * self.whole

    def draft_limit(self) -> int:
        emitted = accumulate(self._survival, initial=1.0)
        rates = [tokens / (self.draft + ms) for tokens, ms in zip(emitted, self.verify, strict=True)]
        return rates.index(max(rates))

    def observe(self, round_: Round) -> None:
        self._estimate.learn([read(step.top_prob) for step in round_.steps], round_.accepted)

    def look(self, draft: Recorded, start: int, eos: frozenset[int]) -> None:
        """Estimate the acceptance of all tokens drafted in the round that begins at a position, verified or not.

        Draft tokens after the end of a sequence, or after the recorded ones, count as not accepted.
        """
        found: list[float] = []
        for position in range(self.whole):
            step = _step(draft, start, position + 1)
            if step is None:
                break
            found.append(self._estimate.at(position, read(step.top_prob)))
            if step.token in eos:
                break
        self._survival = [*accumulate(found, mul), *[0.0] * (self.whole - len(found))]


def _step(draft: Recorded, start: int, index: int) -> DraftStep | None:
    try:
        return draft.step(start, index)
    except UsageError:
        return None


def score_in(
    engine: Engine, setting: Setting, traces: TraceSet, prompts: Sequence[str], costs: CostTable
) -> Score | None:
    """Score a setting on prompts; None if it drafts more tokens than the traces or the costs cover.

    Unlike `specctl.calibration.search.score` it counts the draft's passes as the engine makes them: also for a token
    that is dropped because it stopped the draft, for tokens after an end-of-sequence token where the engine does not
    look for one, for tokens that are not verified, and the further passes of `Engine`.

    Args:
        engine: the engine with this rule.
        setting: of a single draft, see `specctl.export.engines`.
        traces: with the engine's rule for accepting draft tokens.
        prompts: ids.
        costs: of a draft alone.
    """
    eos, clock, most = frozenset(traces.header.eos), costs.clock(setting.signals), costs.lengths[-1]
    policy = _policy(setting, clock, int(costs.contexts[0]))
    sums = {prompt: np.zeros(5) for prompt in prompts}  # tokens, ms, rounds, drafted and accepted tokens
    for trace in traces.of(prompts):
        start = 0
        try:
            for round_ in rounds(policy, trace, eos, clock):
                room = trace.limit - start - 1
                width = _verified(engine, setting, round_, room)
                passes = width + _further(engine, setting, round_, room)
                if isinstance(policy, AdaptiveVerification):
                    passes = min(policy.whole, room)
                    policy.look(trace.draft, start, eos)
                if width > most:
                    return None
                context = trace.prompt_tokens + start
                ms = 1e3 * (clock(context, passes, 0)[0] + clock(context, width, 0)[1]) + costs.overhead_ms
                if setting.drafts and not width and room > 0:
                    ms += 1e3 * engine.passes_when_idle * (clock(context, 1, 0)[0] + clock(context, 0, 0)[1])
                sums[trace.prompt] += (len(round_.emitted), ms, 1, round_.drafted, round_.accepted)
                start += len(round_.emitted)
        except UsageError:  # a draft is longer than the recorded ones
            return None
    columns = np.stack([sums[prompt] for prompt in prompts], axis=1)  # (5, P)
    return Score(setting, *columns)


def _policy(setting: Setting, clock: Clock, context: int) -> StoppingPolicy:
    """The policy that stops drafts in the engine."""
    if setting.policy != ADAPTIVE_VERIFICATION.policy:
        return setting.build()
    times = [clock(context, count, 0) for count in range(setting.longest_draft + 1)]
    return AdaptiveVerification(times[-1][0], [verify for _, verify in times])


def _verified(engine: Engine, setting: Setting, round_: Round, room: int) -> int:
    """The number of verified draft tokens; after an end of sequence, it includes tokens up to the longest draft."""
    longest = setting.longest_draft
    if round_.stop is StopReason.EOS and not engine.stops_at_eos and longest < UNCAPPED:
        return min(longest, room)
    return round_.drafted


def _further(engine: Engine, setting: Setting, round_: Round, room: int) -> int:
    """The draft's passes beyond one per verified token."""
    if not setting.drafts or room < 1:
        return 0
    dropped = round_.stop is StopReason.POLICY and not setting.all_values.get("keep_trigger", True)
    full = round_.fully_accepted and round_.drafted > 0
    return engine.further_passes + dropped + engine.passes_when_full * full


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read a text so that its trace is that of an engine."""

    # the acceptance rule; None in greedy decoding, where all engines agree
    acceptance: Acceptance | None = None
    blocks: bool = False  # whether they are verified as a block
    confidence: Confidence | None = None  # the signal compared with a threshold; None for none


def reading_of(engine: Engine, sampling: Sampling) -> Reading:
    """The reading of an engine for texts sampled in this way, with block verification where it is supported.

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
    # Recorded signals are of the softmax at temperature 1; an engine uses the distribution it samples from.
    known = engine.confidence if sampling.plain or engine.confidence in ("top ten", "top logit") else None
    return Reading(engine.acceptance, engine.blocks and sampling.in_blocks, known)


def traces_as(reading: Reading, traces: TraceSet, profile: Profile, pair: Callable[[], Pair]) -> TraceSet:
    """The texts of a calibration with the drafts of an engine; thresholds are compared with ``top_prob``.

    When sampling, a text follows the target's distribution whatever the draft was. Given the text, the draft tokens of
    an engine that takes the likeliest are fixed, and one is kept where the text has the same. Those of an engine that
    draws independently of the target do not depend on the text's own token. So both can be read along an existing text,
    and the rounds follow the distribution of that engine's.

    Args:
        reading: the engine's.
        traces: of one draft model, with the records of the prompts.
        profile: the profile of the traces.
        pair: loads the models; called only if texts must be read again.
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
    """The trace with an engine's confidence in place of the largest probability."""

    def judged(steps: DraftSteps) -> DraftSteps:
        if confidence == "chosen":
            return replace(steps, top_prob=steps.token_prob)
        assert steps.top_probs is not None
        return replace(steps, top_prob=[ten[0] / sum(ten) for ten in steps.top_probs])

    return replace(trace, draft=trace.draft.each(judged))


@dataclass(frozen=True, slots=True)
class BatchLength:
    """The fastest length for a batch size, on the prompts reported on; none if no draft pays."""

    rows: int
    found: Ranked


def batch_lengths(
    engine: Engine,
    traces: TraceSet,
    prompts: tuple[Sequence[str], Sequence[str]],
    sizes: Sequence[int],
    costs: CostTable,
    advance: Callable[[], None] = lambda: None,
) -> list[BatchLength]:
    """The fastest length for each batch size, found by replay; ``none`` if that is within one standard error.

    Args:
        engine: an engine with one draft length for all texts of a batch.
        traces: with the engine's acceptance rule and confidence.
        prompts: ids to choose on and to report on.
        sizes: numbers of texts, each at least 2.
        costs: of the engine or of this machine, with ``batches`` of these numbers.
        advance: called after each length.
    """
    chosen_on, reported_on = prompts
    costs = with_further_passes(engine, costs)
    lengths = engine.lengths(traces.header.depth)
    settings = [NONE, *(Setting.of({"name": "constant", "draft_length": length}) for length in lengths)]
    found = []
    for rows in sizes:
        scores = []
        for setting in settings:
            scores.append(score(setting, traces, chosen_on, costs, rows))
            advance()
        chosen = choose(scores).chosen.setting
        baseline = score(NONE, traces, reported_on, costs, rows)
        best = score(chosen, traces, reported_on, costs, rows)
        found.append(BatchLength(rows, Ranked(best, best.speedup(baseline))))
    return found


def with_further_passes(engine: Engine, costs: CostTable) -> CostTable:
    """Costs that add the draft passes without a draft token to each verification."""
    if not engine.further_passes:
        return costs
    dearer = costs.verify_ms.copy()
    dearer[:, 1:] += engine.further_passes * costs.at(float(costs.contexts[0]))[0]
    batches: Mapping[int, CostTable] = costs.batches
    more = {rows: with_further_passes(engine, table) for rows, table in batches.items()}
    return replace(costs, verify_ms=dearer, batches=more)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The speeds of an engine with a given longest draft, on the prompts chosen on."""

    constant: Score  # drafts of exactly that length
    stopped: Score | None  # drafts that a threshold stops, the fastest one; None for an engine without thresholds


@dataclass(frozen=True, slots=True)
class Exported:
    """The fastest setting of an engine's rule."""

    engine: Engine  # whose rule was searched
    found: Ranked  # the setting, scored on the prompts reported on; target-only decoding where drafting does not pay
    best: Score  # the setting to draft with, on the prompts chosen on
    kinds: list[Score]  # the fastest setting of each kind of rule, on these prompts
    baseline: Score  # target-only decoding, on the prompts chosen on
    written: Written  # ``best`` as the engine reads it
    curve: list[CurvePoint]  # by the longest draft, from 1
    settings: int  # how many were replayed
    batches: list[BatchLength] = field(default_factory=list)  # the fastest lengths for several texts at once
    left_out: list[str] = field(default_factory=list)  # why thresholds or other parts of the rule were not searched

    @property
    def pays(self) -> bool:
        """Whether drafting is faster than the target alone beyond the noise."""
        return self.found.score.setting.drafts


def search_rule(
    engine: Engine,
    reading: Reading,
    traces: TraceSet,
    prompts: tuple[Sequence[str], Sequence[str]],
    costs: CostTable,
    pair: Pairing,
    advance: Callable[[], None] = lambda: None,
    sizes: Sequence[int] = (),
) -> Exported:
    """Replay all settings of the rule, choose on one part of the prompts and report on the other.

    Of each kind of rule the fastest setting competes; the simplest kind within one standard error of the fastest wins.

    Args:
        engine: whose rule it is.
        reading: the reading used in `traces_as`.
        traces: with the engine's acceptance rule and confidence.
        prompts: ids to choose on and to report on.
        costs: of the engine, or of this machine.
        pair: as the engine reads its name, with the sampling.
        advance: called after each setting.
        sizes: numbers of texts at once, from 2 on, for which a length is searched too.
    """
    chosen_on, reported_on = prompts
    space = rule_space(engine, reading.confidence, traces.header.depth, pair.head)
    families: dict[str, list[Score]] = {}
    for setting in space:
        if (score := score_in(engine, setting, traces, chosen_on, costs)) is not None:
            families.setdefault(setting.policy, []).append(score)
        advance()
    baseline, alone = (score_in(engine, NONE, traces, part, costs) for part in prompts)
    assert baseline is not None
    assert alone is not None
    bests = [max(scores, key=_speed) for scores in families.values()]
    reported = {best.setting: score_in(engine, best.setting, traces, reported_on, costs) for best in bests}
    # A rule without a longest draft may draft more on these prompts than was recorded.
    bests = [best for best in bests if reported[best.setting] is not None]
    priced = [best for best in bests if not (engine.unpriced and best.setting.policy == THRESHOLD.policy)]
    chosen, drafting = choose([baseline, *priced]).chosen, choose(priced).chosen
    found = reported.get(chosen.setting) or alone
    batches = batch_lengths(engine, traces, prompts, sizes, costs, advance)
    setting = with_batches(drafting.setting, {one.rows: one.found.score.setting for one in batches})
    if setting.batches and batches[-1].rows > setting.batches[-1][0]:  # an engine's last range ends where it was priced
        setting = replace(setting, batches=(*setting.batches, (batches[-1].rows, setting.batches[-1][1])))
    written = engine.write(pair, setting)
    if batches and not (engine.scheduled or pair.head):
        written = replace(written, notes=(*written.notes, _by_size(batches)))
    if len(bests) > 1:
        unpriced = (f"{engine.unpriced}, whose time is not in that: try it there.",) if engine.unpriced else ()
        written = replace(written, notes=(*written.notes, _by_kind(bests), *unpriced))
    return Exported(
        engine,
        Ranked(found, found.speedup(alone)),
        drafting,
        bests,
        baseline,
        written,
        _curve(families),
        len(space),
        batches,
        _left_out(engine, reading, len(space) - sum(map(len, families.values()))),
    )


def _by_size(batches: Sequence[BatchLength]) -> str:
    fastest = ", ".join(
        f"{length_of(one.found.score.setting)} for {one.rows}"
        if one.found.score.setting.drafts
        else f"none for {one.rows}"
        for one in batches
    )
    return f"It takes one length for all numbers of texts at once; the fastest are {fastest}."


def _by_kind(bests: Sequence[Score]) -> str:
    speeds = "; ".join(f"{words_of(one.setting)}: {one.tokens_per_second:.1f}" for one in bests)
    return f"Predicted tokens/s of the best setting of each kind: {speeds}."


def _speed(score: Score) -> float:
    return score.tokens_per_second


def _curve(families: dict[str, list[Score]]) -> list[CurvePoint]:
    stopped: dict[int, Score] = {}
    for one in families.get("max-confidence", []):
        cap = length_of(one.setting)
        if cap <= LONGEST and (cap not in stopped or _speed(one) > _speed(stopped[cap])):
            stopped[cap] = one
    return [CurvePoint(one, stopped.get(length_of(one.setting))) for one in families["constant"]]


def _left_out(engine: Engine, reading: Reading, unknown: int) -> list[str]:
    found = []
    if engine.confidence is not None and reading.confidence is None:
        found.append(
            f"{engine.name} compares its threshold with probabilities after temperature and filters, which are known "
            "at temperature 1 without filters only: no threshold was tried"
        )
    if unknown:
        found.append(f"{unknown} settings of {engine.name} draft more tokens than were recorded, and were left out")
    return found
