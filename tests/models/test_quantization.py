"""Weights that are quantised while they are loaded; with torchao, on the CPU."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.files.skeleton import skeleton
from specctl.models.loading.model import LoadedModel, load_model
from specctl.models.placing import quantization
from specctl.models.placing.memory import DeviceMemory, Estimate
from specctl.models.placing.placement import kind_of_device, place, weighed
from specctl.models.placing.quantization import SCHEMES, plan
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses, obstacle
from specctl.profile.schema import ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model

pytest.importorskip("torchao")

GIB = 2**30
CPU = [DeviceMemory("cpu", "CPU", 64 * GIB, 64 * GIB)]
EMBEDDED = "embedded:target"
CONFIG = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama", llama_config(**CONFIG))


def table(model: Path | str, quantize: str | None, **settings: object) -> ModelTable:
    return ModelTable(model=str(model), quantize=quantize, **({"device": "cpu"} | settings))


def load(model: Path | str, quantize: str | None, **settings: object) -> LoadedModel:
    return load_model(table(model, quantize, **settings), role="target")


def allocated(model: PreTrainedModel) -> int:
    """Bytes of all weights, with the scales of those that are quantised."""
    total = 0
    for weight in model.parameters():
        inner = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
        total += sum(getattr(weight, name).nbytes for name in inner) if inner else weight.nbytes
    return total


def sized(folder: Path, config: LlamaConfig, name: str, kind: str = "cuda") -> Estimate:
    """What a model of this configuration needs on a kind of device, by its shapes alone."""
    config.save_pretrained(folder)
    checkpoint = locate(table(folder, None), "target")
    model = skeleton(checkpoint, config=config)
    parameters = sum(weight.numel() for weight in model.parameters())
    how = plan(checkpoint, model, name, kind, "auto")
    return Estimate(parameters, 2 * parameters, "bfloat16", quantised=False, cached_values=0, quantization=how)


def refusal(model: Path | str, quantize: str, **settings: object) -> ModelError:
    """The error of loading, which doctor must tell in the same words."""
    with pytest.raises(ModelError) as caught:
        load(model, quantize, **settings)
    report = diagnose(Profile(target=table(model, quantize, **settings)))
    assert (caught.value.message, caught.value.hint) in [(problem.message, problem.hint) for problem in report.problems]
    return caught.value


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16"), ("int4", "float32"), ("fp8", "bfloat16")],
)
def test_the_estimate_is_what_is_allocated(quantize: str, dtype: str) -> None:
    need = weighed(
        locate(table(EMBEDDED, quantize, dtype=dtype), "target"), table(EMBEDDED, quantize, dtype=dtype), CPU
    )

    loaded = load(EMBEDDED, quantize, dtype=dtype)

    assert need.weight_bytes(dtype) == pytest.approx(allocated(loaded.model), rel=0.01)
    assert need.weight_bytes(dtype) < 0.65 * need.parameters * loaded.dtype.itemsize
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.model.lm_head.weight.dtype == loaded.model.model.embed_tokens.weight.dtype == loaded.dtype
    assert type(loaded.model.lm_head.weight) is torch.nn.Parameter


@pytest.mark.parametrize(("quantize", "dtype"), [("int8", "float32"), ("int4", "bfloat16"), ("fp8", "float32")])
def test_on_the_cpu_auto_is_the_dtype_that_the_kernels_are_made_for(folder: Path, quantize: str, dtype: str) -> None:
    assert load(folder, quantize).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_quantised_logits_are_near_but_not_those_of_the_checkpoint(folder: Path, quantize: str) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        plain, found = (load(folder, how, dtype="float32").model(ids).logits for how in (None, quantize))

    assert not torch.equal(plain, found)
    assert (plain - found).std() < 0.2 * plain.std()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_rollback_leaves_no_trace(folder: Path, quantize: str) -> None:
    runner = Slot(EagerPasses(load(folder, quantize, dtype="float32").model, 258))
    with torch.inference_mode():
        first = runner.extend([1, 2, 3, 4, 5], keep=2).logits
        runner.rollback(2)
        runner.extend([9, 9], keep=1)
        runner.rollback(2)
        torch.testing.assert_close(runner.extend([3, 4, 5], keep=2).logits, first)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_static_engine_runs_quantised_weights(folder: Path, quantize: str) -> None:
    model = load(folder, quantize, dtype="float32").model
    assert obstacle(model) is None
    with torch.inference_mode():
        static, eager = (
            Slot(kind(model, 258)).extend([1, 2, 3], keep=3).logits for kind in (StaticPasses, EagerPasses)
        )
        torch.testing.assert_close(static, eager)


def test_weights_of_bitsandbytes_run_eagerly(folder: Path) -> None:
    from transformers.utils.quantization_config import QuantizationMethod

    model = load(folder, None).model
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    assert obstacle(model) == "its weights are quantised with bitsandbytes"


def test_weights_that_are_no_numbers_are_found_when_quantised_too(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match="not numbers"):
        load(folder, "int8")


def test_layers_of_a_size_that_does_not_fit_are_left_alone(tmp_path: Path) -> None:
    # The key and value layers have 8 rows, and the kernel wants a multiple of 16.
    config = llama_config(**CONFIG, head_dim=4)
    layer = load(save_model(tmp_path / "model", config), "int4").model.model.layers[0]

    assert type(layer.self_attn.k_proj.weight) is torch.nn.Parameter
    assert type(layer.self_attn.q_proj.weight) is not torch.nn.Parameter


def test_a_model_without_layers_to_quantise_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2", GPT2Config(vocab_size=258, n_embd=64, n_layer=1, n_head=2))

    assert "no layers that quantize" in refusal(folder, "int8").message


def test_a_model_with_few_layers_to_quantise_is_pointed_out(folder: Path) -> None:
    report = diagnose(Profile(target=table(save_model(folder, llama_config(4000, **CONFIG)), "int8")))

    assert report.ready
    assert "quantize covers" in report.advice[0]


def test_doctor_shows_the_quantised_size() -> None:
    (facts,) = diagnose(Profile(target=table(EMBEDDED, "int4"))).models

    assert (facts.quantize, facts.dtype) == ("int4", "bfloat16")
    assert facts.weights_by_dtype == {"int4": facts.devices["cpu"]}


def test_bitsandbytes_needs_a_gpu() -> None:
    error = refusal(EMBEDDED, "nf4")

    assert "runs on cuda only, and the model goes to cpu" in error.message
    assert '"int8", "int4"' in error.hint


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_torchao_available", lambda: False)

    error = refusal(EMBEDDED, "int8")

    assert "needs torchao" in error.message
    assert 'pip install "torchao' in error.hint


def test_a_checkpoint_is_not_quantised_twice(folder: Path) -> None:
    load(folder, "int8").model.save_pretrained(folder)

    assert "is quantised already" in refusal(folder, "int8").message


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_a_checkpoint_saved_quantised_is_read_again(folder: Path, quantize: str) -> None:
    saved = load(folder, quantize, dtype="float32").model
    saved.save_pretrained(folder)

    again = load(folder, None)

    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert torch.equal(again.model(ids).logits, saved(ids).logits)
    report = diagnose(Profile(target=table(folder, None)))
    assert report.ready
    assert report.models[0].weights_by_dtype.keys() == {"as stored"}


def test_a_target_of_70b_in_int4_fits_on_one_card(tmp_path: Path) -> None:
    llama = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    need = sized(tmp_path, llama, "int4")
    card = [DeviceMemory("cuda:0", "GPU", 80 * GIB, 78 * GIB), *CPU]

    placement = place(table("org/model", "int4", device="cuda"), need, card, "target")

    # 68.5 billion weights in linear layers at half a byte, and 4 bytes for 128 of them; 2.1 billion in bfloat16
    assert placement.shares == {"cuda:0": pytest.approx(68.45e9 * (0.5 + 4 / 128) + 2.1e9 * 2, rel=0.01)}
    assert placement.dtype == "bfloat16"
    with pytest.raises(ModelError, match="needs 131"):
        place(
            table("org/model", None, device="cuda"), Estimate(need.parameters, 0, "bfloat16", False, 0), card, "target"
        )


def test_padding_of_the_cuda_kernel_is_counted(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    how = sized(tmp_path, LlamaConfig(num_hidden_layers=1, **sizes), "int4").quantization

    assert how is not None
    # columns to multiples of 1024: 3584 to 4096, 18944 to 19456
    padded = 4096 * (2 * 3584 + 2 * 512 + 2 * 18944) + 19456 * 3584
    assert how.stored_bytes("bfloat16") == padded // 2 + padded // 128 * 4


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(quantization, "_require_package", lambda *_: None)
    how = sized(tmp_path, llama_config(**CONFIG), name).quantization

    assert how is not None
    config = how.config("bfloat16")
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, name)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.llm_int8_skip_modules == ["lm_head"]
    assert how.stored_bytes("bfloat16") == how.weights // 2 + how.weights // 64 * 4


def test_int4_on_cuda_computes_in_bfloat16_only(folder: Path) -> None:
    checkpoint = locate(table(folder, "int4"), "target")
    model = skeleton(checkpoint)

    with pytest.raises(ModelError, match="computes in bfloat16, not in float16"):
        plan(checkpoint, model, "int4", "cuda", "float16")
    config = plan(checkpoint, model, "int4", "cuda", "auto").config("bfloat16").quant_type
    assert (config.group_size, config.int4_packing_format, config.set_inductor_config) == (
        32,
        "tile_packed_to_4d",
        False,
    )


@pytest.mark.parametrize(
    ("settings", "gpus", "kind"),
    [
        ({"device": "auto"}, 1, "cuda"),
        ({"device": "auto"}, 0, "cpu"),
        ({"device": "cpu"}, 1, "cpu"),
        ({"device": "cuda:1"}, 2, "cuda"),
        ({"device": "mps"}, 0, "mps"),
        ({"device": "xpu:1"}, 0, "xpu"),
        ({"device": "balanced", "max_memory": {"cpu": "1GiB"}}, 1, "cpu"),
        ({"device": {"model": 0, "lm_head": "cpu"}}, 1, "cuda"),
        ({"device": {"": "cpu"}}, 1, "cpu"),
    ],
)
def test_the_kind_of_device_decides(settings: dict[str, object], gpus: int, kind: str) -> None:
    devices = [DeviceMemory(f"cuda:{index}", "GPU", GIB, GIB) for index in range(gpus)]
    assert kind_of_device(ModelTable(model="org/model", **settings), [*devices, *CPU]) == kind


def test_every_value_of_the_profile_has_a_scheme() -> None:
    (literal, _) = ModelTable.model_fields["quantize"].annotation.__args__
    assert list(literal.__args__) == list(SCHEMES)


def test_the_profile_for_one_card_differs_by_quantize_only() -> None:
    from specctl.profile import resolve

    plain, quantised = (resolve(name).profile for name in ("llama70b-svip", "llama70b-svip-int4"))
    assert quantised.target == plain.target.model_copy(update={"quantize": "int4"})
    assert quantised.draft == plain.draft
