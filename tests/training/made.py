"""A tiny target, its answers and examples, and what is trained on them."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.kinds import RECIPES, Recipe
from specctl.models.draft_heads.training import new_head
from specctl.training.draft_heads import Answer, DraftLearner
from specctl.training.lessons import Lessons
from specctl.training.predictor_examples import Example
from tests.support.toys import random_model, seeded

VOCABULARY = 64
MASK = 63
LIKED = 7
DRAWN = [1, 2, 3, 5, 8, 13, 21, 34, 55]
"""A small draft vocabulary."""


def recipe(kind: str, **changes: object) -> Recipe:
    """The published recipe, small."""
    published = RECIPES[kind]
    small: dict[str, object] = {"depth": 2 if published.anchors else 1, "steps": min(published.steps, 4)}
    if published.markov_rank:
        small["markov_rank"] = 8
    return replace(published, **{**small, **changes})


def spread_head(
    kind: str, target: PreTrainedModel, *, tokens: list[int] | None = None, **changes: object
) -> ChainHead | BlockHead:
    """A head whose every trained matrix is random enough that its laws differ from place to place."""
    head = new_head(recipe(kind, **changes), target, None if tokens is None else torch.tensor(tokens), MASK, 0)
    generator = seeded(7)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad and weight.ndim == 2:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return head.eval()


def answer(number: int, prompt: int = 3, length: int = 10, *, greedy: bool = True) -> Answer:
    """A random text."""
    parts = [torch.randint(1, VOCABULARY, (size,), generator=seeded(number + size)).int() for size in (prompt, length)]
    return Answer(number, greedy, *parts)


def chain_target() -> PreTrainedModel:
    """A target whose next token depends on its last one alone, and which is sure of it: a head can learn it all."""
    target = deepcopy(random_model("llama"))
    with torch.no_grad():
        target.lm_head.weight.mul_(30)
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def greedy_answers(target: PreTrainedModel, count: int, length: int = 16) -> list[Answer]:
    """What a target writes."""
    found = []
    for number in range(count):
        prompt = torch.randint(1, VOCABULARY, (2,), generator=seeded(number))
        ids = prompt
        with torch.no_grad():
            for _ in range(length):
                ids = torch.cat([ids, target(ids[None]).logits[0, -1:].argmax(-1)])
        found.append(Answer(number, True, prompt.int(), ids[2:].int()))
    return found


def draft_learner(
    of: Recipe, answers: list[Answer], target: PreTrainedModel | None = None, folder: Path | None = None
) -> DraftLearner:
    """A head that is about to be trained."""
    target = target or random_model("llama")
    tokens = torch.tensor(DRAWN) if of.kind == "eagle3" and of.draft_vocabulary < VOCABULARY else None
    head = new_head(of, target, tokens, MASK, 0)
    return DraftLearner(head, of, Lessons(target, head.layers, answers, tokens, folder), 0)


def liked_examples(count: int, seed: int = 0) -> list[Example]:
    """Acceptance depends on the proposal alone, so a head can learn it."""
    generator = seeded(seed)
    found = []
    for number in range(count):
        prompt, answer, proposals = (
            torch.randint(64, (size,), generator=generator, dtype=torch.int32) for size in (3, 12, 12)
        )
        proposals = torch.where(proposals < 32, LIKED, 50)
        accepted = torch.where(proposals == LIKED, 0.95, 0.05)
        found.append(Example(number, prompt, answer, proposals, accepted, *torch.rand(3, 12, generator=generator)))
    return found


def disco_examples(count: int, seed: int = 0) -> list[Example]:
    """A token is accepted where the two likeliest are far apart and it is early in its round: no one signal tells."""
    generator = seeded(seed)
    found = []
    for number in range(count):
        tops = torch.rand(20, 10, generator=generator).sort(descending=True).values
        tops = tops / tops.sum(1, keepdim=True)
        index = torch.randint(1, 9, (20,), generator=generator, dtype=torch.int32)
        accepted = torch.where((tops[:, 0] - tops[:, 1]) * 250 > index, 0.97, 0.03)
        entropy = torch.special.entr(tops).sum(1)
        ids = torch.zeros(20, dtype=torch.int32)
        found.append(Example(number, ids[:2], ids, ids, accepted, entropy, tops[:, 0], tops[:, 0], None, tops, index))
    return found
