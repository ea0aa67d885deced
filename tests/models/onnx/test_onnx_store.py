"""Graphs appear whole or not at all, are known by what they were made from, and damaged ones are not read."""

import fcntl
import os
import sys
from importlib import import_module
from pathlib import Path
from threading import Timer
from time import time

import pytest
import torch

from specctl.models.onnx import store as stores
from specctl.models.onnx.store import GRAPH, SCHEMA_VERSION, TEMPORARY, Store, cache_folder, key_of, temporary_store
from specctl.outputs import ABANDONED
from tests.support.toys import random_model


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


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "manifest", "version", "deep", "outside"])
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
    elif damage == "deep":
        manifest.write_text("[" * 100_000)
    elif damage == "outside":
        manifest.write_text(manifest.read_text().replace('"weights.bin"', '"../it/weights.bin"'))
    else:
        manifest.write_text(manifest.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 0'))
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


def left_behind(path: Path, *, old: bool = True) -> Path:
    """What a process leaves that was killed while it wrote a graph."""
    (path / "it").mkdir(parents=True)
    write(path / "it" / GRAPH)
    for each in (*path.rglob("*"), path):
        os.utime(each, (time() - 2 * ABANDONED * old,) * 2)
    return path


def test_what_killed_processes_left_is_removed(store: Store) -> None:
    killed, fresh = left_behind(store.folder / ".it-a1b2"), left_behind(store.folder / ".it-c3d4", old=False)
    others = left_behind(store.folder / ".other-e5f6")
    with (store.folder / ".other.lock").open("ab") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        with store.alone("new", lambda: None):
            assert not killed.exists()
            assert fresh.exists(), "it was just begun"
            assert others.exists(), "a living process writes it, however long that takes"
    with store.alone("new", lambda: None):
        assert not others.exists()


def test_folders_that_end_with_a_process_are_removed_if_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = left_behind(tmp_path / f"{TEMPORARY}a1b2")
    alive = temporary_store().folder
    for each in (*alive.iterdir(), alive):
        os.utime(each, (0, 0))
    left_behind(tmp_path / "something-else")
    second = temporary_store().folder
    assert not killed.exists()
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, second.name, "something-else"}


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


@pytest.mark.parametrize("package", ["specctl", "torch", "transformers", "onnxscript", "onnxruntime"])
def test_another_version_makes_another_graph(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    model = random_model.__wrapped__("llama")
    before, usual = key_of(model, None), stores.version_of

    monkeypatch.setattr(stores, "version_of", lambda name: "99" if name == package else usual(name))
    assert key_of(model, None) != before


def test_other_code_of_a_custom_model_makes_another_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n"
    package = tmp_path / "transformers_modules"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "modeling_own.py").write_text(code)
    (package / "helping.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    made = import_module("transformers_modules.modeling_own").Own(random_model("llama").config)
    keys = {key_of(made, None)}
    (package / "modeling_own.py").write_text(code + "# other\n")
    keys.add(key_of(made, None))
    (package / "helping.py").write_text("a = 2\n")
    keys.add(key_of(made, None))
    assert len(keys) == 3
    for name in ("transformers_modules", "transformers_modules.modeling_own"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_where_graphs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specctl" / "onnx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specctl" / "onnx"


WIDE = "fpu fma avx2 avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("machine", "features", "used"),
    [
        ("x86_64", f"flags\t\t: {WIDE} avx512_vnni avx_vnni amx_int8", "AVX-512 VNNI"),
        ("x86_64", f"flags\t\t: {WIDE} avx_vnni", "AVX-512"),
        ("x86_64", "flags\t\t: fpu fma avx2 avx_vnni", "AVX-VNNI"),
        ("x86_64", "flags\t\t: fpu fma avx2 avx512f", "AVX2"),
        ("x86_64", "flags\t\t: fpu sse4_2 avx", ""),
        ("aarch64", "Features\t: asimd asimddp i8mm", "NEON dot products and, with 8 bits, matrix products (i8mm)"),
        ("aarch64", "Features\t: fp asimd asimddp", "NEON dot products"),
        ("aarch64", "Features\t: fp asimd", ""),
        ("riscv64", "features\t: v", None),
        ("x86_64", "processor\t: 0", None),
    ],
)
def test_the_instructions_of_integer_products(tmp_path: Path, machine: str, features: str, used: str | None) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{features}\n\nprocessor\t: 1\n")
    assert stores.integer_products(path, machine) == used


def test_without_a_description_of_the_processor_its_instructions_are_unknown(tmp_path: Path) -> None:
    assert stores.integer_products(tmp_path / "none", "arm64") is None
    assert len(stores.processor(tmp_path / "none")) == 2
