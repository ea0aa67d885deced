"""What a GliDe head may see of the target in training is what it can see in a round."""

from pathlib import Path

import pytest
import torch
from made import MASK, VOCABULARY, answer, recipe, spread_head
from test_draft_rounds import in_a_round

from specctl.errors import ModelError
from specctl.models.draft_heads.checkpoint import draft_head
from specctl.models.draft_heads.file_layout import Verifier, read_head, write_head
from specctl.models.draft_heads.glide import GlideHead, stretched
from specctl.models.draft_heads.training import Lesson, Teacher, new_head, text_loss
from specctl.models.files.checkpoint import locate
from specctl.profile.schema import ModelTable
from tests.support.toys import random_model, seeded

SIZE = 4


def setting(depth: int = 1) -> tuple[GlideHead, Lesson]:
    target = random_model("llama")
    head = spread_head("glide", target, depth=depth)
    assert isinstance(head, GlideHead)
    text = answer(0, prompt=3, length=12)
    return head, Teacher(target, head.layers).lesson(text.prompt, text.tokens)


def begin_of(place: int, size: int, offset: int) -> int:
    """Where the stretch of a place begins."""
    return max(begin for begin in range(offset - size, place + 1, size) if begin <= place)


@torch.no_grad()
def changed_rows(head: GlideHead, lesson: Lesson, place: int, size: int, offset: int) -> set[int]:
    """The places of the text whose logits change with the target's states at one place."""
    states = {layer: rows.clone() for layer, rows in lesson.states.items()}
    for rows in states.values():
        rows[place] = torch.randn(rows.shape[1], generator=seeded(1))
    other = Lesson(lesson.ids, lesson.first, states, lesson.logits)
    before, after = (stretched(head, one, size, offset).logits for one in (lesson, other))
    return {lesson.first - 1 + row for row in range(lesson.length) if not torch.equal(before[row], after[row])}


@pytest.mark.parametrize("offset", range(SIZE))
@pytest.mark.parametrize("size", [1, SIZE])
def test_a_token_sees_the_targets_keys_of_the_text_before_its_stretch(size: int, offset: int) -> None:
    head, lesson = setting()
    offset %= size
    places = range(lesson.first - 1, len(lesson.ids) - 1)
    for place in range(len(lesson.ids)):
        seen_by = {other for other in places if place < begin_of(other, size, offset)}
        assert changed_rows(head, lesson, place, size, offset) == seen_by


@pytest.mark.parametrize("offset", range(SIZE))
def test_a_stretch_is_a_round(offset: int) -> None:
    """Each token of the text is predicted as in the round that begins where its stretch does."""
    head, lesson = setting()
    with torch.no_grad():
        found = stretched(head, lesson, SIZE, offset)
    assert found.answer_rows.tolist() == list(range(lesson.length))
    for row in range(lesson.length):
        place = lesson.first - 1 + row
        index = place - begin_of(place, SIZE, offset)
        if index <= row:  # the round begins in the answer
            expected = in_a_round(head, lesson, row - index, index)
            torch.testing.assert_close(found.logits[row], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-neox", "mistral"])
def test_what_is_trained_for_a_target_is_read_for_it_again(family: str, tmp_path: Path) -> None:
    target = random_model(family)
    head = new_head(recipe("glide", depth=2), target, None, MASK, 0)
    assert isinstance(head, GlideHead)
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight)  # type: ignore[no-untyped-call]
    write_head(tmp_path, head, Verifier("some/target"))
    found = draft_head(locate(ModelTable(model=str(tmp_path)), "draft"))
    assert found is not None
    again = read_head("glide", found.config, found.read(), target)
    assert (again.config, again.layers) == (head.config, head.layers)


def test_a_head_of_more_layers_than_the_target_is_an_error() -> None:
    with pytest.raises(ModelError, match="3 layers reads as many layers of the target, which has 2") as refused:
        new_head(recipe("glide", depth=3), random_model("llama"), None, MASK, 0)
    assert "--depth" in str(refused.value.hint)


def test_with_longer_stretches_less_is_seen() -> None:
    head, lesson = setting()
    with torch.no_grad():
        one, four = (stretched(head, lesson, size, 0).logits for size in (1, SIZE))
    places = torch.arange(lesson.first - 1, len(lesson.ids) - 1)
    assert torch.equal((one != four).any(-1), places % SIZE != 0)


def test_gradients_reach_every_weight_of_the_head_and_none_of_the_target() -> None:
    target = random_model("llama")
    head, lesson = setting(depth=2)
    loss = text_loss(stretched(head, lesson, SIZE, 1), lesson)
    assert float(loss.detach()) == pytest.approx(
        float(
            -torch.log_softmax(stretched(head, lesson, SIZE, 1).logits.detach(), -1)[
                torch.arange(lesson.length), lesson.ids[lesson.first :]
            ].sum()
        ),
        rel=1e-5,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    used = {name for name, weight in head.named_parameters() if weight.grad is not None and bool(weight.grad.any())}
    assert used == {name for name, _ in head.named_parameters()}
    assert all(weight.grad is None for weight in target.parameters())
    assert head.embed_tokens.weight.shape == (VOCABULARY, 32)
