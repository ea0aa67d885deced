"""Every kind of draft head is read as it was written."""

import json

import pytest
import torch
from made import DRAWN, answer, spread_head

from specctl.models.draft_heads.file_layout import Verifier, described, read_head
from specctl.models.draft_heads.kinds import HEAD_KINDS, RECIPES, recognise
from specctl.models.draft_heads.training import Teacher
from specctl.training.draft_heads import head_drafts
from tests.support.toys import random_model


def test_every_kind_that_is_trained_can_be_read() -> None:
    assert RECIPES.keys() == {kind for kind, row in HEAD_KINDS.items() if row.flags}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_head_is_what_is_read_of_its_description(kind: str) -> None:
    target = random_model("llama")
    small = "draft_vocabulary" in HEAD_KINDS[kind].flags
    head = spread_head(kind, target, tokens=DRAWN if small else None)
    verifier = Verifier.of("some/target", target)
    config, weights = described(head, verifier)
    config = json.loads(json.dumps(config))
    assert recognise(config, ()) in (kind, None)
    assert recognise(config, weights) == kind

    again = read_head(kind, config, dict(weights), target)
    assert (type(again), again.kind, again.longest) == (type(head), kind, head.longest)
    assert getattr(again, "config", None) == getattr(head, "config", None)
    assert again.layers == head.layers
    assert (again.tokens is None) == (head.tokens is None)
    assert {name: weight.tolist() for name, weight in again.state_dict().items()} == {
        name: weight.tolist() for name, weight in head.state_dict().items()
    }

    more, same = described(again, verifier)
    assert json.loads(json.dumps(more)) == config
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], weights[name]) for name in weights)

    text = answer(0)
    lesson = Teacher(target, head.layers).lesson(text.prompt, text.tokens)
    for one, other in zip(head_drafts(head, lesson, 4), head_drafts(again, lesson, 4), strict=True):
        assert torch.equal(one.logits, other.logits)
