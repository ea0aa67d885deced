import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GPTNeoXConfig, Qwen2Config

from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.passes.layer_sizes import cached_values
from specctl.models.passes.weights import weight_bytes
from specctl.models.placing import memory
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, estimate
from specctl.models.placing.placement import after, named_devices, place
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import Hub, llama_config, save_model

GIB = 2**30
SEVEN_BILLION = Estimate(
    parameters=7 * 10**9, stored_bytes=14 * 10**9, stored_dtype="bfloat16", quantised=False, cached_values=2**16
)


def machine(*gpus: int, cpu: int = 64) -> list[DeviceMemory]:
    """Devices with so many GiB free."""
    devices = [DeviceMemory(f"cuda:{i}", "GPU", 80 * GIB, free * GIB) for i, free in enumerate(gpus)]
    return [*devices, DeviceMemory("cpu", "CPU", 128 * GIB, cpu * GIB)]


def put(devices: list[DeviceMemory], need: Estimate = SEVEN_BILLION, role: str = "target", **settings: object):
    return place(ModelTable(model="org/model", **settings), need, devices, role)


@pytest.mark.parametrize("shards", ["1GB", "10KB"])
def test_estimate_counts_what_the_files_hold(tmp_path: Path, shards: str) -> None:
    folder = save_model(tmp_path / "model", shards=shards)

    need = estimate(locate(ModelTable(model=str(folder)), "target"))

    # two embeddings 258 x 16; two layers of q, o 16 x 16, k, v 8 x 16, three 16 x 32, two norms; a last norm
    assert need.parameters == 2 * 258 * 16 + 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16) + 16
    assert need.weight_bytes("float32") == 4 * need.parameters
    assert need.weight_bytes("bfloat16") == 2 * need.parameters
    assert need.stored_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert need.stored_dtype == "float32"
    assert need.unread is None


def test_quantised_checkpoints_keep_the_size_of_their_files(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    config["dtype"] = "float16"
    (folder / "config.json").write_text(json.dumps(config))

    need = estimate(locate(ModelTable(model=str(folder)), "target"))

    assert need.quantised
    assert need.weight_bytes("float16") == need.weight_bytes("float32") == need.stored_bytes
    assert need.parameters == 2 * 258 * 16 + 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16) + 16
    assert need.stored_dtype == "float16"


def test_a_hub_model_is_sized_without_downloading_it(hub: Hub, tmp_path: Path) -> None:
    published = save_model(tmp_path / "published", shards="10KB")
    hub.folders["org/tiny"] = published

    need = estimate(checkpoint := locate(ModelTable(model="org/tiny"), "target"))

    assert need.unread is None
    assert need.parameters == estimate(locate(ModelTable(model=str(published)), "target")).parameters
    assert 4 * need.parameters <= need.stored_bytes <= sum(path.stat().st_size for path in published.iterdir())
    assert not checkpoint.has_weights()


def test_without_readable_headers_the_configuration_gives_the_size(hub: Hub, tmp_path: Path) -> None:
    published = save_model(tmp_path / "published")
    (published / "model.safetensors").rename(published / "pytorch_model.bin")
    hub.folders["org/pickled"] = published

    need = estimate(locate(ModelTable(model="org/pickled"), "draft"))

    assert need.parameters == 2 * 258 * 16 + 2 * (2 * 256 + 2 * 128 + 3 * 512 + 2 * 16) + 16
    assert isinstance(need.unread, ModelError)
    assert "no safetensors weights" in need.unread.message


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (llama_config(), 2 * 2 * 2 * 4),
        (GPTNeoXConfig(num_hidden_layers=3, num_attention_heads=8, hidden_size=64), 2 * 3 * 8 * 8),
        (Gemma2Config(num_hidden_layers=4, num_key_value_heads=2, head_dim=32), 2 * 4 * 2 * 32),
        (Qwen2Config(num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, hidden_size=5120), 98304),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_cache_counts_keys_and_values_of_every_layer(config, values: int) -> None:
    assert cached_values(config) == values


def test_cache_matches_the_tensors_of_a_real_pass() -> None:
    from transformers import AutoModelForCausalLM, DynamicCache

    from specctl.models.passes.cache import cache_argument

    config = llama_config()
    cache = DynamicCache()
    model = AutoModelForCausalLM.from_config(config)
    model(torch.tensor([[1, 2, 3]]), **{cache_argument(type(model)): cache})

    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    need = Estimate(0, 0, "float32", quantised=False, cached_values=cached_values(config))
    assert need.cache_bytes("float32", tokens=3) == held


def test_device_memory_ends_with_the_cpu() -> None:
    *_, cpu = device_memory()

    assert cpu.name == "cpu"
    assert 0 < cpu.free <= cpu.total


