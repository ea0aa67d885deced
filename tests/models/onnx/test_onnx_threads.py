"""With how many threads a graph's passes run."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch

from specctl.models.onnx import graph, passes
from specctl.models.running.threads import Threads
from tests.support.onnx_models import needs_onnx, sure_runner
from tests.support.toys import random_model

pytestmark = needs_onnx
VOCABULARY = 60
Trial = Callable[[Callable[[int], object], Sequence[int]], dict[int, list[float]]]


def taking(seconds: dict[int, float]) -> Trial:
    """A clock by which a small round takes so long with each number of threads; the rounds are run."""

    def timed(work: Callable[[int], object], numbers: Sequence[int]) -> dict[int, list[float]]:
        for number in numbers:
            work(number)
        return {number: [seconds[number]] for number in numbers}

    return timed


@pytest.mark.parametrize(("seconds", "number"), [({1: 2e-3, 2: 1e-3}, 2), ({1: 1e-3, 2: 2e-3}, 1)])
def test_the_faster_number_is_taken(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], number: int) -> None:
    monkeypatch.setattr(passes, "ONE_THREAD", 0)
    monkeypatch.setattr(passes, "timed", taking(seconds))
    runner = sure_runner(random_model("llama"), VOCABULARY, most_threads=2)
    assert (runner.threads, runner.length) == (number, 0)
    assert runner.tried == {1: seconds[1] * 1e3, 2: seconds[2] * 1e3}
    known = Threads(1, 2, "measured", {1: 5.0, 2: 6.0}, others_busy=0.25)
    assert known.free == 2
    told = known.by_engine(runner)
    assert (told.number, told.milliseconds, told.others_busy) == (number, runner.tried, 0.25)
    expected = sure_runner(random_model("llama"), VOCABULARY).extend([1, 2, 3], keep=3).logits
    torch.testing.assert_close(runner.extend([1, 2, 3], keep=3).logits, expected)


@pytest.mark.parametrize("seconds", [{1: 2e-3, 2: 1e-3}, {1: 1e-3, 2: 2e-3}])
def test_one_session_holds_the_weights_at_a_time(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    sessions: WeakSet[Any] = WeakSet()
    most: list[int] = []
    usual = graph.open_session

    def counted(*arguments: Any) -> Any:
        most.append(len(sessions))
        sessions.add(session := usual(*arguments))
        return session

    sure_runner(random_model("llama"), VOCABULARY)  # its graph is there
    monkeypatch.setattr(passes, "ONE_THREAD", 0)
    monkeypatch.setattr(passes, "timed", taking(seconds))
    monkeypatch.setattr(graph, "open_session", counted)
    sure_runner(random_model("llama"), VOCABULARY, most_threads=2)
    assert most == [0] * (2 + (seconds[1] < seconds[2]))


def test_a_number_that_was_chosen_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "ONE_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    runner = sure_runner(random_model("llama"), VOCABULARY)
    assert (runner.threads, runner.tried) == (2, {})
    known = Threads(2, 2, "as set")
    assert known.by_engine(runner) is known


def test_a_small_model_takes_one_thread() -> None:
    runner = sure_runner(random_model("llama"), VOCABULARY, most_threads=2)
    assert (runner.threads, runner.tried) == (1, {})
