"""Draft tokens at every position of an existing text, and how likely the target is to accept them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specctl.decoding.along import read_along
from specctl.decoding.rows.device_laws import draw
from specctl.decoding.rows.reading import AcceptancePredictor
from specctl.decoding.rows.token_columns import token_columns
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.running.slot import Slot


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """One token drawn from the draft at each of T positions, on the CPU.

    Attributes:
        tokens: ``(T,)`` int64, Y.
        acceptance: ``(T,)`` float32, min(1, p(Y)/q(Y)) of the processed distributions.
        signals: ``(T, 3)`` float32, `DISTRIBUTION_SIGNALS` of the draft when it drew Y.
    """

    tokens: torch.Tensor
    acceptance: torch.Tensor
    signals: torch.Tensor


def draw_along(
    target: Slot,
    draft: Slot,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> DraftTokens:
    """Both models read an answer to a prompt; at each of its positions the draft draws a token.

    SpecDec++ makes its training data in this way (arXiv 2405.19715, section 4.4).

    Args:
        target: the verifier.
        draft: the draft model.
        prompt: at least one id.
        answer: X, at least one id.
        sampling: as in decoding, for both.
        generator: for the draws, on the target's device.
    """
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for _, (by_target, by_draft) in read_along([target, draft], prompt, answer):
            target_logits = by_target.logits  # (C, V)
            draft_logits = by_draft.logits.to(target_logits.device)
            draft_probs = sampling.probs(draft_logits)
            tokens = draw(draft_probs, generator)[:, None]  # (C, 1)
            ratio = sampling.probs(target_logits).gather(1, tokens) / draft_probs.gather(1, tokens)
            columns = tokens, ratio.clamp(max=1), token_columns(Forward(draft_logits), tokens[:, 0])
            # float64 holds ids and probabilities alike
            parts.append(torch.cat([column.double() for column in columns], dim=1).cpu())
    whole = torch.cat(parts)  # (T, 5)
    return DraftTokens(whole[:, 0].long(), whole[:, 1].float(), whole[:, 2:].float())


def predict_acceptance(
    draft: Slot, predictor: AcceptancePredictor, prompt: Sequence[int], answer: Sequence[int], drawn: DraftTokens
) -> torch.Tensor:
    """A head's acceptance probability of each draft token, ``(T,)`` float32 on the CPU.

    Every token costs a short pass of the draft.

    Args:
        draft: the draft model.
        predictor: on the draft's device.
        prompt: at least one id.
        answer: T ids.
        drawn: the draft tokens at the answer's positions.
    """
    text = [*prompt, *answer]
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        signals = drawn.signals.to(draft.device)
        # Backwards, so that each pass rolls back one draft token and one token of the text.
        for position in reversed(range(len(answer))):
            end = len(prompt) + position
            draft.rollback(end)
            pending = [*text[draft.length : end], int(drawn.tokens[position])]
            hidden = draft.extend(pending, keep=1, hidden=True).hidden
            assert hidden is not None
            found.append(predictor.accept_prob(hidden[0], signals[position]))
    return torch.stack(found[::-1]).float().cpu()


def draft_token_generator(target: Slot, seed: int) -> torch.Generator:
    """A generator for draft tokens, independent of the one that drew the answer with the same seed."""
    return torch.Generator(target.device).manual_seed(random.Random(f"proposals/{seed}").getrandbits(63))
