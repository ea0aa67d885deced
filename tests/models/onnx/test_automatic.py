"""When onnxruntime runs a model unasked."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from specctl.models.onnx import engine, store
from specctl.models.onnx.engine import LONG_RUN, automatic_runner
from specctl.models.onnx.store import EAGER, ONNX, Times
from specctl.models.running.engines import EngineSettings
from tests.support.onnx_models import needs_onnx, one_layer

pytestmark = needs_onnx

Timed = Callable[[float, float], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specctl" / "onnx"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Says what measuring finds, from now on."""

    def use(eager: float, onnx: float) -> None:
        times = {"eager": eager, "onnx": onnx}
        monkeypatch.setattr(engine, "milliseconds", lambda runner, _: times[runner.engine])

    return use


@pytest.fixture
def model() -> PreTrainedModel:
    return one_layer()


def chosen(model: PreTrainedModel, tokens: int, **settings: Any) -> str:
    runner = automatic_runner(model, 32, "it", EngineSettings(expected_tokens=tokens, **settings))
    return "torch" if runner is None else runner.engine


def test_a_short_run_uses_what_a_long_one_made(cache: Path, timed: Timed, model: PreTrainedModel) -> None:
    timed(2.0, 1.0)
    assert chosen(model, LONG_RUN - 1) == "torch"
    assert not cache.exists() or not list(cache.glob("*/model.onnx"))
    assert chosen(model, LONG_RUN) == "onnx"
    assert chosen(model, 1) == "onnx"


def test_what_was_measured_is_remembered(cache: Path, timed: Timed, model: PreTrainedModel) -> None:
    timed(1.0, 2.0)
    assert chosen(model, LONG_RUN) == "torch"
    timed(2.0, 1.0)
    assert chosen(model, LONG_RUN) == "torch", "it was slower here, and is not measured again"
    (path,) = cache.glob("*.times.json")
    ((place, times),) = json.loads(path.read_text()).items()
    assert times == {EAGER: 1.0, ONNX: 2.0}
    path.write_text(json.dumps({f"another {place}": times}))
    assert chosen(model, LONG_RUN) == "onnx", "another machine's times say nothing of this one"
    odd: list[object] = [{EAGER: 5.0}, {EAGER: 5.0, ONNX: float("nan")}, {EAGER: 5.0, ONNX: "x"}, [], 3]
    for text in ("garbage", "[" * 100_000, *(json.dumps({place: each}) for each in odd)):
        path.write_text(text)
        assert chosen(model, LONG_RUN) == "onnx", text[:80]
        assert json.loads(path.read_text())[place] == {EAGER: 2.0, ONNX: 1.0}, "measured again"


def test_a_real_measurement_leaves_an_empty_cache(cache: Path, model: PreTrainedModel) -> None:
    runner = automatic_runner(model, 32, "it", EngineSettings(expected_tokens=LONG_RUN))
    (path,) = cache.glob("*.times.json")
    ((_, times),) = json.loads(path.read_text()).items()
    assert times.keys() == {EAGER, ONNX}
    assert min(times.values()) > 0
    assert (runner is None) == (times[ONNX] >= times[EAGER])
    assert runner is None or runner.length == 0


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_exported_is_tried_once(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    tried = []
    monkeypatch.setattr(engine, "build_onnx_runner", lambda *_, **__: tried.append(1))
    assert [chosen(model, LONG_RUN) for _ in range(3)] == ["torch"] * 3
    assert len(tried) == 1


@pytest.mark.parametrize("size", [1, 1 << 40])
def test_no_size_decides_but_the_measurement(
    cache: Path, monkeypatch: pytest.MonkeyPatch, timed: Timed, model: PreTrainedModel, size: int
) -> None:
    """Whatever it weighs, as long as there is room for its graph."""
    monkeypatch.setattr("specctl.models.passes.weights.weight_bytes", lambda _: size)
    monkeypatch.setattr(engine, "no_room", lambda *_: None)
    timed(2.0, 1.0)
    assert chosen(model, LONG_RUN) == "onnx"
    timed(1.0, 2.0)
    for path in cache.glob("*.times.json"):
        path.unlink()
    assert chosen(model, LONG_RUN) == "torch"


@pytest.mark.parametrize("lacking", ["memory", "disk"])
def test_a_graph_without_room_is_not_made_and_the_reason_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, timed: Timed, model: PreTrainedModel, lacking: str
) -> None:
    timed(2.0, 1.0)
    told: list[str] = []
    with monkeypatch.context() as small:
        if lacking == "memory":
            small.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
        else:
            small.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        assert chosen(model, LONG_RUN, notice=told.append) == "torch"
        assert chosen(model, 1, notice=told.append) == "torch"
    (line,) = told
    asked = "making its graph for onnxruntime takes" if lacking == "memory" else "its graph for onnxruntime takes"
    assert line.startswith(f"it runs on torch: {asked} ")
    assert line.endswith(" and 1000 B is free")
    assert not list(cache.glob("*/model.onnx"))
    assert chosen(model, LONG_RUN, notice=told.append) == "onnx", "once there is room"
    assert len(told) == 1


def test_without_its_packages_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, timed: Timed, model: PreTrainedModel
) -> None:
    timed(2.0, 1.0)
    monkeypatch.setattr(store, "find_spec", lambda name: None if name == "onnxscript" else object())
    assert chosen(model, LONG_RUN) == "torch"


def test_faster_by_every_number_of_threads_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    times = Times(tmp_path / "times.json")
    assert not times.onnx_is_faster(None)
    times.note({EAGER: 2.0, ONNX: 1.0}, 1)
    assert times.onnx_is_faster(None)
    assert times.onnx_is_faster(1)
    assert not times.onnx_is_faster(2)
    times.note({EAGER: 1.0, ONNX: 2.0}, 4)
    assert not times.onnx_is_faster(None)
    assert times.onnx_is_faster(1)
    times.note({}, 1)  # onnxruntime cannot run it
    assert not times.onnx_is_faster(1)
