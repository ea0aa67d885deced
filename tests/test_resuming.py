"""What an interrupted run finished, and ids in little memory."""

import json
import random
import tracemalloc

import pytest

from specctl.errors import RecordError, UsageError
from specctl.jsonl import DUPLICATE, Record, error_line
from specctl.resuming import Finished, Identities, Survey, distinct, finished_rounds, hash_of

DONE = '{"id": "a", "completion": ""}\n{"id": "z", "completion": ""}\n{"id": null, "line": 4, "error": {}}\n'


def test_finished_records_are_found_by_their_id_or_line(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(DONE)
    finished = Finished(path)
    assert (len(finished), finished.failed, finished.torn) == (3, 1, False)
    assert [finished.take(Record(1, id_)) for id_ in ("a", "b", "z")] == [True, False, True]
    assert [finished.take(Record(line, None)) for line in (3, 4)] == [False, True]


def test_an_error_for_an_id_that_stands_twice_is_told_from_the_first(tmp_path):
    path = tmp_path / "out.jsonl"
    second = Record(7, "a", {"prompt": "other"}, RecordError(DUPLICATE, "again"))
    path.write_text(
        '{"id": "a", "prompt": "x", "completion": ""}\n' + json.dumps(error_line(second, second.error)) + "\n"
    )
    finished = Finished(path)
    assert len(finished) == 2
    assert finished.take(Record(1, "a", {"prompt": "x"}))
    assert finished.take(second)
    assert not finished.has(Record(8, "a", error=second.error).key)


def test_an_input_is_surveyed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(DONE)
    records = [Record(1, "a"), Record(2, "b"), Record(3, "c"), Record(4, None)]
    assert Finished(path).survey(records) == Survey(2, 2, records[1])
    assert Finished(path).survey(records[:1]) == Survey(1, 0, None)


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "other"},
        {"prompt": "x", "sampling": {"temperature": 0}},
        {"prompt": "x", "seed": 3},
        {"messages": [{"role": "user", "content": "x"}]},
        {"turns": ["x"]},
    ],
    ids=str,
)
def test_another_record_with_the_id_of_a_finished_one_is_refused_by_line(tmp_path, data):
    path = tmp_path / "out.jsonl"
    path.write_text(DONE + '{"id": "b", "prompt": "x", "note": 1, "completion": ""}\n')
    finished = Finished(path)
    assert finished.take(Record(9, "b", {"prompt": "x", "note": 2})), "a note is nothing that is answered"
    with pytest.raises(UsageError, match=r"out\.jsonl:4: on line 9 of the input"):
        finished.take(Record(9, "b", data))
    with pytest.raises(UsageError, match=r"out\.jsonl:4: on line 9 of the input"):
        finished.survey([Record(1, "a"), Record(9, "b", data)])
    assert Finished(path, anyway=True).take(Record(9, "b", data))


