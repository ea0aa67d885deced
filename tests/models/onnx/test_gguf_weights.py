"""GGUF files that run as they are: their blocks, their names, the graph, and files that cannot run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.files.gguf import small_files
from specctl.models.files.gguf_header import read_header
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.model import load_model
from specctl.models.onnx.gguf_blocks import TYPES, of_type
from specctl.models.onnx.skeletons import lent, packed_model
from specctl.models.running.engines import EngineSettings
from specctl.profile import resolve
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import llama_config
from tests.support.gguf_files import random_llama, write
from tests.support.onnx_models import needs_onnx
from tests.support.tiny_gguf import SCALES


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def wide_llama(**settings: Any) -> LlamaForCausalLM:
    """A Llama whose sides are multiples of 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    return LlamaForCausalLM(llama_config(**(sizes | settings)))


MIXED = {
    "attn_q": "Q4_0",
    "attn_k": "Q4_0",
    "attn_v": "Q6_K",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q4_K",
    "blk.0.ffn_down": "Q5_0",
    "blk.1.ffn_down": "Q5_1",
    "token_embd": "Q8_0",
    "output": "F16",
}


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_have_the_values_that_gguf_unpacks(kind: str) -> None:
    known = gguf.GGMLQuantizationType[kind]
    size, width = gguf.GGML_QUANT_SIZES[known]
    draws = np.random.default_rng(0)
    rows = draws.integers(0, 256, (3, 5, width), dtype=np.uint8)
    places = SCALES.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,))
    for place in places:
        rows[..., place : place + 2] = draws.normal(0, 0.01, (3, 5)).astype(np.float16)[..., None].view(np.uint8)
    rows = rows.reshape(3, -1)

    found, expected = of_type(kind, rows), gguf.dequantize(rows, known)

    assert found.bits == (4 if kind.startswith("Q4") else 8)
    assert found.block == (16 if kind == "Q6_K" else 32)
    assert (found.outputs, found.inputs) == (3, 5 * size)
    assert (found.minima is None) == (len(places) == 1)
    if found.minima is None:
        assert np.array_equal(found.values(), expected)
    else:
        np.testing.assert_allclose(found.values(), expected, rtol=0, atol=2e-7 * np.abs(expected).max())


def test_weights_are_torchs(tmp_path: Path) -> None:
    model = wide_llama()
    file = write(tmp_path / "m.gguf", model, kinds={"attn": "Q8_0", "token_embd": "Q8_0"})
    checkpoint = locate(ModelTable(model=str(file)), "target")

    made, weights = packed_model(checkpoint)

    rounded = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    for name, weight in rounded.items():
        if "attn" in name or "embed" in name:
            rows = weight
            rounded[name] = gguf.dequantize(
                gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
            )
        assert np.array_equal(weights.array(name), rounded[name])
        blocks = weights.blocks(name)
        assert (blocks is None) == (weight.ndim < 2 or not ("attn" in name or "embed" in name))
        if blocks is not None:
            assert np.array_equal(blocks.values(), rounded[name])
    ids = torch.arange(1, 20)[None]
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in rounded.items()})
    with torch.inference_mode():
        assert made(ids).logits.isnan().all()
        with lent(made, weights):
            assert torch.equal(made(ids).logits, model.eval()(ids).logits)
        assert made(ids).logits.isnan().all()


def pair(file: Path, *more: str) -> Any:
    notices: list[str] = []
    profile = resolve("embedded", overrides=[f"target.model={file}", "engine=onnx", *more]).profile
    settings = replace(EngineSettings.of(profile), notice=notices.append)
    found = load_pair(profile, drafts=(), engines=settings, torch_weights=False, models=False)
    assert not notices
    return found


