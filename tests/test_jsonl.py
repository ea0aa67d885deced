import io
import json

import pytest

from specctl.files import write_line
from specctl.jsonl import Record, error_line, read_records, result_line
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason

METRICS = [
    "prompt_tokens",
    "generated_tokens",
    "rounds",
    "drafted",
    "accepted",
    "acceptance_rate",
    "mean_acceptance_length",
    "verification_rate",
    "discard_rate",
    "draft_ms",
    "verify_ms",
    "prefill_ms",
    "total_ms",
    "ttft_ms",
    "tpot_ms",
    "tokens_per_second",
]


def records(text, input_format="jsonl"):
    return list(read_records(io.BytesIO(text if isinstance(text, bytes) else text.encode()), input_format))


def completion(text="said"):
    steps = (DraftStep(1, 7), DraftStep(2, 8))
    round_ = Round(0, steps, 1, 9, ExtraToken.CORRECTION, StopReason.POLICY, threshold=0.5)
    return Completion((1, 2, 3), 0, (7, 9), text, FinishReason.LENGTH, (round_,), 0.25, 0.5, 0.3)


@pytest.mark.parametrize(
    ("line", "identity"),
    [
        ({"id": "a"}, "a"),
        ({"question_id": 7}, 7),
        ({"task_id": "HumanEval/0"}, "HumanEval/0"),
        ({"id": None, "task_id": "t"}, "t"),
        ({"custom_id": "request-1"}, "request-1"),
        ({"id": 0, "question_id": 3}, 0),
        ({"id": ""}, ""),
        ({}, 2),
    ],
)
def test_a_record_has_its_own_id_or_its_line_number(line, identity):
    (record,) = records("\n" + json.dumps(line | {"prompt": "x"}))
    assert (record.line, record.id, record.error) == (2, identity, None)


@pytest.mark.parametrize("text", ["\n \r\n\t\n", "\ufeff\n"], ids=["blank lines", "a byte order mark alone"])
def test_lines_without_anything_are_no_records(text):
    assert records(text) == []


def test_line_numbers_count_blank_lines_too():
    assert [record.line for record in records('{"prompt": "a"}\r\n\r\n{"prompt": "b"}')] == [1, 3]


