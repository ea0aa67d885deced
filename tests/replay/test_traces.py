from dataclasses import replace

import pytest

from specctl.errors import UsageError
from specctl.replay.traces import DraftSteps, Trace, recorded_by_place


def some_trace(prompt: str = "p", turn: int = 0) -> Trace:
    along = DraftSteps([5, 6, 9], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    branch = DraftSteps([3, 4], [1.1, 1.2], [0.3, 0.2], [0.3, 0.2])
    draft = recorded_by_place([True, True, False], along, {2: branch}, [1.0, 0.5, 0.25])
    return Trace(prompt, "c", turn, 7, 20, [5, 6, 7], draft, 1.5)


def test_steps_come_from_the_path_and_then_from_the_branch():
    trace = some_trace()
    assert trace.draft.accepted_runs == [2, 1, 0, 0]
    assert [trace.draft.step(0, index).token for index in (1, 2, 3, 4, 5)] == [5, 6, 9, 3, 4]
    assert [trace.draft.step(1, index).entropy for index in (1, 2, 3)] == [0.2, 0.3, 1.1]
    assert trace.draft.step(2, 2).index == 2
    with pytest.raises(UsageError, match="drafts of 6 tokens"):
        trace.draft.step(0, 6)


def test_another_head_has_its_own_word():
    along = DraftSteps([5, 6, 9], [0.1] * 3, [0.9] * 3, [0.9] * 3, [0.5, 0.6, 0.7], {"other": [0.1, 0.2, 0.3]})
    branch = DraftSteps([3], [1.1], [0.3], [0.3], [0.2], {"other": [0.4]})
    trace = replace(some_trace(), draft=recorded_by_place([True, True, False], along, {2: branch}))
    assert trace.of_predictor(None) is trace
    assert trace.of_predictor("its own").draft is trace.draft
    other = trace.of_predictor("other")
    assert [other.draft.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.3, 0.4]
    assert [trace.draft.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.7, 0.2]
    assert trace.of_predictor("other").draft is other.draft


def test_a_round_begins_with_nothing_a_head_could_judge():
    along = DraftSteps([5, 6, 9], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.5, 0.6, 0.7])
    branch = DraftSteps([3], [1.1], [0.3], [0.3], [0.2])
    trace = replace(some_trace(), draft=recorded_by_place([True, True, False], along, {2: branch}))
    assert [trace.draft.step(0, index).accept_prob for index in (1, 2, 3, 4)] == [1.0, 0.6, 0.7, 0.2]
    assert [trace.draft.step(1, index).accept_prob for index in (1, 2, 3)] == [1.0, 0.7, 0.2]
    assert some_trace().draft.step(0, 1).accept_prob is None
