"""What the draft would say at each place of a text that is there, and what becomes of it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specctl.decoding.along import read_along
from specctl.decoding.reading import AcceptancePredictor
from specctl.decoding.sampling import Sampling, draw, read_signals
from specctl.models.running.runner import Runner


@dataclass(frozen=True, slots=True)
class Proposals:
    """One token drawn from the draft at each of T places, on the CPU.

    Attributes:
        tokens: ``(T,)`` int64, Y.
        acceptance: ``(T,)`` float32, min(1, p(Y)/q(Y)) of the processed distributions.
        signals: ``(T, 3)`` float32, entropy, top probability and probability of Y when the draft drew it, as in
            `DraftStep`.
    """

    tokens: torch.Tensor
    acceptance: torch.Tensor
    signals: torch.Tensor


def propose(
    target: Runner,
    draft: Runner,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Proposals:
    """Both models read what followed a prompt; at each place of it the draft proposes a token.

    So SpecDec++ makes its training data (arXiv 2405.19715, section 4.4).

    Args:
        target: the model that decides.
        draft: the model that proposes.
        prompt: at least one id.
        answer: X, at least one id.
        sampling: as it would be in decoding, for both.
        generator: of the proposals, on the target's device.
    """
    parts: list[torch.Tensor] = []
    with torch.inference_mode():
        for _, (by_target, by_draft) in read_along([target, draft], prompt, answer):
            target_logits = by_target.logits  # (C, V)
            draft_logits = by_draft.logits.to(target_logits.device)
            draft_probs = sampling.probs(draft_logits)
            proposals = draw(draft_probs, generator)[:, None]  # (C, 1)
            ratio = sampling.probs(target_logits).gather(1, proposals) / draft_probs.gather(1, proposals)
            signals = read_signals(draft_logits, proposals[:, 0], probs=draft_probs, sampling=sampling).values()
            rows = proposals[:, 0], ratio[:, 0].clamp(max=1), *signals
            # float64 holds ids and probabilities alike
            parts.append(torch.stack([row.double() for row in rows], dim=1).cpu())
    whole = torch.cat(parts)  # (T, 5)
    return Proposals(whole[:, 0].long(), whole[:, 1].float(), whole[:, 2:].float())


def foretell(
    draft: Runner, head: AcceptancePredictor, prompt: Sequence[int], answer: Sequence[int], proposals: Proposals
) -> torch.Tensor:
    """``(T,)`` float32 on the CPU: the head's word on each proposal, in one short pass of the draft for each."""
    text = [*prompt, *answer]
    said: list[torch.Tensor] = []
    with torch.inference_mode():
        signals = proposals.signals.to(draft.device)
        # Backwards, so that each pass takes back no more than the proposal before.
        for place in reversed(range(len(answer))):
            end = len(prompt) + place
            draft.rollback(end)
            pending = [*text[draft.length : end], int(proposals.tokens[place])]
            hidden = draft.extend(pending, keep=1, hidden=True).hidden
            assert hidden is not None
            said.append(head.accept_prob(hidden[0], signals[place]))
    return torch.stack(said[::-1]).float().cpu()


def proposal_generator(target: Runner, seed: int) -> torch.Generator:
    """A generator for proposals that draws apart from the one that wrote the answer."""
    return torch.Generator(target.device).manual_seed(random.Random(f"proposals/{seed}").getrandbits(63))
