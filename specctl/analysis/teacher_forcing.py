"""Teacher forcing: target and draft read the target's output, which gives both distributions at every token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specctl.analysis.readings import Judged, Reading, Readings, run_lengths, verdicts
from specctl.decoding.answers import Answerer
from specctl.decoding.draft_tokens import draft_token_generator, draw_along, predict_acceptance, read_along
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.observing.progress import Advance, ignored
from specctl.observing.prompt_answers import answer_each, prompt_writer
from specctl.observing.results import Skipped
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import SuitePrompt
from specctl.records import Completion
from specctl.replay.bounds import LONGEST
from specctl.replay.recording.collecting import trace_answers
from specctl.replay.traces import Trace
from specctl.statistics import Floats
from specctl.text_engine.here import HereEngine


def read_prompts(
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    prompt_format: PromptFormat,
    advance: Advance = ignored,
) -> tuple[Readings | None, dict[str, str]]:
    """Answer every prompt with the target and read each answer with both models.

    Returns:
        The readings of all tokens within the draft's context, None where there are none; and by prompt id the reason
        for each failure.
    """
    readings: list[Reading] = []
    of_prompt: list[int] = []
    categories: list[str] = []
    failures: dict[str, str] = {}
    answerer = Answerer(Session(pair, None), prompt_format, settings)
    engine = HereEngine(prompt_writer(lambda _: answerer))
    for found in answer_each(engine, prompts, advance=advance):
        if isinstance(found, Skipped):
            failures[found.prompt] = found.reason
            continue
        some = [
            _read(pair, one, Sampling.measured(found.settings, pair))
            for one in found.completions
            if one.tokens and pair.drafts[0].room(one.prompt_tokens)
        ]
        readings += some
        of_prompt += [len(categories)] * len(some)
        categories.append(found.prompt.category)
    if not readings:
        return None, failures
    lengths = [len(reading.entropy) for reading in readings]
    return Readings(Reading.joined(readings), np.repeat(of_prompt, lengths), categories), failures


def _read(pair: Pair, completion: Completion, sampling: Sampling) -> Reading:
    """Read a completion with both models; adds the predictions of a head that reads the draft's states."""
    target, draft = pair.target, pair.drafts[0]
    text = completion.prompt, completion.tokens[: draft.room(completion.prompt_tokens)]
    reading = read(target, draft, *text, sampling)
    if not isinstance(pair.predictor, StatePredictor):
        return reading
    drawn = draw_along(target, draft, *text, sampling, draft_token_generator(target, completion.seed))
    predicted = predict_acceptance(draft, pair.predictor, *text, drawn)
    return replace(reading, predicted=_array(predicted), predicted_of=_array(drawn.acceptance))


def read(target: Slot, draft: Slot, prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> Reading:
    """Read a prompt and its output of at least one token with both models."""
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for part, (by_target, by_draft) in read_along([target, draft], prompt, output):
            target_logits = by_target.logits  # (C, V)
            tokens = torch.tensor(output[part], device=target_logits.device)
            parts.append(compare(target_logits, by_draft.logits.to(target_logits.device), tokens, sampling).cpu())
    entropy, cross_entropy, top_prob, acceptance, divergence, agrees, kept = map(_array, torch.cat(parts, dim=1))
    return Reading(
        entropy=entropy,
        cross_entropy=cross_entropy,
        top_prob=top_prob,
        acceptance=acceptance,
        divergence=divergence,
        agrees=agrees,
        kept=kept,
        run=run_lengths(kept),
        judged=kept if sampling.greedy else acceptance,
    )


def _array(row: torch.Tensor) -> Floats:
    found: Floats = row.double().numpy()
    return found


def compare(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Compare two distributions at each token, in float32.

    Args:
        target_logits: ``(T, V)``.
        draft_logits: ``(T, V)``, on the same device.
        tokens: ``(T,)`` the target's output.
        sampling: acceptance and divergence use its distributions. In greedy decoding they use the softmax at
            temperature 1, as in the papers, since one-hot distributions carry no information.

    Returns:
        ``(7, T)``: the first seven fields of `Reading`.
    """
    raw_target, raw_draft = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    weights = raw_draft.exp()
    if sampling.greedy or sampling.plain:
        target, draft = raw_target, raw_draft
    else:
        target, draft = _log_probs(target_logits, sampling), _log_probs(draft_logits, sampling)
    target_probs, draft_probs = target.exp(), draft.exp()
    best = draft_logits.argmax(-1)
    if sampling.greedy:
        kept = best == tokens
    else:
        # 0 / 0 where another order of summation moved the token across a filter's edge.
        kept = (draft_probs / target_probs).gather(1, tokens[:, None])[:, 0].clamp(max=1).nan_to_num(0)
    rows = (
        torch.special.entr(weights).sum(-1),
        -torch.where(weights > 0, weights * raw_target, 0).sum(-1),
        weights.amax(-1),
        torch.minimum(target_probs, draft_probs).sum(-1).clamp(max=1),
        _divergence(draft, target),
        best == target_logits.argmax(-1),
        kept,
    )
    return torch.stack([row.float() for row in rows])


def _log_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of the processed distribution; without a filter no probability underflows to 0."""
    if sampling.filters:
        return sampling.probs(logits).log()
    return (logits.float() / sampling.temperature).log_softmax(-1)


def _divergence(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(q||p) from log-probabilities, as the sum of q log(q/p) + p - q, where no term is negative.

    This form avoids cancellation where q and p are nearly equal, so bounds computed from it hold.
    """
    draft_probs, target_probs = draft.exp(), target.exp()
    gap = target - draft
    near = draft_probs * (gap.expm1() - gap)
    far = target_probs - draft_probs - draft_probs * gap
    terms = torch.where(draft == -torch.inf, target_probs, torch.where(gap.abs() < 1, near, far))
    return terms.sum(-1).clamp(min=0)


def read_rounds(
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    settings: SamplingTable,
    prompt_format: PromptFormat,
    advance: Advance = ignored,
) -> tuple[Judged | None, dict[str, str]]:
    """Answer every prompt with the target, and draft at most `LONGEST` tokens from every position of each answer.

    Returns:
        The tokens that verification judges, None where there are none; and by prompt id the reason for each failure.
    """
    traces: list[Trace] = []
    failures: dict[str, str] = {}
    answerer = Answerer(Session(pair, None), prompt_format, settings)
    engine = HereEngine(prompt_writer(lambda _: answerer))
    for found in answer_each(engine, prompts, advance=advance):
        if isinstance(found, Skipped):
            failures[found.prompt] = found.reason
        else:
            traces += trace_answers(pair, found, LONGEST)
    return verdicts(traces), failures
