"""Ids in little memory."""

import random
import tracemalloc

from specctl.jsonl import Record
from specctl.resuming import Identities, distinct, hash_of


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
