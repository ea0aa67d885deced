"""How many tokens of a draft the target would accept, in the rounds that begin at each place of unseen answers.

For an answer x of the target's, a round that drafts K tokens accepts the first k of them with probability
``sum over x_1..x_k of prod_i min(p(x_i), q_i(x_i))``, which is the mean over answers of
``prod_(i<k) min(1, q_i(x_i) / p(x_i)) * sum_v min(p(v), q_k(v))``: p and q_i are the laws of the target and of the
draft's i-th token, after temperature and filters, each given the answer before it. So one text tells about the rounds
from each of its places. Where the target is greedy this is whether the draft's likeliest tokens are the answer's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specctl.decoding.rows.host_laws import TINY
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.training.drafts.blocks import drafted_blocks
from specctl.training.drafts.chains import drafted_steps
from specctl.training.drafts.lessons import Lesson, Teacher
from specctl.training.drafts.target_answers import Answer

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


DEPTH = 7
"""Tokens of the longest round that is evaluated."""

Drafts = Callable[[Answer, Lesson], Iterator[Drafted]]
"""The rounds of a draft from every place of an answer."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How much of a draft's rounds the target accepts.

    Attributes:
        rounds: how many rounds were compared.
        reached: for each k from 1 the probability that the first k tokens are all accepted.
    """

    rounds: int
    reached: tuple[float, ...]

    @property
    def by_position(self) -> tuple[float, ...]:
        """For each k the probability that the k-th token is accepted if those before it are; 0 if they never are."""
        before = (1.0, *self.reached)
        return tuple(now / then if then else 0.0 for then, now in zip(before, self.reached, strict=False))

    @property
    def lengths(self) -> tuple[float, ...]:
        """For each K the mean number of tokens accepted of a round that drafts K."""
        return tuple(sum(self.reached[:count]) for count in range(1, len(self.reached) + 1))


def drafts_of_head(head: ChainHead | BlockHead, depth: int) -> Drafts:
    """The rounds of a draft head."""
    return lambda _, lesson: head_drafts(head, lesson, depth)


def drafts_of_model(model: PreTrainedModel, depth: int) -> Drafts:
    """The rounds of a draft model."""
    reader = Teacher(model, ())
    return lambda answer, _: model_drafts(reader.lesson(answer.prompt, answer.tokens).logits, depth)


def acceptance_in_rounds(
    teacher: Teacher,
    drafts: Sequence[Drafts],
    answers: Sequence[Answer],
    sampling: Sampling,
    depth: int = DEPTH,
    after_answer: Callable[[], None] = lambda: None,
) -> list[Acceptance]:
    """The acceptance of several drafts, in the same rounds.

    Args:
        teacher: the target, watched at the layers that the drafts read.
        drafts: what to compare.
        answers: the target's, drawn as ``sampling`` says.
        sampling: of target and drafts.
        depth: tokens of a round; rounds that the answer ends are left out.
        after_answer: called after each answer.
    """
    totals = torch.zeros(len(drafts), depth, dtype=torch.float64)
    rounds = 0
    for answer in answers:
        lesson = teacher.lesson(answer.prompt, answer.tokens)
        # A prompt of one token has no row before it that a chain head could draft from.
        first = 1 if lesson.first == 1 else 0
        count = lesson.length - depth + 1
        if count > first:
            for total, of in zip(totals, drafts, strict=True):
                total += _reached(lesson, of(answer, lesson), sampling, depth)[first:count].sum(0)
            rounds += count - first
        after_answer()
    return [Acceptance(rounds, tuple((total / max(rounds, 1)).tolist())) for total in totals]


def _reached(lesson: Lesson, drafted: Iterator[Drafted], sampling: Sampling, depth: int) -> torch.Tensor:
    """``(A, K)`` float64 on the CPU, of the round that begins at each token of the answer.

    The probability that its first k tokens are accepted, 0 where there are none.
    """
    law = sampling.probs(lesson.logits)  # (A, V)
    text = lesson.ids[lesson.first :]  # (A,)
    kept, overlap = (torch.zeros(lesson.length, depth, dtype=torch.float64) for _ in range(2))
    for each in drafted:
        rows = len(each.logits)
        begin = each.start + each.index
        wanted = law[begin : begin + rows]
        own = sampling.probs(each.logits[:, : law.shape[1]].float())
        tokens = text[begin : begin + rows, None]
        ratio = (own.gather(1, tokens) / wanted.gather(1, tokens).clamp_min(TINY)).clamp(max=1)
        kept[each.start : each.start + rows, each.index] = ratio[:, 0].double().cpu()
        overlap[each.start : each.start + rows, each.index] = torch.minimum(wanted, own).sum(1).double().cpu()
    before = torch.cat([torch.ones(lesson.length, 1, dtype=torch.float64), kept[:, :-1].cumprod(1)], 1)
    return before * overlap
