"""Graphs for several sequences are made once, and anew where what they were made of, or how, is another."""

import os
from pathlib import Path

import pytest

from specctl.models.onnx import packed_graph, store
from specctl.models.onnx.store import Store, derived_graph


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    made: list[int | None] = []

    def make(path: Path, rows: int | None) -> bytes:
        made.append(rows)
        return path.read_bytes() * (rows or 1)

    monkeypatch.setattr(packed_graph, "packed_graph", make)
    return made


def put(folder: Path, graph: str) -> Path:
    return Store(folder).put("it", lambda path: path.write_text(graph) and None)


def test_a_graph_is_made_once_for_each_number_of_sequences(made: list[int | None], tmp_path: Path) -> None:
    path = put(tmp_path, "ab")
    for rows in (2, 3, None, 2, 3, None):
        assert derived_graph(path, rows) == b"ab" * (rows or 1)
    assert made == [2, 3, None]
    assert Store(tmp_path).find("it") == path, "it is whole as before"


@pytest.mark.parametrize("change", ["graph", "form", "damaged", "cut", "other number"])
def test_what_is_not_the_same_is_made_anew(
    made: list[int | None], tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = put(tmp_path, "ab"), Store(tmp_path).derived("it", 2)
    derived_graph(path, 2)
    if change == "graph":
        path = put(tmp_path, "cd")
    elif change == "form":
        monkeypatch.setattr(store, "FORM", 99)
    elif change == "damaged":
        kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    elif change == "cut":
        kept.write_bytes(kept.read_bytes()[:3])
    else:
        derived_graph(path, 3)
        Store(tmp_path).derived("it", 3).replace(kept)
        made.pop()
    assert derived_graph(path, 2) == path.read_bytes() * 2
    assert made == [2, 2]


@pytest.mark.usefixtures("made")
def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    path, kept = put(tmp_path, "ab"), Store(tmp_path).derived("it", 2)
    old, new = (kept.with_name(f".{kept.name}-{number}") for number in (1, 2))
    for left in (old, new):
        left.write_text("a")
    os.utime(old, (0, 0))
    derived_graph(path, 2)
    assert (old.exists(), new.exists(), kept.exists()) == (False, True, True)
    Store(tmp_path).remove("it")
    assert not [*tmp_path.iterdir()]


def test_nothing_is_kept_outside_of_a_store_or_where_nothing_can_be(made: list[int | None], tmp_path: Path) -> None:
    alone = tmp_path / "one" / "model.onnx"
    alone.parent.mkdir()
    alone.write_text("ab")
    assert derived_graph(alone, 2) == derived_graph(alone, 2) == b"abab"
    assert [each.name for each in tmp_path.iterdir()] == ["one"]
    path = put(tmp_path, "ab")
    Store(tmp_path).derived("it", 2).mkdir()
    assert derived_graph(path, 2) == b"abab"
    assert made == [2, 2, 2]
