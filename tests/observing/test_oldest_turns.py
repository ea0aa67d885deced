"""Of several conversations that are answered at once, the turns of the oldest one survive an interrupt."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.jsonl import Record
from specctl.observing.replicated_records import OldestTurns


def test_turns_are_kept_of_the_oldest_record_alone_with_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    file = SimpleNamespace(
        add=lambda record, turn, completion: told.append((record.line, turn, completion)),
        clear=lambda: told.append("clear"),
    )
    traced: list[str] = []
    monkeypatch.setattr("specctl.observing.replicated_records.write_line", lambda _, line: traced.append(line))
    kept = OldestTurns(file, sys.stdout)  # type: ignore[arg-type]
    first, second, third = (Record(line, line, {"turns": ["a", "b", "c"]}) for line in (1, 2, 3))

    def end(record: Record, turn: int) -> None:
        name = f"{record.line}.{turn}"
        kept.keep(record, turn, SimpleNamespace(summary=name), [name])  # type: ignore[arg-type, list-item]

    for record in (first, second, third):
        kept.begin(record)
    end(second, 0)
    end(first, 0)
    end(third, 0)
    end(second, 1)
    end(first, 1)
    end(first, 2)
    assert told == [(1, 0, "1.0"), (1, 1, "1.1")]
    assert (traced, kept.written) == (["1.0", "1.1"], 2), "no later run would write them"
    told.clear()
    kept.end()
    assert kept.written == 2
    assert told == ["clear", (2, 0, "2.0"), (2, 1, "2.1")]
    told.clear()
    kept.end()
    end(third, 1)
    assert told == ["clear", (3, 0, "3.0"), (3, 1, "3.1")]
    kept.end()
    assert told[-1] == "clear"
    assert (traced, kept.written) == (["1.0", "1.1", "2.0", "2.1", "3.0", "3.1"], 0)
