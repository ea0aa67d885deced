"""Which engine ``auto`` is on a card, what reports say of it, and what a calibration writes down."""

import pytest
import torch

from specctl.calibration.calibrated import measured_engine
from specctl.models.placing.engine_table import build_runner
from specctl.models.placing.memory import CUDA_CONTEXT, DeviceMemory, Estimate, working_bytes
from specctl.models.placing.placement import place
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings, engine_report
from specctl.models.running.graph import GraphPasses
from specctl.profile import resolve
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import VOCABULARY, on, tiny_model
from tests.support.toys import random_model


def test_auto_is_graph_where_a_model_can_be_captured() -> None:
    heard: list[str] = []
    settings = EngineSettings(notice=heard.append)
    with Devices() as cuda, torch.inference_mode():
        runner = build_runner(on(cuda, tiny_model(), "cuda:0"), VOCABULARY, "it", settings)
        assert isinstance(runner.passes, GraphPasses)
        assert engine_report(runner) == "graph"
        windowed = build_runner(on(cuda, random_model("mistral"), "cuda:0"), VOCABULARY, "it", settings)
        assert isinstance(windowed.passes, EagerPasses)
        assert engine_report(windowed) == "eager"
    assert isinstance(build_runner(tiny_model(), VOCABULARY, "it", settings).passes, EagerPasses)
    assert heard == []


@pytest.mark.parametrize(
    ("asked", "device", "ran", "written"),
    [
        ("auto", "cuda:0 (NVIDIA H100)", "graph", {"engine": "graph", "compile": False}),
        ("auto", "cuda:0 (NVIDIA H100)", "static, compiled", {"engine": "static", "compile": True}),
        ("auto", "cpu (a processor, 1 threads)", "eager", {}),
        ("graph", "cuda:0 (NVIDIA H100)", "graph", {}),
    ],
)
def test_a_calibration_on_a_card_writes_the_engine_it_measured(
    asked: str, device: str, ran: str, written: dict[str, object]
) -> None:
    facts = {"devices": {"target": device}, "engines": {"target": ran}}
    resolved = resolve("embedded", overrides=[f"engine={asked}"])
    assert measured_engine(resolved.profile.engine, facts) == written


def test_working_takes_more_on_a_card_than_the_cache() -> None:
    need = Estimate(8_000_000_000, 16_000_000_000, "bfloat16", False, 2 * 32 * 8 * 128)
    cache = need.cache_bytes("bfloat16", 4096)
    assert working_bytes(need, "bfloat16", 4096, "auto", on_cuda=False, first=True) == cache
    eager = working_bytes(need, "bfloat16", 4096, "eager", on_cuda=True, first=True)
    assert eager > 1.25 * cache + CUDA_CONTEXT
    assert working_bytes(need, "bfloat16", 4096, "graph", on_cuda=True, first=True) > eager
    assert working_bytes(need, "bfloat16", 4096, "eager", on_cuda=True, first=False) == eager - CUDA_CONTEXT


def test_a_device_without_float64_takes_a_model() -> None:
    need = Estimate(1000, 4000, "float32", False, 4)
    table = resolve("embedded", overrides=["target.device=mps"]).profile.target
    devices = [DeviceMemory("mps:0", "an Apple GPU", 1 << 34, 1 << 34), DeviceMemory("cpu", "", 1 << 34, 1 << 34)]
    assert [*place(table, need, devices, "target").shares] == ["mps:0"]
