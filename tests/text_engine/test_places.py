"""What answers several questions at once, as far as processes and actors share it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from specctl.errors import UsageError
from specctl.text_engine.engine import Places
from specctl.text_engine.on_ray import _Answers
from tests.text_engine.toy_jobs import Clerk, Rows


def test_after_a_death_with_several_questions_they_are_asked_one_by_one():
    places = Places(3, {0, 2})
    assert places.free() == [1]
    assert places.lost() == [2, 0]
    assert (places.failures, places.free()) == (1, [0]), "either may be why"
    places.asked.add(0)
    assert places.free() == []
    places.answered(0)
    assert (places.failures, places.free()) == (0, [0])
    places.asked.add(0)
    places.answered(0)
    assert places.free() == [0, 1, 2], "both have been answered"
    places.asked.add(1)
    assert places.lost() == [1]
    assert places.free() == [0, 1, 2], "it was the only one"


def test_threads_are_each_given_the_answer_to_their_question():
    answer = _Answers(Rows(0, 4))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(answer, [{"said": number, "seconds": 0.01} for number in range(20)]))
    assert [each["said"] for _, each in found] == list(range(20))
    assert max(each["together"] for _, each in found) > 1


def test_what_ends_the_replicas_reaches_all_who_ask():
    answer = _Answers(Rows(0, 2))
    for _ in range(2):
        with pytest.raises(UsageError, match="broken"):
            answer({"raises": "broken"})


def test_parts_come_with_the_answer_of_an_actor():
    assert _Answers(Clerk(0, 2))({"said": "one two"}) == (["one", "two"], "one two")
    assert _Answers(lambda question: question)(3) == ([], 3)


def test_what_is_cancelled_is_not_wanted_and_makes_no_place_free_before_its_end():
    places = Places(2, {0, 1})
    places.cancelled.add(0)
    assert places.free() == []
    assert not places.answered(0)
    assert places.free() == [0]
    places.asked.add(0)
    places.cancelled.add(1)
    assert places.lost() == [0], "no caller asks for the other one again"
