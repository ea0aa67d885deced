"""The published losses of draft heads, of one answer."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, log_softmax, smooth_l1_loss

from specctl.training.drafts.blocks import Blocks
from specctl.training.drafts.chains import Step
from specctl.training.drafts.lessons import Lesson

STEP_DECAY = 0.8
"""EAGLE-3's weight of a step against the one before it."""
MTP_DECAY = 0.6
"""FastMTP's (arXiv 2509.18362)."""
FEATURE_WEIGHT, LAW_WEIGHT = 1.0, 0.1
"""EAGLE-1's weights of the predicted state and of the law (arXiv 2401.15077, section 4.2)."""
TOKEN_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
"""DSpark's weights of cross-entropy, total variation and predicted acceptance (arXiv 2607.05147)."""


def law_loss(logits: torch.Tensor, target: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """Cross-entropy ``(...)`` in nats with the target's law restricted to the draft vocabulary.

    A row where the target's likeliest token is not in the draft vocabulary is 0 (EAGLE-3's code, ``cnets.py``).

    Args:
        logits: ``(..., V)``, -inf outside the draft vocabulary.
        target: ``(..., V)``, the target's logits.
        vocabulary: ``(D,)`` int64, ids of the draft vocabulary; None for all.
    """
    if vocabulary is None:
        law = target.softmax(-1)
        return -(law * log_softmax(logits, -1)).sum(-1)
    law = target[..., vocabulary].softmax(-1)
    counted = torch.isin(target.argmax(-1), vocabulary)
    return -(law * log_softmax(logits[..., vocabulary], -1)).sum(-1) * counted


def eagle3_loss(step: Step, lesson: Lesson, vocabulary: torch.Tensor | None, rounds: float) -> torch.Tensor:
    """EAGLE-3's loss of one step, a sum over the answer's tokens.

    Args:
        step: of the rounds.
        lesson: the answer.
        vocabulary: as for `law_loss`.
        rounds: the share of the rounds that went on behind their first token, which stand for all.
    """
    share = rounds if step.index else 1.0
    target = lesson.logits[step.answer_rows]
    return STEP_DECAY**step.index / share * law_loss(step.logits, target, vocabulary).sum()


def mtp_loss(step: Step, lesson: Lesson, steps: int) -> torch.Tensor:
    """FastMTP's loss of one of ``steps`` steps, a sum over the answer's tokens, which are the labels."""
    weight = MTP_DECAY**step.index / sum(MTP_DECAY**index for index in range(steps))
    return weight * text_loss(step, lesson)


def text_loss(step: Step, lesson: Lesson) -> torch.Tensor:
    """GliDe's loss, a sum over the answer's tokens: cross-entropy with them (arXiv 2402.02082)."""
    return cross_entropy(step.logits, lesson.ids[lesson.first :][step.answer_rows], reduction="sum")


def eagle1_loss(step: Step, lesson: Lesson) -> torch.Tensor:
    """EAGLE-1's loss, a sum over the answer's tokens.

    The rows are to be the target's last states, and their law the target's.
    """
    target = lesson.logits[step.answer_rows]
    wanted = lesson.states[-1][step.answer_rows + lesson.first - 1]  # the row of token x_p stands for the state of p
    feature = smooth_l1_loss(step.rows, wanted, reduction="none").mean(-1).sum()
    return FEATURE_WEIGHT * feature + LAW_WEIGHT * law_loss(step.logits, target, None).sum()


def block_weights(blocks: Blocks, gamma: float) -> torch.Tensor:
    """``(R, K)``: exp(-(k - 1) / gamma) for the k-th drafted token, 0 behind the end of the answer."""
    later = torch.arange(blocks.within.shape[1], device=blocks.within.device)
    return torch.exp(-later / gamma) * blocks.within


def dflash_loss(blocks: Blocks, lesson: Lesson, gamma: float, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """DFlash's loss, a weighted mean over the drafted tokens: cross-entropy with the target's law (speculators)."""
    weights = block_weights(blocks, gamma)
    target = lesson.logits[blocks.answer_rows.clamp(max=lesson.length - 1)]  # (R, K, V)
    return (law_loss(blocks.logits, target, vocabulary) * weights).sum() / weights.sum()


def dspark_loss(blocks: Blocks, lesson: Lesson, gamma: float, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """DSpark's loss, a weighted mean over the drafted tokens.

    Cross-entropy with the text's tokens, the total variation between both laws, and the cross-entropy of the predicted
    acceptance with 1 minus that distance, which is the probability that the token is accepted.
    """
    weights = block_weights(blocks, gamma)
    wanted = blocks.answer_rows.clamp(max=lesson.length - 1)  # (R, K)
    label, target = lesson.ids[lesson.first :][wanted], lesson.logits[wanted]
    token = cross_entropy(blocks.logits.flatten(0, 1), label.flatten(), reduction="none").view_as(weights)
    if vocabulary is not None:
        token = torch.where(torch.isin(label, vocabulary), token, 0)
    distance = 0.5 * (blocks.logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    loss = TOKEN_WEIGHT * token + 2 * DISTANCE_WEIGHT * distance  # DeepSpec's code takes the sum of differences
    if blocks.confidence is not None:
        accepted = 1 - distance.detach()
        loss = loss + CONFIDENCE_WEIGHT * binary_cross_entropy_with_logits(
            blocks.confidence, accepted, reduction="none"
        )
    return (loss * weights).sum() / weights.sum()
