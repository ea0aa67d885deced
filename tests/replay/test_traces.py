from dataclasses import replace

import pytest

from specctl.errors import UsageError
from specctl.replay.traces import Line, Proposals, Trace


def some_trace(prompt: str = "p", turn: int = 0) -> Trace:
    path = Proposals([5, 6, 9], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    branch = Proposals([3, 4], [1.1, 1.2], [0.3, 0.2], [0.3, 0.2])
    line = Line([True, True, False], path, {2: branch})
    return Trace(prompt, "c", turn, 7, 20, [5, 6, 7], line, 1.5, [1.0, 0.5, 0.25])


def test_steps_come_from_the_path_and_then_from_the_branch():
    trace = some_trace()
    assert trace.line.runs == [2, 1, 0, 0]
    assert [trace.line.step(0, index).token for index in (1, 2, 3, 4, 5)] == [5, 6, 9, 3, 4]
    assert [trace.line.step(1, index).entropy for index in (1, 2, 3)] == [0.2, 0.3, 1.1]
    assert trace.line.step(2, 2).index == 2
    with pytest.raises(UsageError, match="drafts of 6 tokens"):
        trace.line.step(0, 6)


def test_another_head_has_its_own_word():
    path = Proposals([5, 6, 9], [0.1] * 3, [0.9] * 3, [0.9] * 3, [0.5, 0.6, 0.7], {"other": [0.1, 0.2, 0.3]})
    branch = Proposals([3], [1.1], [0.3], [0.3], [0.2], {"other": [0.4]})
    trace = replace(some_trace(), line=Line([True, True, False], path, {2: branch}))
    assert trace.of_head(None) is trace
    assert trace.of_head("its own").line is trace.line
    other = trace.of_head("other")
    assert [other.line.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.3, 0.4]
    assert [trace.line.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.7, 0.2]
    assert trace.of_head("other").line is other.line


def test_a_round_begins_with_nothing_a_head_could_judge():
    path = Proposals([5, 6, 9], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.5, 0.6, 0.7])
    branch = Proposals([3], [1.1], [0.3], [0.3], [0.2])
    trace = replace(some_trace(), line=Line([True, True, False], path, {2: branch}))
    assert [trace.line.step(0, index).accept_prob for index in (1, 2, 3, 4)] == [1.0, 0.6, 0.7, 0.2]
    assert [trace.line.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.7, 0.2]
    assert some_trace().line.step(0, 1).accept_prob is None