@pytest.mark.parametrize("input_format", ["jsonl", "text"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(input_format):
    (record,) = records('\ufeff{"prompt": "x"}\n', input_format)
    assert record.data == {"prompt": "x" if input_format == "jsonl" else '{"prompt": "x"}'}


def test_lines_of_text_lose_their_line_break_and_nothing_else():
    assert [record.data["prompt"] for record in records("  a \r\nb\u2028c\x0bd\n\n{", "text")] == [
        "  a ",
        "b\u2028c\x0bd",
        "{",
    ]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (b'{"prompt": "\xff"}', "invalid_utf8", "not UTF-8"),
        ("{", "invalid_json", "not JSON"),
        ('{"prompt": "x"} y', "invalid_json", "Extra data"),
        ("Once upon a time", "invalid_json", "at column 1); for plain lines of text use --input-format text"),
        ('{"prompt": "a\tb"}', "invalid_json", "(Invalid control character at column 14)"),
        ('{"prompt": "x",, "id": 1}', "invalid_json", "enclosed in double quotes at column 16)"),
        ('{"prompt": "x"', "invalid_json", "(Expecting ',' delimiter at column 15)"),
        ('{"prompt": ', "invalid_json", "(Expecting value at column 11)"),
        ('[{"prompt": "x"}]', "invalid_record", "but not an object; make a line of each record with: jq -c '.[]'"),
        ("42", "invalid_record", "--input-format text"),
        ('["x"]', "invalid_record", "not an object"),
        ('{"prompt": "x", "score": NaN}', "invalid_json", "NaN"),
        ('{"prompt": "x", "score": -1e999}', "invalid_json", "-1e999"),
        ('{"prompt": "x", "n": ' + "1" * 5000 + "}", "invalid_json", "digits"),
        ("[" * 100_000, "invalid_json", "nested too deeply"),
        ("{}", "invalid_record", "no prompt"),
        ('{"text": "x"}', "invalid_record", "prompt, messages, turns"),
        ('{"prompt": "x", "turns": ["y"]}', "invalid_record", "prompt and turns"),
        ('{"prompt": ["x"]}', "invalid_record", "prompt must be a string"),
        ('{"prompt": null}', "invalid_record", "prompt must be a string"),
        ('{"turns": []}', "invalid_record", "list of strings"),
        ('{"turns": "x"}', "invalid_record", "list of strings"),
        ('{"turns": ["x", 1]}', "invalid_record", "list of strings"),
        ('{"messages": [{"role": "user"}]}', "invalid_record", "role and content"),
        ('{"messages": {"role": "user", "content": "x"}}', "invalid_record", "role and content"),
        ('{"prompt": "x", "sampling": 1}', "invalid_record", "sampling must be an object"),
        ('{"messages": [{"role": "usr", "content": "x"}]}', "invalid_record", 'no role "usr"; roles are system,'),
        ('{"messages": []}', "invalid_record", "one or more objects"),
        ('{"messages": ["x"]}', "invalid_record", "messages.0 must be an object"),
        ('{"messages": [{"content": "x"}]}', "invalid_record", "messages.0.role: there is no role;"),
        ('{"messages": [{"role": "user", "content": null}]}', "invalid_record", "messages.0.content is null"),
        ('{"messages": [{"role": "user", "content": 1}]}', "invalid_record", "messages.0.content must be a text"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "invalid_record", "messages.0.content.0 must be an"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "invalid_record",
            "type text are read",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "invalid_record", "content.0.text must be"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]}',
            "invalid_record",
            "messages.0.content.0.cache",
        ),
        ('{"messages": [{"role": "assistant", "tool_calls": "x"}]}', "invalid_record", "tool_calls must be a list"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "invalid_record", "messages.0.tool_calls.0 must"),
        ('{"custom_id": "a", "body": {"model": "m"}}', "invalid_record", "no prompt"),
        ('{"custom_id": "a", "user": 1, "body": {"prompt": "x", "user": 2}}', "invalid_record", "user is both in the"),
    ],
)
def test_a_bad_line_carries_its_error_and_the_next_one_is_read(line, kind, words):
    raw = line if isinstance(line, bytes) else line.encode()
    bad, good = records(raw + b'\n{"prompt": "fine"}\n')
    assert good == Record(2, 2, {"prompt": "fine"})
    assert bad.error is not None
    assert bad.error.kind == kind
    assert words in bad.error.message


def test_a_bad_record_keeps_the_id_it_can_be_known_by():
    unreadable, incomplete = records('{"id": "a"\n{"id": "b"}\n')
    assert error_line(unreadable, unreadable.error).items() >= {"id": None, "line": 1}.items()
    line = error_line(incomplete, incomplete.error)
    assert list(line) == ["id", "line", "error"]
    wrong = Record(3, "c", {"id": "c", "prompt": "x", "own": 1, "metrics": {}}, incomplete.error)
    assert list(error_line(wrong, wrong.error)) == ["id", "prompt", "own", "line", "error"], "what it was stays with it"
    assert (line["id"], line["line"], line["error"]["type"]) == ("b", 2, "invalid_record")


def test_lines_are_whole_and_utf8_whatever_they_hold():
    sink = io.StringIO()
    write_line(sink, {"a": "é\n\u2028"})
    write_line(sink, {"a": "\ud800"})
    assert sink.getvalue().encode() == '{"a": "é\\n\u2028"}\n{"a": "\\ud800"}\n'.encode()


