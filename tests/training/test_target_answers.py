from pathlib import Path

import pytest
import torch
from made import answer

from specctl.errors import UsageError
from specctl.training.draft_heads import Answer, AnswerFolder, answered_greedily, frequent_tokens


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
