"""``python -m specctl.models.files.unpack_gguf``: what the message about GGUF files tells people to run."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specctl.errors import ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.files.gguf import unpacking
from specctl.models.files.unpack_gguf import main, unpack
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import llama_config, tiny_tokenizer
from tests.support.gguf_files import random_llama, write


def divisors(rotation: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What llama.cpp stores of a Llama 3: by how much each frequency is divided. (head_dim / 2,)"""
    scaled, plain = llama_config(hidden_size=64, rope_parameters=rotation), llama_config(hidden_size=64)
    found = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))[0].numpy()
    size = plain.head_dim
    theta = rotation["rope_theta"]
    exact: np.ndarray[Any, Any] = theta ** (-np.arange(0, size, 2) / size) / found
    return exact


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_weights_and_llama_3s_rotation_are_kept(tmp_path: Path, factor: float) -> None:
    rotation = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_llama(max_position_embeddings=131072, rope_parameters=rotation)
    file = write(tmp_path / "m.gguf", model, {"rope_freqs.weight": divisors(rotation)})

    assert main([str(file), str(tmp_path / "made")]) == 0

    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert made.config.rope_parameters == rotation
    assert made.dtype == torch.float32
    assert all(torch.equal(weight, made.state_dict()[name]) for name, weight in model.state_dict().items())
    ids = torch.arange(1, 200)[None]
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, model.eval()(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "made")("ba c")["input_ids"] == tiny_tokenizer()("ba c")["input_ids"]
    )
    locate(ModelTable(model=str(tmp_path / "made")), "target")


def test_other_rotations(tmp_path: Path) -> None:
    model = random_llama()
    scaled = write(tmp_path / "yarn.gguf", model, type="yarn", factor=4.0, original_context_length=512)
    unpack(scaled, tmp_path / "yarn")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn").config.rope_parameters
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("yarn", 4.0, 512)

    long = {"rope_factors_long.weight": [2.0] * 8, "rope_factors_short.weight": [1.0] * 8}
    unpack(write(tmp_path / "long.gguf", model, long, original_context_length=1024), tmp_path / "long")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "long").config.rope_parameters
    assert (found["rope_type"], found["long_factor"], found["short_factor"]) == ("longrope", [2.0] * 8, [1.0] * 8)
    assert found["original_max_position_embeddings"] == 1024

    for name, extra, metadata in (
        ("freqs", {"rope_freqs.weight": [1.0, 3.0] * 4}, {}),
        ("kind", {}, {"type": "ntk", "factor": 2.0}),
        ("no border", long, {}),
    ):
        with pytest.raises(ModelError, match="GGUF file"):
            unpack(write(tmp_path / f"{name}.gguf", model, extra, **metadata), tmp_path / name)
        assert not (tmp_path / name).exists()


def test_bad_files_give_one_message_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "m.gguf", random_llama())
    whole = file.read_bytes()
    for name, contents in {
        "cut": whole[: len(whole) // 2],
        "header": whole[:300],
        "foreign": b"GGUF",
        "no": b"",
    }.items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(contents)
        assert main([str(bad), str(tmp_path / "made")]) == 3
        assert f"{bad} cannot be read" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "made")]) == 2
    assert main([str(file), str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main([str(file), str(tmp_path / "made")]) == 3
    assert 'pip install "gguf' in capsys.readouterr().err
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gguf"] * 5


def test_the_command_of_the_message_works(tmp_path: Path) -> None:
    file = write(tmp_path / "a folder.gguf" / "m.q8.gguf", random_llama())

    command = unpacking(file, "draft").split("`")[1]
    subprocess.run(shlex.split(command), check=True, cwd=tmp_path, capture_output=True)

    assert "model = 'm.q8' in [draft]" in unpacking(file, "draft")
    assert (tmp_path / "m.q8" / "model.safetensors").exists()
