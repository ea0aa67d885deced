"""A block head drafts from several places of an answer at once, as it would in rounds that begin there.

DFlash's training (arXiv 2602.06036): each place is the anchor of a block, whose other tokens are masked. A block
attends to the states of the places before its anchor, and to all of itself.
"""

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from specctl.models.draft_heads.block import BlockHead
from specctl.training.drafts.lessons import Lesson


@dataclass(frozen=True, slots=True)
class Blocks:
    """The rows of several blocks that predict tokens, K in each.

    Attributes:
        logits: ``(R, K, V)``, of heads with a sequential part given the text before each token.
        confidence: ``(R, K)``, logits of the predicted acceptance; None of heads that predict none.
        answer_rows: ``(R, K)`` int64, which of the answer's tokens each row predicts.
        within: ``(R, K)`` bool, whether the answer has that token.
    """

    logits: torch.Tensor
    confidence: torch.Tensor | None
    answer_rows: torch.Tensor
    within: torch.Tensor


def drafted_blocks(head: BlockHead, lesson: Lesson, anchors: torch.Tensor) -> Blocks:
    """Draft a block from each of R places.

    Args:
        head: in any mode.
        lesson: the text.
        anchors: ``(R,)`` int64 on the lesson's device, the places of the newest tokens: from ``first - 1`` to the
            answer's last but one.
    """
    config = head.config
    ids, size, device = lesson.ids, config.block_size, lesson.ids.device
    cache = DynamicCache()
    known = torch.arange(len(ids) - 1, device=device)
    context = head.context_rows({layer: states[:-1] for layer, states in lesson.states.items()})
    head.remember(context[None], known, cache)
    places = anchors[:, None] + torch.arange(size, device=device)  # (R, B)
    block = torch.full_like(places, config.mask_token)
    block[:, 0] = ids[anchors]
    own = torch.eye(len(anchors), dtype=torch.bool, device=device)
    mask = torch.cat([known < anchors[:, None], own.repeat_interleave(size, 1)], 1)  # (R, S), alike in a block
    mask = mask.repeat_interleave(size, 0)
    found = head(block.flatten()[None], places.flatten(), mask[None, None], cache, torch.cat([known, places.flatten()]))
    kept = slice(config.first_row, None)
    logits = found.logits.view(len(anchors), size, -1)[:, kept]
    hidden = found.hidden.view(len(anchors), size, -1)[:, kept]
    ahead = torch.arange(1, head.longest + 1, device=device)
    wanted = anchors[:, None] + ahead  # (R, K), the places that the rows predict
    before = ids[(wanted - 1).clamp(max=len(ids) - 1)]
    memory = head.blank().expand(len(anchors), -1)
    rows = []
    for index in range(head.longest):
        row, memory = head.row(logits[:, index], hidden[:, index], before[:, index], memory)
        rows.append(head.widened(row))
    confidence = head.confidence_logit(hidden, before) if config.confidence else None
    return Blocks(torch.stack(rows, 1), confidence, wanted - lesson.first, wanted < len(ids))
