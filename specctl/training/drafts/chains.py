"""A chain head drafts from every place of an answer at once, as it would in rounds that begin there.

EAGLE-3 calls this training-time test (arXiv 2503.01840, section 3.2). A round that begins behind place p has read the
tokens up to x_p with rows of true states, and then j tokens with rows of its own. So the j-th token of every round may
attend to the keys of all true rows up to its p, which are those of one pass over the text, and to the keys of its own
round, of which there is one for each earlier j: causal, plus a diagonal for each step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from specctl.models.draft_heads.chain import ChainHead, ChainPass
from specctl.models.draft_heads.glide import GlideHead
from specctl.training.drafts.lessons import Lesson


@dataclass(frozen=True, slots=True)
class Step:
    """The j-th drafted token of R rounds.

    Attributes:
        index: j, from 0.
        answer_rows: ``(R,)`` int64, rising: which of the answer's tokens each row predicts.
        logits: ``(R, V)``.
        rows: ``(R, H)``, the head's own rows.
    """

    index: int
    answer_rows: torch.Tensor
    logits: torch.Tensor
    rows: torch.Tensor


def drafted_steps(
    head: ChainHead,
    lesson: Lesson,
    steps: int,
    noise: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    longer: torch.Tensor | None = None,
) -> Iterator[Step]:
    """Draft from every place at which a round could begin, following the text.

    A prompt of one token leaves out the round that would draft the answer's first token: most heads have no row before
    a sequence's second token.

    Args:
        head: in any mode; gradients flow through every step.
        lesson: the text. The last rounds are shorter, for they end with it.
        steps: tokens of a round, at least 1.
        noise: changes the rows ``(T, H)`` that come from true states.
        longer: ``(A,)`` bool on the lesson's device, which rounds go on behind their first token, by the answer's token
            that they draft first; None for all.

    Yields:
        One step after another, as long as any round has one.
    """
    ids, device = lesson.ids, lesson.ids.device
    begin = 0 if head.sees_first else 1
    starts = torch.arange(max(lesson.first - 1, begin), len(ids) - 1, device=device)  # (R,) the last true token of each
    if not len(starts):
        return
    true = len(ids) - 2  # tokens x_1 to x_(N-2), read with rows of true states
    rows = noise(head.fuse({layer: states[:true] for layer, states in lesson.states.items()}))
    if head.sees_first:
        rows = torch.cat([rows.new_zeros(1, rows.shape[1]), rows])
    places = torch.arange(begin, true + 1, device=device)
    mask = head.causal(places, places)  # (T, T)
    cache = DynamicCache()
    found = head(ids[None, begin:-1], rows[None], places, mask[None, None], cache, len(starts))
    yield Step(0, starts + 1 - lesson.first, head.widened(found.logits), found.rows)
    own = found.rows
    if longer is not None:
        chosen = longer[starts + 1 - lesson.first]
        starts, own = starts[chosen], own[chosen]
    mask = places <= starts[:, None]  # (R, T): each round's true keys
    for index in range(1, steps):
        rounds = int((starts + index < len(ids) - 1).sum())  # those that the answer does not end
        if not rounds:
            return
        starts, mask = starts[:rounds], mask[:rounds]
        # This step's keys; those of the steps before are of more rounds.
        mask = torch.cat([mask, torch.eye(rounds, dtype=torch.bool, device=device)], 1)
        fed = starts + index
        found = head(ids[None, fed], own[None, :rounds], fed, mask[None, None], cache)
        own = found.rows
        yield Step(index, fed + 1 - lesson.first, head.widened(found.logits), own)


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