def test_a_result_carries_the_fields_of_its_record_through():
    data = {"task_id": "t", "prompt": "x", "category": "c", "nested": {"a": [1]}}
    line = result_line(Record(1, "t", data), [completion()])
    assert line.items() >= data.items()
    assert list(line)[-4:] == ["id", "completion", "finish_reason", "metrics"]
    assert (line["id"], line["completion"], line["finish_reason"]) == ("t", "said", "length")
    assert list(line["metrics"]) == METRICS


def test_what_another_run_said_is_not_carried_through():
    old = {"prompt": "x", "completion": "old", "rounds": [], "completion_ids": [1], "error": {"type": "t"}}
    line = result_line(Record(1, 1, old), [completion()])
    assert sorted(line) == ["completion", "finish_reason", "id", "metrics", "prompt"]
    assert line["completion"] == "said"


def test_rounds_and_ids_are_added_on_demand():
    line = result_line(Record(1, 1, {"prompt": "x"}), [completion()], rounds=True, token_ids=True)
    assert line["completion_ids"] == [7, 9]
    (round_,) = line["rounds"]
    assert round_.items() >= {"drafted": 2, "accepted": 1, "stop": "policy", "threshold": 0.5}.items()


def test_a_conversation_has_lists_over_its_turns_and_one_sum():
    said = [completion("one"), completion("two")]
    line = result_line(Record(1, 1, {"turns": ["a", "b"]}), said, rounds=True, token_ids=True)
    assert line["completion"] == ["one", "two"]
    assert line["finish_reason"] == ["length", "length"]
    assert line["completion_ids"] == [[7, 9], [7, 9]]
    assert [len(rounds) for rounds in line["rounds"]] == [1, 1]
    assert line["metrics"]["generated_tokens"] == 4


def test_a_request_of_a_batch_is_read_with_its_body():
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    (record,) = records(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}))
    assert (record.id, record.error) == ("a", None)
    assert record.data == {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", **body}


def test_a_body_beside_a_prompt_is_a_field_like_any_other():
    (record,) = records('{"prompt": "x", "body": {"prompt": "y"}}')
    assert (record.error, record.data) == (None, {"prompt": "x", "body": {"prompt": "y"}})


ARRAY = [{"prompt": "Tom", "id": 1}, {"prompt": "Sam [a {b", "sampling": {"stop": ["]"]}}]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (json.dumps(ARRAY, indent=2), "jq -c '.[]'"),
        ("\ufeff\n" + json.dumps(ARRAY, indent=2) + "\n\n", "jq -c '.[]'"),
        ("[\n" + ",\n".join(map(json.dumps, ARRAY)) + "\n]\n", "jq -c '.[]'"),
        ('[{"prompt": "Tom"},\n {"prompt": "Sam"}]', "jq -c '.[]'"),
        (json.dumps(ARRAY[1], indent=2), "jq -c ."),
        ("\n".join(json.dumps(one, indent=2) for one in ARRAY), "jq -c ."),
    ],
)
def test_json_over_several_lines_is_one_error_with_what_makes_lines_of_it(text, command):
    (record,) = records(text)
    assert (record.line, record.id, record.error.kind) == (1, None, "invalid_json")
    assert record.error.message.startswith(
        "the input is JSON over several lines, not an object on each; make a line of"
    )
    assert record.error.message.endswith(f" with: {command}")
    assert len(records(text, "text")) > 1


@pytest.mark.parametrize("first", ["[", "{", '[{"prompt": "cut'])
def test_lines_behind_a_stray_bracket_are_still_read(first, monkeypatch):
    text = f'{first}\n{{"prompt": "a"}}\n{{"prompt": "b"}}\n'
    assert [record.data.get("prompt") for record in records(text)] == [None, "a", "b"]
    monkeypatch.setattr("specctl.jsonl.MOST_AHEAD", 3)
    assert [record.line for record in records(text)] == [1, 2, 3]


def test_a_good_first_line_is_a_record_before_the_next_one_is_there():
    def stream():
        yield b'{"prompt": "a"}\n'
        raise AssertionError("nothing is read ahead")

    assert next(read_records(stream())).data == {"prompt": "a"}