@pytest.mark.parametrize(
    ("device", "asked"),
    [("cuda:1", [1]), ("cuda", [0]), ({"model.layers.0": 2, "": "cuda:1"}, [1, 2]), ("cpu", []), ("auto", [0, 1, 2])],
)
def test_only_gpus_that_a_model_may_go_to_are_touched(
    device: object, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []

    def memory(index: int) -> tuple[int, int]:
        touched.append(index)
        return 1 << 30, 1 << 31

    replace = monkeypatch.setattr
    replace("torch.accelerator.current_accelerator", lambda **_: torch.device("cuda"))
    replace("torch.accelerator.device_count", lambda: 3)
    replace("torch.accelerator.get_memory_info", memory)
    replace("torch.cuda.get_device_name", lambda _: "a GPU")
    names = named_devices(ModelTable.model_construct(device=device))
    found = device_memory(names)
    assert touched == asked
    assert [one.name for one in found] == [*(f"cuda:{index}" for index in asked), "cpu"]


def test_auto_takes_the_first_gpu_in_the_checkpoint_dtype() -> None:
    placement = put(machine(40, 40))

    assert (placement.device_map, placement.dtype) == ("cuda:0", "bfloat16")
    assert placement.shares == {"cuda:0": 14 * 10**9}


def test_auto_without_a_gpu_is_the_cpu_in_float32() -> None:
    placement = put(machine())

    assert (placement.device_map, placement.dtype) == ("cpu", "float32")
    assert placement.shares == {"cpu": 28 * 10**9}


def test_auto_spreads_a_target_that_crowds_the_first_gpu() -> None:
    placement = put(machine(10, 10))

    assert placement.device_map == "balanced"
    assert placement.max_memory == {0: 9 * GIB, 1: 9 * GIB}
    assert placement.shares == {"cuda:0": 7 * 10**9, "cuda:1": 7 * 10**9}


def test_a_draft_is_never_spread_by_auto() -> None:
    with pytest.raises(ModelError, match=r"free: cuda:0 10\.0 GiB"):
        put(machine(10, 10, cpu=8), role="draft")


def test_max_memory_of_the_profile_is_kept() -> None:
    placement = put(machine(40, 40), device="sequential", max_memory={"0": "10GiB", "cpu": "20GiB"})

    assert placement.max_memory == {0: 10 * GIB, "cpu": 20 * GIB}
    assert placement.shares == {"cuda:0": 10 * GIB, "cpu": 14 * 10**9 - 10 * GIB}


def test_a_device_map_table_is_passed_on() -> None:
    placement = put(machine(40, 40), device={"model": 1, "lm_head": "cuda:0"})

    assert placement.device_map == {"model": 1, "lm_head": "cuda:0"}
    assert set(placement.shares) == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize(
    ("devices", "settings", "hint"),
    [
        (machine(20), {"device": "cuda:0", "dtype": "float32"}, 'dtype = "bfloat16"'),
        (machine(10, 40), {"device": "cuda:0"}, 'device = "cuda:1"'),
        (machine(10, 10), {"device": "cuda:1"}, 'device = "balanced"'),
        (machine(4, 4, cpu=4), {}, "smaller or quantised"),
        (machine(4), {"device": {"": 0}}, 'device = "cpu"'),
    ],
)
def test_too_little_memory_says_what_would_fit(
    devices: list[DeviceMemory], settings: dict[str, object], hint: str
) -> None:
    with pytest.raises(ModelError, match=r"needs .* for its weights") as caught:
        put(devices, **settings)

    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:3"}, "'cuda:3' is not on this machine"),
        ({"device": {"model": 7}}, "'cuda:7' is not on this machine"),
        ({"max_memory": {"5": "1GiB"}}, "'cuda:5' is not on this machine"),
        ({"max_memory": {"0": "lots"}}, "'lots' is not a size"),
        ({"device": "cpu", "max_memory": {"cpu": "1GiB"}}, "has no effect on the single device"),
    ],
)
def test_impossible_placements(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        put(machine(40), **settings)


def test_memory_left_after_a_placement() -> None:
    devices = machine(40, 40)

    assert [device.free for device in after(devices, put(devices))] == [40 * GIB - 14 * 10**9, 40 * GIB, 64 * GIB]


@pytest.mark.parametrize(
    ("built", "driver", "there"),
    [
        ({"cuda": "13.0", "hip": None, "xpu": None}, "nvidiactl", True),
        ({"cuda": "13.0", "hip": None, "xpu": None}, "dri/renderD128", False),
        ({"cuda": None, "hip": None, "xpu": "2025"}, "dri/renderD128", True),
        ({"cuda": None, "hip": "7.0", "xpu": None}, "kfd", True),
        ({"cuda": None, "hip": None, "xpu": None}, "nvidiactl", False),
        ({"cuda": "13.0", "hip": None, "xpu": None}, "null", False),
    ],
)
def test_an_accelerator_needs_a_driver_and_a_build_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: dict[str, str | None], driver: str, there: bool
) -> None:
    monkeypatch.setattr(memory, "torch_builds", lambda: built)
    (tmp_path / driver).parent.mkdir(exist_ok=True)
    (tmp_path / driver).touch()
    assert memory.may_be_there(tmp_path) is there


def test_weights_take_the_bytes_of_their_numbers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16())
    assert weight_bytes(model) == 4 * (6 + 2) + 2 * (4 + 2)
