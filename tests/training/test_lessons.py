"""What the target says about an answer is the same from disk, from memory and from a pass."""

import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from made import DRAWN, answer, draft_learner, recipe

from specctl.models.draft_heads.training import Lesson, Teacher
from specctl.training import lessons as module
from specctl.training.draft_heads import Answer
from specctl.training.epochs import Schedule, Training
from specctl.training.lessons import Lessons, room_for_states
from tests.support.toys import random_model

LAYERS = (0, 1)
ANSWERS = [answer(number, 3 + number, 8) for number in range(3)]
TOKENS = torch.tensor(DRAWN)


def same(one: Lesson, other: Lesson) -> bool:
    pairs = [(one.ids, other.ids), (one.logits, other.logits)]
    pairs += [(one.states[layer], other.states[layer]) for layer in (*LAYERS, -1)]
    if one.counted is not None and other.counted is not None:
        pairs.append((one.counted, other.counted))
    return one.first == other.first and all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_an_answer_is_read_once(tokens: torch.Tensor | None, tmp_path: Path) -> None:
    target = random_model("llama")
    first = Lessons(target, LAYERS, ANSWERS, tokens, tmp_path / "states")
    fresh = [first.lesson(index) for index in (0, 1, 0, 2)]
    assert first.read == 3
    later, never = (
        Lessons(target, LAYERS, ANSWERS, tokens, tmp_path / "states"),
        Lessons(target, LAYERS, ANSWERS, tokens),
    )
    for index, lesson in zip((0, 1, 0, 2), fresh, strict=True):
        assert same(lesson, later.lesson(index))
        assert same(lesson, never.lesson(index))
    assert (later.read, never.read) == (0, 4)


def test_a_lesson_is_what_the_target_says_about_the_draft_vocabulary(tmp_path: Path) -> None:
    target, text = random_model("llama"), ANSWERS[1]
    whole = Teacher(target, (*LAYERS, -1)).lesson(text.prompt, text.tokens)
    found = Lessons(target, LAYERS, ANSWERS, TOKENS, tmp_path).lesson(1)
    assert torch.equal(found.ids, whole.ids)
    assert found.first == whole.first
    torch.testing.assert_close(found.logits, whole.logits[:, TOKENS], atol=1e-2, rtol=1e-2)
    for layer in (*LAYERS, -1):
        assert torch.equal(found.states[layer], whole.states[layer].half().float())
    assert found.counted is not None
    assert found.counted.tolist() == [int(row.argmax()) in DRAWN for row in whole.logits]


def test_capped_logits_are_the_targets_own(tmp_path: Path) -> None:
    target = deepcopy(random_model("gemma2"))
    target.config.final_logit_softcapping = 0.01
    assert_reads_again(target, ANSWERS, tmp_path)


def assert_reads_again(target: torch.nn.Module, texts: Sequence[Answer], folder: Path) -> None:
    lessons = Lessons(target, LAYERS, texts, None, folder)  # type: ignore[arg-type]
    for _ in range(2):
        whole = Teacher(target, ()).lesson(texts[0].prompt, texts[0].tokens)  # type: ignore[arg-type]
        assert torch.equal(lessons.lesson(0).logits, whole.logits)
    assert lessons.read == 2


def test_states_beyond_float16_keep_their_values(tmp_path: Path) -> None:
    target = deepcopy(random_model("llama"))
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(1e7)
    whole = Teacher(target, LAYERS).lesson(ANSWERS[0].prompt, ANSWERS[0].tokens)
    assert whole.states[0].abs().max() > torch.finfo(torch.float16).max
    for _ in range(2):
        found = Lessons(target, LAYERS, ANSWERS, None, tmp_path).lesson(0)
        assert torch.equal(found.states[0], whole.states[0])


def test_a_damaged_file_and_one_of_another_text_are_replaced(tmp_path: Path) -> None:
    target = random_model("llama")
    lessons = Lessons(target, LAYERS, ANSWERS, None, tmp_path)
    expected = [lessons.lesson(index) for index in range(3)]
    files = sorted(tmp_path.iterdir())
    files[0].write_bytes(b"torn")
    shutil.copy(files[1], files[2])
    again = Lessons(target, LAYERS, ANSWERS, None, tmp_path)
    assert all(same(again.lesson(index), expected[index]) for index in range(3))
    assert again.read == 2
    assert all(same(again.lesson(index), expected[index]) for index in range(3))
    assert again.read == 2
    other_layers = Lessons(target, (1,), ANSWERS, None, tmp_path)
    other_layers.lesson(0)
    assert other_layers.read == 1


def test_a_disk_that_takes_no_states(tmp_path: Path) -> None:
    (tmp_path / "states").write_text("a file where the folder would be")
    lessons = Lessons(random_model("llama"), LAYERS, ANSWERS, None, tmp_path / "states")
    assert same(lessons.lesson(0), Lessons(random_model("llama"), LAYERS, ANSWERS).lesson(0))
    lessons.lesson(0)
    assert lessons.read == 2


def test_states_take_a_quarter_of_the_free_space_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(len(text.prompt) + 8 for text in ANSWERS) * 3 * 16 * 2
    for free, room in ((4 * needed, False), (4 * needed + 4, True)):
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
        assert room_for_states(tmp_path, ANSWERS, LAYERS, 16) == room


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_kept_states_do_not_change_the_head(kind: str, tmp_path: Path) -> None:
    texts = [answer(number) for number in range(4)]
    weights = []
    for folder in (None, tmp_path / "states"):
        learner = draft_learner(recipe(kind, draft_vocabulary=len(DRAWN)), texts, folder=folder)
        Training(learner, Schedule(2, 2, 1e-2), 4, tmp_path / f"state-{folder is None}").run()
        weights.append(list(learner.head.state_dict().values()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
