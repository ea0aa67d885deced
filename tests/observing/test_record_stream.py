"""Of several records that are answered at once, the parts of the oldest are written, and survive an interrupt."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.decoding.answers import TurnEnd
from specctl.jsonl import Record
from specctl.observing.record_stream import _OpenRecords
from specctl.text_engine.engine import Part, Restarted


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was written: rounds, and turns with their records."""
    found: list[Any] = []
    monkeypatch.setattr("specctl.observing.record_stream.write_line", lambda _, line: found.append(line))
    return found


def open_records(told: list[Any], *, at_once: bool = True) -> _OpenRecords:
    file = SimpleNamespace(
        add=lambda record, turn, completion: told.append((record.line, turn, completion)),
        clear=lambda: told.append("clear"),
    )
    return _OpenRecords(sys.stdout, file, at_once=at_once)  # type: ignore[arg-type]


def turn_of(records: _OpenRecords, record: Record, turn: int) -> None:
    """A round of a record's turn, which ends the turn."""
    name = f"{record.line}.{turn}"
    records.happened(record, Part(0, f"round {name}"))
    records.happened(record, Part(0, TurnEnd(turn, SimpleNamespace(summary=name))))  # type: ignore[arg-type]


def test_parts_are_written_of_the_oldest_record_alone(told: list[Any]) -> None:
    records = open_records(told)
    first, second, third = (Record(line, line, {"turns": ["a", "b", "c"]}) for line in (1, 2, 3))
    for record in (first, second, third):
        records.begin(record)
    turn_of(records, second, 0)
    turn_of(records, first, 0)
    turn_of(records, third, 0)
    turn_of(records, second, 1)
    turn_of(records, first, 1)
    assert told == ["round 1.0", (1, 0, "1.0"), "round 1.1", (1, 1, "1.1")]
    told.clear()
    records.answered()
    records.end()
    assert told == ["clear", "round 2.0", (2, 0, "2.0"), "round 2.1", (2, 1, "2.1")]
    told.clear()
    records.end()
    turn_of(records, third, 1)
    assert told == ["clear", "round 3.0", (3, 0, "3.0"), "round 3.1", (3, 1, "3.1")]
    records.end()
    assert told[-1] == "clear"


def test_a_record_that_begins_again_is_written_once(told: list[Any]) -> None:
    records = open_records(told)
    first, second = (Record(line, line, {"turns": ["a", "b", "c"]}) for line in (1, 2))
    records.begin(first)
    records.begin(second)
    turn_of(records, second, 0)
    records.happened(second, Restarted(1))
    records.answered()
    records.end()
    turn_of(records, second, 0)
    assert told == ["clear", "round 2.0", (2, 0, "2.0")]


def test_what_may_begin_again_elsewhere_is_written_with_its_answer(told: list[Any]) -> None:
    records = open_records(told, at_once=False)
    first = Record(1, 1, {"prompt": "a"})
    records.begin(first)
    records.happened(first, Part(0, "round 0"))
    records.happened(first, Restarted(0, lost=True))
    records.happened(first, Part(0, "round 0 again"))
    assert told == []
    records.answered()
    assert told == ["round 0 again"]