@needs_onnx
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_runs_as_it_is(tmp_path: Path, tied: bool) -> None:
    file = write(tmp_path / "m.gguf", wide_llama(tie_word_embeddings=tied), kinds=MIXED)
    made, weights = packed_model(locate(ModelTable(model=str(file)), "target"))
    ids = torch.randint(1, 258, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode(), lent(made, weights):
        expected = made(torch.tensor([ids])).logits[0]

    slot = pair(file).target
    wide = torch.as_tensor(slot.extend(ids, 24).logits)

    assert ((wide - expected).square().mean().sqrt() / expected.std()) < 0.05
    for width in (1, 2, 3):
        slot.rollback(0)
        rows = [
            torch.as_tensor(slot.extend(ids[start : start + width], width).logits).clone()
            for start in range(0, 24, width)
        ]
        assert torch.equal(torch.cat(rows), wide)


def test_the_files_own_ends_and_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = write(tmp_path / "m.gguf", random_llama(), ends={"eos": 0, "eot": 7, "eom": 7}, template=template)
    folder = small_files(file)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 7]
    assert (folder / "chat_template.jinja").read_text() == template
    assert small_files(file) == folder
    write(file, random_llama(), ends={"eos": 3})
    assert json.loads((small_files(file) / "generation_config.json").read_text())["eos_token_id"] == [3]


@needs_onnx
@pytest.mark.parametrize("stored", [False, True])
def test_settings_that_need_torch_are_refused(tmp_path: Path, stored: bool) -> None:
    file = write(tmp_path / "m.gguf", wide_llama())
    if stored:  # a start with a stored graph loads no model
        pair(file)
    for more, said in (
        (["engine=eager"], 'engine = "eager" cannot run it'),
        (["target.dtype=bfloat16"], "it computes in float32, not in bfloat16"),
        (["target.quantize=int4"], "is quantised already"),
    ):
        with pytest.raises(ModelError, match=said):
            pair(file, *more)
    with pytest.raises(ModelError, match="torch needs its weights unpacked"):
        load_model(ModelTable(model=str(file)), role="draft")


def test_files_that_cannot_run(tmp_path: Path) -> None:
    model = random_llama()
    file = write(tmp_path / "m.gguf", model)
    whole = file.read_bytes()
    for name, contents in {"cut": whole[: len(whole) // 2], "header": whole[:300], "no": b"GGUF"}.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(contents)
        with pytest.raises(ModelError, match=f"{bad} cannot be read"):
            locate(ModelTable(model=str(bad)), "target").settings()
    for name, kinds, said in (("iq", {"ffn_up": "TQ1_0"}, "weights of the type TQ1_0"),):
        other = write(tmp_path / f"{name}.gguf", wide_llama(), kinds=kinds)
        with pytest.raises(ModelError, match=said) as caught:
            pair(other)
        assert "unpack_gguf" in caught.value.hint
        with pytest.raises(ModelError, match=said) as caught:
            packed_model(locate(ModelTable(model=str(other)), "draft"))
        assert "in [draft]" in caught.value.hint


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    model = random_llama()
    file = write(tmp_path / "m.gguf", model)
    model.config.vocab_size = 300
    other = write(tmp_path / "other.gguf", model)
    pair(file)
    with pytest.raises(ModelError, match=r"does not match its own settings: model.embed_tokens.weight is \(258, 64\)"):
        pair(other)


def test_a_folder_with_a_file_is_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "folder" / "m.q8.gguf", random_llama())
    found = locate(ModelTable(model=str(file.parent)), "target")
    assert found.weights == file
    assert found.weight_files() == [file]


@needs_onnx
def test_doctor_knows_such_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", random_llama(), kinds={"blk": "Q4_0"})
    profile = resolve("embedded", overrides=[f"target.model={file}", "engine=onnx"]).profile
    profile = profile.model_copy(update={"draft": None})

    report = diagnose(profile)

    (facts,) = report.models
    assert report.ready
    assert (facts.dtype, facts.devices.keys()) == ("float32", {"cpu"})
    assert facts.weights_by_dtype == read_header(file).sizes
    assert facts.gguf is not None
    assert facts.gguf.engine == "onnxruntime"
    assert facts.eos_ids == [0]
