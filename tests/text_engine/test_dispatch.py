"""Answers of several replicas come back in order."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.text_engine.dispatch import DEATHS, GivenUp, arriving, in_order
from specctl.text_engine.engine import Answered, Lost


class Imagined:
    """Replicas without processes: which one is next to answer, or to end, is drawn.

    Attributes:
        most: the most questions that were put and not answered at one time.
    """

    def __init__(self, count, draw=lambda _: 0, deadly=frozenset()):
        self.count, self._draw, self._deadly = count, draw, deadly
        self._asked, self.order, self.waits = {}, [], []

    def free(self):
        return [number for number in range(self.count) if number not in self._asked]

    def submit(self, place, question):
        assert place not in self._asked
        self._asked[place] = question
        self.order.append(question)

    def step(self, seconds=None):
        self.waits.append(seconds)
        if not self._asked:
            assert seconds is not None, "waiting for an answer that nothing gives"
            return []
        replica = sorted(self._asked)[self._draw(len(self._asked))]
        question = self._asked.pop(replica)
        if question in self._deadly:
            return [Lost(replica, "was ended")]
        return [Answered(replica, question * 10)]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_every_task_comes_back_once_and_in_order(data, count, window, skipped, deadly):
    replicas = Imagined(count, lambda asked: data.draw(st.integers(0, asked - 1)), frozenset(deadly - skipped))
    taken, handed = [], []

    def tasks():
        for number in range(31):
            assert len(taken) - len(handed) < window, "the window is no bound"
            taken.append(number)
            yield (number, None if number in skipped else number)

    for of, answer in in_order(replicas, tasks(), window):
        handed.append(of)
        expected = None if of in skipped else GivenUp("was ended") if of in deadly else of * 10
        assert answer == expected
    assert handed == list(range(31))
    # A question that ended a replica is put again, and not more often than that.
    asked = [number for number in range(31) if number not in skipped]
    assert sorted(replicas.order) == sorted(asked + [n for n in asked if n in deadly] * (DEATHS - 1))


def test_a_question_that_lost_its_replica_goes_before_all_others():
    deadly = {0}
    replicas = Imagined(1, deadly=deadly)
    found = in_order(replicas, ((number, number) for number in range(4)))
    replicas_wait = replicas.step

    def wait(seconds=None):
        events = replicas_wait(seconds)
        deadly.clear()
        return events

    replicas.step, replicas._deadly = wait, deadly
    assert [answer for _, answer in found] == [0, 10, 20, 30]
    assert replicas.order == [0, 0, 1, 2, 3]


def test_what_is_done_is_handed_out_while_the_source_has_nothing():
    """A program that waits for an answer before it writes its next line gets it."""
    answered = threading.Event()

    def source():
        yield (0, 0)
        assert answered.wait(10.0), "the first answer waited for the second line"
        yield (1, 1)

    found = []
    for of, answer in in_order(Imagined(2), arriving(source())):
        found.append((of, answer))
        answered.set()
    assert found == [(0, 0), (1, 10)]


def test_an_error_of_the_source_is_raised():
    def source():
        yield (0, 0)
        raise UsageError("the disk is gone")

    with pytest.raises(UsageError, match="the disk is gone"):
        list(in_order(Imagined(1), arriving(source())))


def test_the_source_is_read_only_a_little_ahead():
    read = []

    def source():
        for number in range(1000):
            read.append(number)
            yield number

    items = arriving(source(), ahead=4)
    due = time.monotonic() + 10
    while not read and time.monotonic() < due:
        next(items)
    time.sleep(0.05)
    items.close()
    assert len(read) <= 10