def test_a_torn_last_line_does_not_count_and_is_only_read(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(DONE + '{"id": "b", "compl')
    assert not Finished(path).take(Record(1, "b"))
    assert Finished(path).torn
    assert path.read_text() == DONE + '{"id": "b", "compl'
    path.write_text(DONE + '{"id": "b", "completion": ""}')
    assert not Finished(path).take(Record(1, "b")), "its line feed is missing, so it will be cut off"


def test_nothing_is_finished_where_there_is_no_file(tmp_path):
    assert len(Finished(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    "content",
    [
        '{"id": 1, "prompt": "an input"}\n',
        '{"completion": "no id"}\n',
        "notes\nto keep",
        "notes to keep",
        '{"id": 1, "torn',
        '"completion"\n',
        "5\n",
        "null\n",
        "[" * 3000 + "\n",
        '{"completion": "", "id": ' + "9" * 5000 + "}\n",
        '{"id": 1, "prompt": "a document"}',
        "[1]\n",
        "\n",
        b"\x89PNG\xff",
    ],
)
def test_a_file_of_another_kind_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content := content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match="was not written by this command"):
        Finished(path)
    assert path.read_bytes() == content


def rounds(*identities, start=0):
    """Two rounds for each id."""
    lines = [json.dumps({"id": id_, "turn": 0, "round": n}) for id_ in identities for n in (start, start + 1)]
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize(
    ("kept", "rest"),
    [
        (["a"], ["b"]),
        (["a", "z"], ["b"]),
        (["a", "z"], []),
        (["a"], []),
        ([], ["b"]),
    ],
)
def test_rounds_of_an_interrupted_record_do_not_stay(tmp_path, kept, rest):
    out, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    out.write_text(DONE)
    trace.write_text(rounds(*kept, *rest) + '{"id": "b", "rou' * bool(kept))
    before = trace.read_bytes()
    assert finished_rounds(trace, Finished(out), known=False) == len(rounds(*kept))
    assert trace.read_bytes() == before
    assert finished_rounds(trace, Finished(out), next((Record(5, id_) for id_ in rest), None)) == len(rounds(*kept))


@pytest.mark.parametrize(
    ("content", "coming", "line"),
    [
        (rounds("b", "c"), "unknown", 3),
        (rounds("a", "b", "a"), "unknown", 5),
        (rounds("a", "b"), Record(5, "c"), 3),
        (rounds("other run"), Record(5, "c"), 1),
        (rounds("a", "b"), None, 3),
    ],
)
def test_a_trace_of_another_run_is_refused(tmp_path, content, coming, line):
    out, trace = tmp_path / "out.jsonl", tmp_path / "trace.jsonl"
    out.write_text(DONE)
    trace.write_text(content)
    known = coming != "unknown"
    with pytest.raises(UsageError, match=rf"trace\.jsonl:{line}: the trace does not belong to these results"):
        finished_rounds(trace, Finished(out), coming if known else None, known=known)


def test_a_trace_of_another_kind_is_refused(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("notes\n")
    with pytest.raises(UsageError, match=r"trace\.jsonl:1"):
        finished_rounds(trace, Finished(tmp_path / "none"))
    assert trace.read_text() == "notes\n"


def test_what_was_put_is_found_and_nothing_else():
    draw, table, expected = random.Random(1), Identities(), {}
    for _ in range(5000):
        text, value = str(draw.randrange(4000)), draw.randrange(1 << 32)
        table.put(text, value)
        expected[text] = value
    assert len(table) == len(expected)
    assert {text: table.get(text) for text in expected} == expected
    assert [table.get(f"no {number}") for number in range(1000)] == [None] * 1000


def test_texts_without_a_form_in_utf8_have_hashes():
    assert hash_of("\ud800") != hash_of("\udc00")


def test_thousands_of_ids_take_half_a_megabyte():
    tracemalloc.start()
    table = Identities()
    for number in range(12_500):
        table.put(str(number), number)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == 12_500
    assert taken <= 16 * 32_768, "an array of 8 and one of 4 bytes for each of 2^15 places"


def test_the_second_record_with_an_id_is_an_error_that_names_the_first():
    ids = ["a", 1, "1", True, None, None, 1.0, {"b": [1]}, {"b": [1]}, "a", "a"]
    found = list(distinct(Record(line, id_, {"id": id_}) for line, id_ in enumerate(ids, start=1)))
    errors = {record.line: str(record.error) for record in found if record.error is not None}
    assert errors == {9: "line 8 has the same id", 10: "line 1 has the same id", 11: "line 1 has the same id"}
    assert len({record.key for record in found}) == len(found), "each can be told from all others"


def test_a_line_number_that_another_record_has_as_its_id():
    first, second = distinct([Record(1, 2, {"id": 2}), Record(2, 2, {"prompt": "x"})])
    assert first.error is None
    assert str(second.error) == "line 1 has the same id; a record without an id has its line number"
