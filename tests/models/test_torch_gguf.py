"""GGUF files that torch runs with their own blocks on CUDA devices; here on the CPU, with another kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.gguf import kernels

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint, locate
from specctl.models.loading import file_models
from specctl.models.loading.file_models import runs_on_llama
from specctl.models.loading.model import load_inspected
from specctl.models.onnx.store import PACKED
from specctl.models.placing import torch_gguf
from specctl.models.placing.memory import DeviceMemory
from specctl.models.placing.placement import inspected
from specctl.models.placing.quantization import form_of
from specctl.models.placing.torch_gguf import kernels_wanted, stays_packed
from specctl.profile.schema import ModelTable
from tests.support.pretended_llama import PretendedLlama
from tests.support.tiny_gguf import write

CARD = [DeviceMemory("cuda:0", "a card", 1 << 34, 1 << 34), DeviceMemory("cpu", "a CPU", 1 << 34, 1 << 34)]
Q8_0 = 8


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package and the hub's kernel, as far as a CPU needs them: it unpacks in each product."""

    def product(weight: Any, x: Any, kind: int, rows: int) -> Any:
        return x @ kernels.dequantize_blocks(weight, kind, rows, x.shape[-1], x.dtype).T

    parts = dict.fromkeys(("dequantize", "get_rows", "mul_mat_id"))
    module = SimpleNamespace(mul_mat_vec=product, GEMV_TYPES=[Q8_0], **parts)
    monkeypatch.setattr(kernels, "_gguf_kernel", kernels.GgufKernel(module))


def found(file: Path, device: str = "cuda") -> tuple[Checkpoint, ModelTable]:
    table = ModelTable(model=str(file), device=device)
    return locate(table, "target"), table


def test_which_files_stay_packed(tmp_path: Path) -> None:
    for architecture, kind, packed in (("qwen35", "Q8_0", True), ("qwen35", "F16", False), ("llama", "Q8_0", False)):
        checkpoint, table = found(write(tmp_path / architecture / f"{kind}.gguf", architecture, kind))
        assert stays_packed(checkpoint, "auto", "cuda") == packed, (architecture, kind)
        assert form_of(checkpoint, table, "auto", "cuda") == (None if packed else PACKED)
        assert form_of(checkpoint, table, "auto", "cpu") == PACKED
        assert not stays_packed(checkpoint, "auto", "cpu")
        assert not stays_packed(checkpoint, "onnx", "cuda")
        assert not stays_packed(checkpoint, "llama", "cuda")
    split = write(tmp_path / "split" / "m.gguf", "qwen35", "Q8_0", split=2)
    assert not stays_packed(found(split)[0], "auto", "cuda")


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, table = found(write(tmp_path / "m.gguf", "qwen35", "Q8_0"))
    with pytest.raises(ModelError) as caught:
        inspected(checkpoint, table, CARD)
    assert f"through {kernels_wanted()}; it is not installed" in caught.value.message
    assert kernels_wanted().startswith("kernels>=0.")
    assert kernels_wanted() in caught.value.hint
    monkeypatch.setattr(torch_gguf, "kernels_there", lambda: "0.1")
    with pytest.raises(ModelError, match=r"; 0\.1 is installed"):
        inspected(checkpoint, table, CARD)
    with pytest.raises(ModelError, match="runs on a CPU only"):
        inspected(checkpoint, table, CARD, "onnx")
    monkeypatch.setattr(kernels, "_gguf_kernel", False)
    with pytest.raises(ModelError, match="no kernel for its blocks here"):
        load_inspected(*found(tmp_path / "m.gguf", "cpu"), None)
    split = ModelTable(model=str(tmp_path / "m.gguf"), shards=2)
    with pytest.raises(ModelError, match="not split over processes"):
        inspected(checkpoint, split, CARD)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("architecture", ["qwen35", "lfm2"])
def test_a_model_keeps_its_blocks(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    if not is_gguf_arch_supported(architecture):
        pytest.skip(f"this version of transformers unpacks {architecture}")
    file = write(tmp_path / "m.gguf", architecture, "Q8_0")
    checkpoint, table = found(file, "cpu")
    made = load_inspected(checkpoint, table, None)
    assert any(weight.dtype == torch.uint8 for weight in made.model.parameters())
    assert made.dtype == torch.float32
    assert made.eos_ids == {0, 2}  # all that the file names; transformers knows one
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True)
    )
    ids = torch.arange(4, 16)[None]
    for width in (1, 8, 12):
        torch.testing.assert_close(made.model(ids[:, :width]).logits, plain(ids[:, :width]).logits)


def test_when_torch_runs_a_file_instead_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    packs, plain = (write(tmp_path / f"{kind}.gguf", kind, "Q8_0") for kind in ("qwen35", "llama"))

    def torchs(file: Path, device: str = "auto", engine: Any = "auto", *, cards: tuple[str, ...] = ()) -> bool:
        with monkeypatch.context() as patch:
            PretendedLlama(cards=cards).install(patch)
            return not runs_on_llama(*found(file, device), engine)

    assert not torchs(packs)  # without a card
    assert torchs(packs, "cuda:0")
    assert not torchs(packs, "cpu")
    assert not torchs(packs, "cuda:0", "llama")
    assert not torchs(packs, "cuda:0", cards=("CUDA0",))
    assert not torchs(plain, "cuda:0")  # llama.cpp says that it has no such device
    monkeypatch.setattr(file_models, "accelerator", lambda: card)
    assert not torchs(packs)  # the package kernels is missing
    monkeypatch.setattr(file_models, "kernels_fit", lambda: True)
    assert torchs(packs)
    assert not torchs(plain)
    assert torchs(packs, engine="eager")
