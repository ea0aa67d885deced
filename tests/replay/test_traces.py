from dataclasses import replace

import pytest

from specctl.errors import UsageError
from specctl.replay.traces import (
    Line,
    Proposals,
    Trace,
    TraceHeader,
    read_traces,
    write_costs,
    write_failure,
    write_header,
    write_prompt,
)

HEADER = TraceHeader(4, [0], ["entropy"], {"created": "today"})


def some_trace(prompt: str = "p", turn: int = 0) -> Trace:
    path = Proposals([5, 6, 9], [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    branch = Proposals([3, 4], [1.1, 1.2], [0.3, 0.2], [0.3, 0.2])
    return Trace(
        prompt, "c", turn, 7, 20, [5, 6, 7], Line([True, True, False], path, {2: branch}), 1.5, [1.0, 0.5, 0.25]
    )


def write(path, *, end=""):
    with path.open("w", encoding="utf-8") as stream:
        write_header(stream, HEADER)
        write_prompt(stream, "p", {"data": {"turns": ["a", "b"]}}, [some_trace(), some_trace(turn=1)])
        write_failure(stream, "q", "too long")
        write_costs(stream, {"rest_ms": 1.0})
        stream.write(end)


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "t.jsonl"
    write(path)
    found = read_traces(path)
    assert found.header == HEADER
    assert found.traces == [some_trace(), some_trace(turn=1)]
    assert found.failures == {"q": "too long"}
    assert found.costs == {"rest_ms": 1.0}
    assert found.records == {"p": {"data": {"turns": ["a", "b"]}}}


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "t.jsonl"
    write(path, end='{"kind": "prompt", "prom')
    assert len(read_traces(path).traces) == 2
    assert path.read_text(encoding="utf-8").endswith("}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"kind": "run"}\n', "not a calibration trace"),
        ("{}\n", "not a calibration trace"),
        ("[1]\n", "damaged|not a calibration"),
        ("nonsense\n", "damaged"),
    ],
)
def test_what_is_no_trace_file_is_refused(tmp_path, text, message):
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_traces(path)


def test_a_missing_file_is_said_so(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_traces(tmp_path / "nowhere.jsonl")


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
