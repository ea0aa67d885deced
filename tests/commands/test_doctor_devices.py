"""``doctor --devices`` on machines that are handed in as data."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import LlamaForCausalLM, MixtralConfig
from typer.testing import CliRunner

from specctl.commands.doctor import Devices, device_sections, doctor, examine_devices
from specctl.doctor import diagnosis
from specctl.doctor.diagnosis import diagnose, layer_places
from specctl.doctor.outlook import Bandwidth, bandwidth, published
from specctl.errors import UsageError
from specctl.models.onnx.store import PACKAGES
from specctl.models.passes.weights import Where
from specctl.models.placing import memory
from specctl.models.placing.engine_table import build_runner, chosen
from specctl.models.placing.memory import Card, DeviceMemory, Graphics, described, parsed
from specctl.models.placing.placement import Placement
from specctl.models.running.engines import EngineSettings
from specctl.profile.schema import DraftTable, ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model
from tests.support.toys import random_model

GIB = 1 << 30
H100 = Card("NVIDIA H100 80GB HBM3", 81559 << 20, "9.0")
WITH_CUDA = Graphics("580.82.07", (H100,), "2.13.0+cu130", "13.0", ("sm_80", "sm_90", "compute_90"), 1)
WITHOUT = Graphics(None, (), "2.13.0+cpu", None)
app = typer.Typer()
app.command()(doctor)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target", llama_config(258, num_hidden_layers=6))
    save_model(folder / "draft", llama_config(258, num_hidden_layers=1))
    return folder


@pytest.fixture
def examine(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Devices]:
    """Examine the pair on some devices; the cards are not there, so that published bandwidths are used."""

    def examined(devices: list[DeviceMemory], *, place: str = "auto", **settings: Any) -> Devices:
        monkeypatch.setattr(diagnosis, "device_memory", lambda: devices)
        target = ModelTable(model=str(models / "target"), device=place)
        profile = Profile(target=target, draft=DraftTable(model=str(models / "draft")), **settings)
        return examine_devices(profile, diagnose(profile), replace(WITH_CUDA, usable=0))

    return examined


def card(index: int = 0, *, free: int = 70 * GIB, label: str = H100.name) -> DeviceMemory:
    return DeviceMemory(f"cuda:{index}", label, 80 * GIB, free)


CPU = DeviceMemory("cpu", "8 CPU threads", 64 * GIB, 60 * GIB)


def test_a_pair_on_a_card(examine: Callable[..., Devices]) -> None:
    found = examine([card(), CPU], engine="graph")

    target, draft = found.models
    assert [one.engine for one in found.models] == ["graph", "graph"]
    # Per layer: q and o 16 x 16, k and v 8 x 16, three 16 x 32, two norms; then the output layer and a last norm.
    layer = 2 * 256 + 2 * 128 + 3 * 512 + 2 * 16
    assert target.reads[0] == 4 * (6 * layer + 258 * 16 + 16)
    assert draft.reads[0] == 4 * (layer + 258 * 16 + 16)
    (room,) = found.rooms
    assert room.device == "cuda:0"
    assert room.weights == target.weights + draft.weights
    assert room.caches == 1.5 * (6 + 1) * 2 * 2 * 4 * 4 * target.context  # buffers keep room for half as many
    assert room.left == 70 * GIB - room.weights - room.caches - room.working
    assert found.bandwidths == {"cuda:0": Bandwidth(3350e9, "published")}
    outlook = found.outlook
    assert outlook is not None
    cached = 1000 * 2 * 2 * 4 * 4
    assert outlook.step_ms["target"] == pytest.approx((target.reads[0] + 6 * cached) / 3350e6)
    assert outlook.cost_ratio == pytest.approx((draft.reads[0] + cached) / (target.reads[0] + 6 * cached))
    assert outlook.layer_ratio == 1 / 6
    assert outlook.pays_from_launched == pytest.approx(0.17)


def test_a_card_that_is_too_small_for_the_context_says_how_much_fits(examine: Callable[..., Devices]) -> None:
    roomy = examine([card(), CPU]).rooms[0]
    each = roomy.caches // roomy.context
    free = roomy.weights + roomy.working + 10 * each

    found = examine([card(free=free), CPU])

    assert found.rooms[0].left < 0
    assert found.rooms[0].tokens == 10
    shown = dict(device_sections(found))["cuda:0, once the models run"]
    assert shown["room for"] == "10 tokens"
    assert shown["left"].endswith("too little")


def test_a_target_over_two_cards_reads_its_parts_one_after_the_other(examine: Callable[..., Devices]) -> None:
    alone = examine([card(), CPU], engine="graph")
    spread = examine([card(), card(1), CPU], place="balanced", engine="graph")
    assert len(spread.models[0].devices) == 2
    assert alone.outlook is not None
    assert spread.outlook is not None
    assert spread.outlook.step_ms["target"] == pytest.approx(alone.outlook.step_ms["target"], rel=1e-3)
    assert (spread.models[0].engine, spread.models[0].why) == ("eager", "it is spread over several devices")
    caches = [room.caches for room in spread.rooms]
    assert sum(caches) == pytest.approx(alone.rooms[0].caches, rel=1e-3)


def test_a_card_without_a_known_bandwidth(examine: Callable[..., Devices]) -> None:
    found = examine([card(label="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), CPU])

    assert found.bandwidths == {"cuda:0": None}
    assert found.outlook is not None
    assert found.outlook.step_ms == {"target": None, "draft": None}
    shown = dict(device_sections(found))
    assert shown["cuda:0, once the models run"]["reads"] == "unknown"
    assert shown["what drafts can bring"]["can pay"].startswith("unknown")


def test_on_a_cpu_it_is_measured(models: Path) -> None:
    arguments = ["--target", str(models / "target"), "--draft", str(models / "draft"), "--devices"]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    told = json.loads(result.stdout)["outlook"]

    assert result.exit_code == 0
    assert told["bandwidths"]["cpu"]["source"] == "measured"
    assert 0 < told["outlook"]["step_ms"]["draft"] < told["outlook"]["step_ms"]["target"]
    assert [gain["acceptance_rate"] for gain in told["outlook"]["gains"]] == [0.6, 0.7, 0.8, 0.9]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "  cards: none that nvidia-smi lists; models run on the other devices below\n" in shown
    assert "  can pay: if more than about " in shown
    assert shown.splitlines()[-1] == "Verdict: ready."


def test_models_with_problems_leave_the_cards(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "nvidia_smi", lambda _: "NVIDIA L4, 550.54.14, 23034, 8.9\n")
    arguments = ["--target", str(models / "target"), "--draft", str(models / "none"), "--devices"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert result.exit_code == 3
    assert "  card 0: NVIDIA L4, 22.5 GiB, compute capability 8.9\n" in result.stdout
    assert "  problem 1: torch " in result.stdout
    assert "what drafts can bring" not in result.stdout


def test_experts_that_no_token_chose_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32, "head_dim": 4}
    dense = llama_config(258)
    config = MixtralConfig(**{**{key: getattr(dense, key) for key in SHAPE}, **sizes})
    save_model(tmp_path / "target", config)
    monkeypatch.setattr(diagnosis, "device_memory", lambda: [card(), CPU])
    profile = Profile(target=ModelTable(model=str(tmp_path / "target")))

    (model,) = examine_devices(profile, diagnose(profile), replace(WITH_CUDA, usable=0)).models

    expert = 2 * 3 * 16 * 32 * 4  # bytes of one expert in both layers
    assert model.reads[1] - model.reads[0] == pytest.approx(4 * expert * (3 / 4 - (3 / 4) ** 2), abs=1)
    assert model.reads[-1] < model.weights


SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (WITH_CUDA, []),
        (WITHOUT, []),
        (replace(WITHOUT, driver="580.1", cards=(H100,)), ["torch 2.13.0+cpu was built without CUDA"]),
        (
            replace(WITH_CUDA, usable=0, driver="550.54.14"),
            ["needs a driver of version 580 or newer, and the driver is 550"],
        ),
        (replace(WITH_CUDA, usable=0, hidden=""), ["CUDA_VISIBLE_DEVICES = '' hides every card"]),
        (
            replace(WITH_CUDA, cards=(Card("NVIDIA GeForce GTX 1080", 8 * GIB, "6.1"),)),
            ["no kernels for NVIDIA GeForce GTX"],
        ),
        (replace(WITH_CUDA, cards=(Card("NVIDIA B200", 8 * GIB, "10.0"),)), []),  # compute_90 is translated for it
        (replace(WITH_CUDA, cards=(Card("NVIDIA A10", 8 * GIB, "8.6"),)), []),  # sm_80 runs on all of its generation
    ],
    ids=["usable", "none", "no CUDA in torch", "old driver", "hidden", "too old", "newer", "same generation"],
)
def test_why_torch_cannot_use_a_card(found: Graphics, said: list[str]) -> None:
    obstacles = found.obstacles
    assert len(obstacles) == len(said)
    for obstacle, part in zip(obstacles, said, strict=True):
        assert part in obstacle


def test_what_nvidia_smi_answers() -> None:
    answer = "NVIDIA GeForce RTX 4090, 580.82.07, 24564, 8.9\nNVIDIA GH200, 580.82.07, [N/A], [N/A]\nNo devices\n"
    assert parsed(answer) == (
        "580.82.07",
        (Card("NVIDIA GeForce RTX 4090", 24564 << 20, "8.9"), Card("NVIDIA GH200", None, None)),
    )
    assert parsed("") == (None, ())


def test_published_bandwidths_are_those_of_the_very_card() -> None:
    assert published("NVIDIA GeForce RTX 4090") == Bandwidth(1008e9, "published")
    assert published("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert published("Tesla T4") == Bandwidth(320e9, "published")


def test_a_device_that_is_there_is_measured() -> None:
    asked = []

    def measure(device: str, size: int) -> float:
        asked.append((device, size))
        return 1e12

    assert bandwidth(card(), 5 * GIB, here=True, measure=measure) == Bandwidth(1e12, "measured")
    assert bandwidth(card(free=GIB), 5 * GIB, here=True, measure=measure) == Bandwidth(1e12, "measured")
    assert asked == [("cuda:0", 5 * GIB), ("cuda:0", GIB // 4)]


@pytest.mark.parametrize("compile_", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("engine", ["auto", "eager", "static", "graph"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_engine_is_the_one_that_is_built(family: str, engine: Any, compile_: bool) -> None:
    model = random_model(family)
    settings = EngineSettings(engine=engine, compile=compile_)
    choice = chosen(engine, model, Where(("cpu",), 1000), settings)
    while choice.engine.tried and choice.otherwise is not None:
        choice = choice.otherwise  # as where onnxruntime turns out to be slower
    assert choice.name == build_runner(model, 60, "it", settings).engine


@pytest.mark.parametrize("quantised", [None, "torchao"])
def test_onnx_is_chosen_where_it_could_be_faster(quantised: str | None) -> None:
    choice = chosen("auto", random_model("llama"), Where(("cpu",), 1000, quantised), EngineSettings())
    there = all(find_spec(package) for package in PACKAGES)
    assert (choice.name == "onnx or eager") == (there and quantised is None)


@pytest.mark.parametrize(
    ("name", "blocks", "shares_output"),
    [("embedded-eagle3", False, False), ("embedded-dspark", True, True), ("embedded-lookup", True, False)],
)
def test_drafts_that_are_no_models(name: str, blocks: bool, shares_output: bool) -> None:
    result = CliRunner().invoke(app, ["-p", name, "--devices", "--json"], catch_exceptions=False)
    told = json.loads(result.stdout)["outlook"]
    target, draft = told["models"]
    gains = told["outlook"]["gains"]

    assert draft["blocks"] is blocks
    lengths = [gain["draft_length"] for gain in gains]
    assert lengths == sorted(lengths)
    if name == "embedded-lookup":
        assert (draft["reads"], told["outlook"]["cost_ratio"], lengths[0]) == ([], 0, 40)
        return
    assert len(set(draft["reads"])) == 1
    output = 4 * 4096 * 192  # of the target, float32
    assert (draft["reads"][0] > sum(draft["devices"].values())) is shares_output
    assert draft["reads"][0] < target["reads"][0]
    if blocks:
        assert set(lengths) == {draft["longest"]}  # a whole block costs no more than its first token
        assert draft["reads"][0] > output
    assert told["outlook"]["pays_from"] < 1


def without_weights(models: Path, folder: Path) -> list[str]:
    """Flags that name copies of the pair without weights."""
    flags = []
    for key in ("target", "draft"):
        shutil.copytree(models / key, folder / key, ignore=shutil.ignore_patterns("*.safetensors"))
        flags += [f"--{key}", str(folder / key)]
    return flags


def test_a_folder_without_weights_is_counted_by_its_configuration(models: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, [*without_weights(models, tmp_path), "--json"], catch_exceptions=False)
    assert shown.exit_code == 3
    document = json.loads(shown.stdout)
    whole = json.loads(CliRunner().invoke(app, ["--target", str(models / "target"), "--json"]).stdout)["models"][0]
    found = document["models"][0]
    assert found["parameters"] == whole["parameters"] > 0
    assert found["weights_by_dtype"] == whole["weights_by_dtype"]
    assert [problem["where"] for problem in document["problems"]] == ["draft", "target"]
    assert all("holds no weights" in problem["message"] for problem in document["problems"])


def test_another_machine_is_described_and_nothing_has_to_be_here(models: Path, tmp_path: Path) -> None:
    pair = without_weights(models, tmp_path)
    shown = CliRunner().invoke(app, [*pair, "--memory", "cuda:0=24GiB", "--json"], catch_exceptions=False)
    document = json.loads(shown.stdout)
    assert shown.exit_code == 0, "its weights are not here, and what they take is known"
    assert document["ready"]
    card = document["devices"][0]
    assert (card["name"], card["free"]) == ("cuda:0", 24 * GIB)
    assert "All weights fit on the devices that --memory describes." in document["advice"]
    assert [one["layers"] for one in document["models"]] == [{"cuda:0": 6}, {"cuda:0": 1}]
    assert [one["engine"] for one in document["outlook"]["models"]] == ["graph", "graph"]
    assert document["outlook"]["graphics"] is None
    assert document["outlook"]["rooms"][0]["free"] == 24 * GIB
    told = CliRunner().invoke(app, [*pair, "--memory", "cuda:0=24GiB"], catch_exceptions=False).stdout
    assert "  layers: 6 on cuda:0" in told
    assert "  is: as --memory describes it" in told
    assert "cuda:0, once the models run" in told
    assert "NVIDIA cards" not in told
    assert "holds no weights" in told
    assert told.endswith("Verdict: fits.\n")
    small = CliRunner().invoke(app, [*pair, "--memory", "cuda:0=2KiB"], catch_exceptions=False)
    assert small.exit_code == 3
    assert "Verdict: cannot run" in small.stdout


def test_a_card_that_is_too_small_or_a_second_one(models: Path) -> None:
    pair = ["--target", str(models / "target"), "--draft", str(models / "draft")]
    size = diagnose(Profile(target=ModelTable(model=str(models / "target")))).models[0].weights_by_dtype["float32"]
    shown = CliRunner().invoke(app, [*pair, "--memory", f"cuda:0={size // 2048}KB"], catch_exceptions=False)
    assert shown.exit_code == 3
    assert "needs" in shown.stdout
    two = ["--memory", f"cuda:0={round(0.9 * size / 1000)}KB", "--memory", f"cuda:1={round(0.9 * size / 1000)}KB"]
    found = json.loads(CliRunner().invoke(app, [*pair, *two, "--set", "draft.device=cpu", "--json"]).stdout)
    layers = found["models"][0]["layers"]
    assert set(layers) == {"cuda:0", "cuda:1"}
    assert sum(layers.values()) == 6


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("cuda:0", "'' is not a size"),
        ("cuda:0=24", "'24' is not a size"),
        ("cuda:0=infGiB", "'infGiB' is not a size"),
        ("cuda:0=0GiB", "'0GiB' is not a size"),
        ("cuda:0=-1GiB", "'-1GiB' is not a size"),
        ("gpu=24GiB", "'gpu' is not a device"),
        ("cuda=24GiB", "'cuda' is not a device"),
        ("cuda:1=24GiB", "describes cuda:1 and not cuda:0"),
    ],
)
def test_memory_that_makes_no_sense_is_an_error(said: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        CliRunner().invoke(app, ["--memory", said], catch_exceptions=False)


def test_memory_goes_with_nothing_that_needs_this_machine() -> None:
    for flag in ("--run", "--find-draft"):
        with pytest.raises(UsageError, match=f"describes another machine, and {flag} needs this one"):
            CliRunner().invoke(app, ["--memory", "cuda:0=24GiB", flag], catch_exceptions=False)
    with pytest.raises(UsageError, match="is described twice"):
        described(["cuda:0=1GiB", "cuda:0=2GiB"])
    assert [one.name for one in described(["cpu=1GiB", "cuda:1=2GiB", "cuda:0=1GiB"])] == ["cuda:0", "cuda:1", "cpu"]


def test_layers_are_counted_where_accelerate_puts_them() -> None:
    model = LlamaForCausalLM(llama_config(258, num_hidden_layers=4))
    size = sum(weight.numel() * 4 for weight in model.parameters())
    both = {"cuda:0": size // 2, "cuda:1": size // 2}
    for strategy in ("balanced", "sequential"):
        placement = Placement(strategy, {0: round(0.8 * size), 1: round(0.8 * size)}, "float32", both)
        found = layer_places(model, placement)
        assert sum(found.values()) == 4
        assert set(found) <= {"cuda:0", "cuda:1"}
    one = Placement("cuda:0", None, "float32", {"cuda:0": size})
    assert layer_places(model, one) == {"cuda:0": 4}
    table = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers": 1, "model.norm": "cpu", "lm_head": "cpu"}
    assert layer_places(model, Placement(table, None, "float32", both)) == {"cuda:0": 1, "cuda:1": 3}
    inside = {"": "cpu", "model.layers.3.mlp": 0}
    assert layer_places(model, Placement(inside, None, "float32", both)) == {"cpu": 4}
    parts = replace(one, shares={"cuda:0": 1, "cuda:1": 1, "cuda:2": 1})
    assert layer_places(model, replace(parts, sharded="tensor", shards=3)) == dict.fromkeys(parts.shares, 4)
    assert layer_places(model, replace(parts, sharded="pipeline", shards=3)) == {"cuda:0": 2, "cuda:1": 1, "cuda:2": 1}
