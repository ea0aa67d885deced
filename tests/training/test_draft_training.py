from copy import deepcopy
from pathlib import Path

import pytest
import torch
from made import DRAWN, MASK, answer, chain_target, draft_learner, greedy_answers, recipe

from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads import eagle1
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.draft_heads.kinds import RECIPES
from specctl.models.draft_heads.training import Teacher, drafted_steps, new_head
from specctl.training.draft_heads import (
    Answer,
    AnswerFolder,
    acceptance_in_rounds,
    answered_greedily,
    drafts_of_head,
    frequent_tokens,
)
from specctl.training.epochs import Schedule, Training
from specctl.training.lessons import Lessons
from tests.support.toys import random_model


@pytest.mark.representatives(slow=("eagle3", "dflash"))
@pytest.mark.parametrize("kind", RECIPES)
def test_a_trained_head_is_accepted_more_than_an_untrained_one(kind: str, tmp_path: Path) -> None:
    target = chain_target()
    answers = greedy_answers(target, 28)
    learner = draft_learner(recipe(kind), answers[:24], target)
    training = Training(learner, Schedule(8, 4, 5e-3), 24, tmp_path / "state")
    teacher = Teacher(target, learner.head.layers)

    def accepted(head: ChainHead | BlockHead) -> float:
        (found,) = acceptance_in_rounds(teacher, {"head": drafts_of_head(head.eval(), 3)}, answers[24:], Sampling(), 3)
        return found.lengths[-1]

    untrained = deepcopy(learner.head)
    losses: list[float] = []
    training.run(lambda: losses.append(learner.loss or 0.0))
    assert len(losses) == training.steps == 48
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert accepted(learner.head) > accepted(untrained) + 0.6


def test_what_is_shared_with_the_target_is_not_trained(tmp_path: Path) -> None:
    target = random_model("llama")
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    learner = draft_learner(recipe("dspark"), [answer(number) for number in range(4)], target)
    Training(learner, Schedule(1, 4, 1e-2), 4, tmp_path / "state").run()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_a_new_eagle3_head_begins_with_the_targets_output_rows() -> None:
    target, tokens = random_model("llama"), torch.tensor(DRAWN)
    before = target.get_input_embeddings().weight.clone()
    head, again = (new_head(recipe("eagle3", depth=2), target, tokens, MASK, 1) for _ in range(2))
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[tokens])
    assert torch.equal(target.get_input_embeddings().weight, before)
    assert 0.01 < float(head.fc.weight.detach().std()) < 0.03
    assert all(torch.equal(one, two) for one, two in zip(head.parameters(), again.parameters(), strict=True))


def test_another_seed_makes_another_head() -> None:
    one, same, other = (new_head(recipe("eagle3"), random_model("llama"), None, MASK, seed) for seed in (0, 0, 1))
    assert torch.equal(one.get_parameter("fc.weight"), same.get_parameter("fc.weight"))
    assert not torch.equal(one.get_parameter("fc.weight"), other.get_parameter("fc.weight"))


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    folder = AnswerFolder.create(tmp_path, {"target": "t"}, 11)
    given = [answer(number, number + 1, number % 3 + 2, greedy=number % 2 == 0) for number in range(11)]
    folder.add(folder.content(given[:6]), 6, {}, 0.5)
    folder.add(folder.content(given[6:]), 5, {}, 0.5)
    split = AnswerFolder.open(tmp_path).split()
    assert [found.number for found in split.dev] == [9]
    for found in (*split.train, *split.dev):
        expected = given[found.number]
        assert found.greedy == expected.greedy
        assert torch.equal(found.prompt, expected.prompt)
        assert torch.equal(found.tokens, expected.tokens)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no training data of specctl train-draft"):
        AnswerFolder.open(tmp_path)


def test_prompts_for_evaluation_are_answered_in_both_ways() -> None:
    greedy = [answered_greedily(number) for number in range(9, 100, 10)]
    assert greedy == [False, True] * 5
    assert sum(map(answered_greedily, range(100))) == 50


def test_frequent_tokens_are_those_of_the_answers_not_of_prompts() -> None:
    prompt = torch.tensor([7, 7, 7, 7])
    some = [Answer(0, True, prompt, torch.tensor([5, 5, 2])), Answer(1, True, prompt, torch.tensor([5, 9, 2]))]
    found = frequent_tokens(some, 10, 4)
    assert found is not None
    assert found.tolist() == [0, 2, 5, 9]  # 0 fills up
    assert frequent_tokens(some, 10, 10) is None


def test_a_fitted_eagle1_head_begins_with_the_least_squares_prediction() -> None:
    target, width = random_model("llama"), random_model("llama").config.hidden_size
    head = new_head(recipe("eagle1"), target, None, MASK, 0)
    lessons = Lessons(target, head.layers, [answer(number, length=20) for number in range(12)])
    eagle1.fit(head, lessons.each(lambda: None))
    assert isinstance(head, eagle1.Eagle1Head)
    normal, scale = torch.zeros(2 * width + 1, width), 0.0
    for lesson in lessons.each(lambda: None):
        (step,) = drafted_steps(head, lesson, 1)
        states = lesson.states[-1]
        residuals = (step.features - states[lesson.first - 1 : -1]).detach()
        inputs = [head.embed(lesson.ids[lesson.first - 1 : -1]), states[lesson.first - 2 : -2]]
        inputs.append(torch.ones(len(residuals), 1))
        normal += torch.cat(inputs, -1).T @ residuals
        scale += float(torch.cat(inputs, -1).norm() * residuals.norm())
    # The residuals of a least-squares solution are orthogonal to its inputs, but for the small ridge.
    assert normal.norm() < 0.02 * scale


def test_a_fitted_head_is_accepted_before_it_is_trained() -> None:
    target = chain_target()
    answers = greedy_answers(target, 28)
    head = new_head(recipe("eagle1"), target, None, MASK, 0)
    teacher, accepted = Teacher(target, head.layers), []
    for fitted in (False, True):
        if fitted:
            eagle1.fit(head, Lessons(target, head.layers, answers[:24]).each(lambda: None))
        drafts = {"head": drafts_of_head(head.eval(), 1)}
        (found,) = acceptance_in_rounds(teacher, drafts, answers[24:], Sampling(), 1)
        accepted.append(found.lengths[0])
    assert accepted[1] > accepted[0] + 0.5
