"""Graphs appear whole or not at all, are known by what they were made from, and damaged ones are not read."""

import fcntl
from pathlib import Path
from threading import Timer

import pytest
import torch
from toys import random_model

from specctl.models.onnx.store import GRAPH, Store, cache_folder, key_of


def write(path: Path) -> None:
    path.write_text("graph")
    path.with_name("weights.bin").write_bytes(bytes(100))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "graphs")


def test_what_was_put_is_found(store: Store) -> None:
    assert store.find("it") is None
    assert store.put("it", write) == store.find("it") == store.folder / "it" / GRAPH
    assert store.find("other") is None


def test_a_graph_that_is_not_finished_is_not_there(store: Store) -> None:
    def interrupted(path: Path) -> None:
        write(path)
        assert store.find("it") is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("it", interrupted)
    assert store.find("it") is None
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "manifest", "format"])
def test_a_damaged_graph_is_not_found_and_is_replaced(store: Store, damage: str) -> None:
    folder = store.put("it", write).parent
    weights, manifest = folder / "weights.bin", folder / "manifest.json"
    if damage == "cut":
        weights.write_bytes(bytes(99))
    elif damage == "changed":
        weights.write_bytes(bytes(50) + b"x" + bytes(49))
    elif damage == "gone":
        (folder / GRAPH).unlink()
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:-3])
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert store.find("it") is None
    assert store.put("it", write) == store.find("it")


def test_two_processes_do_not_make_the_same_graph(store: Store) -> None:
    heard: list[str] = []
    store.folder.mkdir(parents=True)
    with (store.folder / ".it.lock").open("ab") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        Timer(0.3, lambda: (heard.append("done"), fcntl.flock(other.fileno(), fcntl.LOCK_UN))).start()
        with store.alone("it", lambda: heard.append("waiting")):
            heard.append("alone")
    assert heard == ["waiting", "done", "alone"]


def test_a_key_says_what_a_graph_was_made_from() -> None:
    model = random_model.__wrapped__("llama")
    key = key_of(model, None)
    assert key == key_of(random_model.__wrapped__("llama"), None)
    keys = {key, key_of(model, "int4"), key_of(random_model.__wrapped__("mistral"), None)}
    model.config.rms_norm_eps = 0.1
    keys.add(key_of(model, None))
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3
    keys.add(key_of(model, None))
    assert len(keys) == 5


def test_where_graphs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specctl" / "onnx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specctl" / "onnx"
