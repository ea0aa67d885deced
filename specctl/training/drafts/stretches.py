"""A GliDe head reads a whole text in one pass, and sees as little of the target's cache as it does in a round.

GliDe's training (arXiv 2402.02082): the text is cut into stretches as long as a round. The tokens of a stretch attend
to the target's keys of the places before it, and of none in it; a round's tokens too see only what the target had read
when the round began.
"""

import torch
from transformers import DynamicCache

from specctl.models.draft_heads.chain import ChainPass
from specctl.models.draft_heads.glide import GlideHead
from specctl.training.drafts.chains import Step
from specctl.training.drafts.lessons import Lesson


def stretched(head: GlideHead, lesson: Lesson, size: int, offset: int) -> Step:
    """What a head says of each of the answer's tokens.

    Args:
        head: in any mode.
        lesson: the text.
        size: tokens of a stretch.
        offset: from 0 to ``size - 1``, where the first whole stretch begins; before it is the end of one. Another
            offset for each answer lets every token stand at every place of a stretch.

    Returns:
        Logits of all A tokens of the answer.
    """
    ids, device = lesson.ids[:-1], lesson.ids.device
    true = head.fuse({layer: states[:-2] for layer, states in lesson.states.items()})
    rows = torch.cat([true.new_zeros(1, true.shape[1]), true])  # (T, R): the token at p brings in place p - 1
    places = torch.arange(len(ids), device=device)
    begins = (places - (places - offset) % size).clamp(min=0)  # (T,) where each token's stretch begins
    mask, seen = (head.causal(places, last)[None, None] for last in (places, begins))
    found: ChainPass = head(ids[None], rows[None], places, mask, DynamicCache(), lesson.length, seen)
    return Step(0, torch.arange(lesson.length, device=device), found.logits, found.rows)
