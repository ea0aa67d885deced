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

from specctl.draft_training.lessons import Lesson
from specctl.models.draft_heads.chain import ChainHead


@dataclass(frozen=True, slots=True)
class Step:
    """The j-th drafted token of the rounds that begin at consecutive places.

    Attributes:
        index: j, from 0.
        skipped: how many of the answer's first tokens no round drafts as its first: 1 where the prompt has one token,
            for the head has no row before a sequence's second token; else 0.
        logits: ``(R, V)``; row i predicts the answer's token ``skipped + i + index``.
        rows: ``(R, H)``, the head's own rows.
    """

    index: int
    skipped: int
    logits: torch.Tensor
    rows: torch.Tensor

    @property
    def answer_rows(self) -> slice:
        """Which of the answer's tokens the rows predict."""
        begin = self.skipped + self.index
        return slice(begin, begin + len(self.logits))


def drafted_steps(
    head: ChainHead,
    lesson: Lesson,
    steps: int,
    noise: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
) -> Iterator[Step]:
    """Draft ``steps`` tokens from every place at which a round could begin, following the text.

    Args:
        head: in any mode; gradients flow through every step.
        lesson: the text. The last rounds are shorter, for they end with it.
        steps: tokens of a round, at least 1.
        noise: changes the rows ``(T, H)`` that come from true states.

    Yields:
        One step after another, as long as any round has one.
    """
    ids, first = lesson.ids, max(lesson.first - 1, 1)  # the place behind which the first round begins
    count = len(ids) - 1 - first  # rounds
    if count < 1:
        return
    true = len(ids) - 2  # tokens x_1 to x_(N-2), read with rows of true states
    rows = noise(head.fuse({layer: states[:true] for layer, states in lesson.states.items()}))
    places = torch.arange(1, true + 1, device=ids.device)
    mask = places <= places[:, None]  # (T, T)
    cache = DynamicCache()
    found = head(ids[None, 1:-1], rows[None], places, mask[None, None], cache, count)
    skipped = first - lesson.first + 1
    yield Step(0, skipped, found.logits, found.rows)
    mask = mask[-count:]  # (R, T): each round's true keys
    for index in range(1, min(steps, count)):
        rounds = count - index
        mask = mask[:rounds]
        own = torch.eye(rounds, dtype=torch.bool, device=ids.device)
        mask = torch.cat([mask, own], 1)  # this step's keys; those of the steps before have a column more each
        places = torch.arange(first + index, first + count, device=ids.device)
        found = head(ids[None, places], found.rows[None, :rounds], places, mask[None, None], cache)
        yield Step(index, skipped, found.logits, found.rows)
