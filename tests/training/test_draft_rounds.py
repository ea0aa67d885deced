"""All rounds of a text at once are the rounds that a head would draft one by one."""

import pytest
import torch
from made import DRAWN, VOCABULARY, answer, spread_head

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.kinds import RECIPES
from specctl.models.draft_heads.training import Lesson, Teacher, drafted_steps
from specctl.models.running.slot import Slot
from specctl.training.draft_heads import head_drafts, model_drafts
from tests.support.toys import random_model

DEPTH = 4


def in_a_round(head: ChainHead | BlockHead, lesson: Lesson, start: int, index: int) -> torch.Tensor:
    """The law ``(V,)`` of token ``index`` of the round that begins at the answer's token ``start``, as in decoding."""
    runner = Slot(ChainPasses(head, VOCABULARY)) if isinstance(head, ChainHead) else Slot(BlockPasses(head, VOCABULARY))
    ids, newest = lesson.ids.tolist(), lesson.first + start - 1
    # All places but the newest token's are observed.
    runner.observe_states(0, {layer: states[:newest] for layer, states in lesson.states.items()})
    logits = runner.extend(ids[: newest + 1], keep=1).logits
    for token in ids[newest + 1 : newest + 1 + index]:
        logits = runner.extend([token], keep=1).logits
    return logits[0]


@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.representatives("eagle1-1", "eagle3-4", "glide-4", "dspark-4")
def test_the_rounds_of_a_text_are_those_of_decoding(kind: str, prompt: int) -> None:
    target = random_model("llama")
    head = spread_head(kind, target, tokens=DRAWN if kind == "eagle3" else None)
    lesson = Teacher(target, head.layers).lesson(*(text := answer(0, prompt)) and (text.prompt, text.tokens))
    seen: set[tuple[int, int]] = set()
    for drafted in head_drafts(head, lesson, DEPTH):
        for row, logits in enumerate(drafted.logits):
            place = (drafted.start + row, drafted.index)
            torch.testing.assert_close(logits, in_a_round(head, lesson, *place), atol=1e-3, rtol=1e-3)
            seen.add(place)
    depth = min(DEPTH, head.longest) if isinstance(head, BlockHead) else DEPTH
    # Most chain heads have no row from which they could draft the second token of a sequence.
    first = 1 if prompt == 1 and isinstance(head, ChainHead) and not head.sees_first else 0
    assert seen == {(start, index) for index in range(depth) for start in range(first, lesson.length - index)}


def test_a_round_does_not_see_the_rounds_that_begin_elsewhere() -> None:
    """A token changes the law of the rounds that have read it, and of no other."""
    target = random_model("llama")
    head = spread_head("eagle3", target)
    text = answer(0)
    lesson = Teacher(target, head.layers).lesson(text.prompt, text.tokens)
    other = lesson.ids.clone()
    other[lesson.first + 5] = (other[lesson.first + 5] + 1) % VOCABULARY
    changed = Lesson(other, lesson.first, lesson.states, lesson.logits)
    for before, after in zip(head_drafts(head, lesson, DEPTH), head_drafts(head, changed, DEPTH), strict=True):
        for row in range(len(before.logits)):
            read = before.start + row + before.index > 5  # token 5 is in the text before the one predicted
            assert torch.equal(before.logits[row], after.logits[row]) != read


def test_some_rounds_may_end_after_a_token() -> None:
    target = random_model("llama")
    head = spread_head("eagle3", target)
    text = answer(0)
    lesson = Teacher(target, head.layers).lesson(text.prompt, text.tokens)
    longer = torch.tensor([False, True, False, False, True, True, False, False, True, True])
    with torch.no_grad():
        whole, some = list(drafted_steps(head, lesson, DEPTH)), list(drafted_steps(head, lesson, DEPTH, longer=longer))
    assert torch.equal(some[0].logits, whole[0].logits)
    for all_rounds, step in zip(whole[1:], some[1:], strict=True):
        kept = longer[: len(all_rounds.logits)]
        assert torch.equal(step.answer_rows, all_rounds.answer_rows[kept])
        torch.testing.assert_close(step.logits, all_rounds.logits[kept], atol=1e-4, rtol=1e-4)


def test_the_law_of_a_draft_model_depends_on_the_place_alone() -> None:
    logits = torch.randn(6, 5)
    for drafted in model_drafts(logits, 3):
        assert drafted.start == 0
        assert torch.equal(drafted.logits, logits[drafted.index :])


def test_a_lesson_is_what_the_target_says() -> None:
    target = random_model("llama")
    text = answer(0, 4, 6)
    lesson = Teacher(target, (0, 1, -1)).lesson(text.prompt, text.tokens)
    with torch.no_grad():
        output = target(lesson.ids[None], output_hidden_states=True)
    torch.testing.assert_close(lesson.logits, output.logits[0, 3:-1])
    for layer in (0, 1, -1):
        torch.testing.assert_close(lesson.states[layer], output.hidden_states[layer][0])
    assert lesson.length == 6


def test_a_target_without_such_a_layer() -> None:
    with pytest.raises(ModelError, match="layers cannot be read"):
        Teacher(random_model("llama"), (9,))
