"""What a draft would have proposed in the rounds that begin at each place of an answer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.training.drafts.blocks import drafted_blocks
from specctl.training.drafts.chains import drafted_steps
from specctl.training.drafts.lessons import Lesson

BLOCKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Drafted:
    """The laws of one drafted token of several rounds.

    Attributes:
        start: the answer's token that the first of these rounds drafts first; each next round begins a token later.
        index: which token of the round, from 0.
        logits: ``(R, V)``; row i is about the answer's token ``start + i + index``, the text before it given.
    """

    start: int
    index: int
    logits: torch.Tensor


@torch.no_grad()  # a block around yields would switch gradients off for the caller
def head_drafts(head: ChainHead | BlockHead, lesson: Lesson, depth: int) -> Iterator[Drafted]:
    """The rounds of a draft head, of ``depth`` tokens or as many as it can draft."""
    if isinstance(head, ChainHead):
        for step in drafted_steps(head, lesson, depth):
            yield Drafted(int(step.answer_rows[0]) - step.index, step.index, step.logits)
        return
    for start in range(0, lesson.length, BLOCKS_AT_ONCE):
        end = min(start + BLOCKS_AT_ONCE, lesson.length)
        anchors = torch.arange(start, end, device=lesson.ids.device) + lesson.first - 1
        blocks = drafted_blocks(head, lesson, anchors)
        for index in range(min(depth, head.longest)):
            if (rounds := lesson.length - index - start) > 0:
                yield Drafted(start, index, blocks.logits[:rounds, index])


def model_drafts(logits: torch.Tensor, depth: int) -> Iterator[Drafted]:
    """The rounds of a draft model, whose law does not depend on where a round began.

    Args:
        logits: ``(A, V)``, the model's for each token of the answer.
        depth: tokens of a round.
    """
    for index in range(min(depth, len(logits))):
        yield Drafted(0, index, logits[index:])
