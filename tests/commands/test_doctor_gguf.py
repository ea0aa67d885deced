"""``specctl doctor`` on GGUF files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specctl.commands.doctor import doctor
from specctl.doctor import diagnosis
from specctl.models.files.gguf_header import read_header
from specctl.models.llama import library
from specctl.models.placing import torch_gguf
from specctl.models.placing.memory import DeviceMemory
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import damaged, write

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> PretendedLlama:
    return PretendedLlama().install(monkeypatch)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No llama.cpp, and no package gguf."""
    monkeypatch.setattr(library, "PACKAGES", {})
    monkeypatch.setitem(sys.modules, "gguf", None)


def examine(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def document(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = examine("--json", *arguments)
    return code, json.loads(out)


@pytest.mark.usefixtures("llama")
def test_a_pair_of_files(tmp_path: Path) -> None:
    target = write(tmp_path / "t.gguf", "llama", "Q8_0", general_license="mit", split=12)
    draft = write(tmp_path / "d.gguf", "llama", "Q8_0", layers=1)
    code, found = document("--target", str(target), "--draft", str(draft), "--devices")
    header = read_header(target)
    assert code == 0, found["problems"]
    assert found["shared_vocabulary"] == 320
    facts = found["models"][0]
    assert (facts["found"], facts["architecture"], facts["licence"]) == ("local file", "llama", "mit")
    assert (facts["context"], facts["vocabulary"], facts["eos_ids"]) == (1024, 320, [0, 2])
    assert facts["weights_by_dtype"] == header.sizes
    assert facts["cache_per_1k_tokens"] == 1000 * 2 * header.cached_values
    assert facts["devices"] == {"cpu": sum(header.sizes.values())}
    assert facts["gguf"]["files"] == len(header.files) == 2
    assert facts["gguf"]["pass_bytes"] == header.read_bytes(1)
    assert facts["gguf"]["engine"] == "llama.cpp"
    target_expected, draft_expected = found["outlook"]["models"]
    assert target_expected["engine"] == "llama.cpp"
    assert target_expected["reads"][0] == header.read_bytes(1)
    assert draft_expected["layers"] == 1
    code, out = examine("--target", str(target), "--draft", "prompt:lookup")
    assert code == 0
    assert "  runs on: llama.cpp\n  llama.cpp: llama-cpp-python 0.3.36\n" in out
    assert "  files: 2\n" in out


@pytest.mark.usefixtures("llama")
def test_another_machine(tmp_path: Path) -> None:
    target = write(tmp_path / "t.gguf", "llama", "Q8_0")
    arguments = ("--target", str(target), "--memory", "cuda:0=1GiB", "--set", "target.device=cuda:0")
    code, found = document(*arguments)
    assert code == 0, found["problems"]
    assert found["models"][0]["devices"].keys() == {"cuda:0"}
    assert found["models"][0]["checked"] is None
    code, found = document(*arguments[:3], "cuda:0=10KB", *arguments[4:])
    assert code == 3
    assert "free: cuda:0" in found["problems"][0]["message"]


@pytest.mark.usefixtures("llama")
def test_files_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "m.gguf", "llama", "Q8_0")
    code, found = document("--target", str(damaged(whole, "short")))
    assert code == 3
    assert "it is cut off, and 1 bytes are missing" in found["problems"][0]["message"]
    code, found = document("--target", str(write(tmp_path / "n.gguf", "unheard")))
    assert code == 3
    assert "unknown model architecture: 'unheard'" in found["problems"][0]["message"]
    assert found["models"][0]["parameters"] > 0  # the header says it
    small = [DeviceMemory("cpu", "CPU", 1000, 1000)]
    monkeypatch.setattr(diagnosis, "device_memory", lambda *_: small)
    code, found = document("--target", str(whole))
    assert code == 3
    assert "needs" in found["problems"][0]["message"]


@pytest.mark.usefixtures("without")
def test_without_any_package(tmp_path: Path) -> None:
    for architecture in ("llama", "unheard"):
        code, found = document("--target", str(write(tmp_path / f"{architecture}.gguf", architecture, "Q8_0")))
        assert code == 3
        facts = found["models"][0]
        assert (facts["architecture"], facts["context"], facts["eos_ids"]) == (architecture, 1024, [0, 2])
        assert facts["gguf"]["pass_bytes"] > 0
        assert facts["gguf"]["library"] is None
        assert facts["gguf"]["install"].startswith("llama.cpp is not installed. Run `")
    assert "  llama.cpp: llama.cpp is not installed. Run `" in examine("--target", str(tmp_path / "llama.gguf"))[1]
    code, found = document("--target", str(tmp_path / "llama.gguf"), "--set", "engine=llama")
    assert code == 3
    assert found["problems"][0]["message"] == "llama.cpp is not installed."


def test_a_file_of_the_hub_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from specctl.models.files.gguf_names import HubFiles

    files = HubFiles("maker/Model-GGUF", None, {"m-Q4_K_M.gguf": 4_700_000_000})
    wanted: Callable[..., HubFiles] = lambda *_: files  # noqa: E731
    monkeypatch.setattr(diagnosis, "find", wanted)
    code, found = document("--target", "maker/Model-GGUF:Q4_K_M")
    assert code == 3
    facts, problem = found["models"][0], found["problems"][0]
    assert (facts["found"], facts["weights_by_dtype"]) == ("on the hub", {"Q4_K_M": 4_700_000_000})
    assert "not on this machine: 4.7 GB" in problem["message"]
    assert "`hf download maker/Model-GGUF m-Q4_K_M.gguf`" in problem["hint"]


@pytest.mark.usefixtures("llama")
def test_drafts_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    target = write(tmp_path / "big" / "t-Q8_0.gguf", "llama", "Q8_0", layers=6)
    near = write(tmp_path / "big" / "d-Q8_0.gguf", "llama", "Q8_0", layers=1)
    store = tmp_path / ".lmstudio" / "models" / "maker"
    write(store / "Small-GGUF" / "s-Q8_0.gguf", "llama", "Q8_0", layers=1, sentencepiece=True)
    same = write(store / "Same-GGUF" / "s-Q8_0.gguf", "llama", "Q8_0", layers=6)
    (tmp_path / "big" / "mmproj-x.gguf").write_bytes(b"GGUF")
    damaged(near, "short")
    code, found = document("--target", str(target), "--find-draft")
    assert code == 0, found["problems"]
    candidates = {one["model"]: one for one in found["drafts"]["candidates"]}
    assert set(candidates) == {str(near), "small@q8_0", "prompt:lookup"}
    header = read_header(near)
    cache = 1000 * 2  # bytes of a cached number of 1,000 tokens
    reads = header.read_bytes(1) + cache * header.cached_values
    whole = read_header(target).read_bytes(1) + cache * read_header(target).cached_values
    assert candidates[str(near)]["cost"] == pytest.approx(reads / whole)
    assert candidates[str(near)]["tokens"] == "the target's"
    assert candidates["small@q8_0"]["tokens"].startswith("another than the target's")
    left_out = found["drafts"]["left_out"]
    assert left_out.pop("same@q8_0") == "it has 100% of the target's parameters"
    assert "it is cut off" in left_out.pop(str(near.with_name("d-Q8_0-short.gguf")))
    assert not left_out
    assert same.exists()


@pytest.mark.usefixtures("llama")
def test_layers_that_predict_further_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    target = write(tmp_path / "t.gguf", "qwen35", "Q8_0", mtp=1)
    main, layers = read_header(target).split()
    reads = layers.read_bytes(1) + main.output_bytes
    code, found = document("--target", str(target), "--draft", "target:mtp", "--devices")
    assert code == 0, found["problems"]
    facts = found["models"][1]
    assert (facts["draft_head"], facts["parameters"], facts["reads_layers"]) == ("mtp", layers.parameters, [-1])
    assert facts["devices"] == {"cpu": sum(layers.sizes.values())}
    assert found["models"][0]["devices"] == {"cpu": sum(main.sizes.values())}
    assert found["outlook"]["models"][1]["reads"] == [reads] * 41
    assert found["outlook"]["models"][1]["layers"] == 1
    code, found = document("--target", str(target), "--find-draft")
    (own,) = (one for one in found["drafts"]["candidates"] if one["model"] == "target:mtp")
    cache = 1000 * 2 * 64
    assert own["cost"] == pytest.approx((reads + cache) / (main.read_bytes(1) + cache))


def test_a_file_that_torch_runs_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.gguf", "qwen35", "Q8_0")
    arguments = ("--target", str(file), "--set", "engine=eager", "--memory", "cuda:0=16GiB")
    code, found = document(*arguments)
    facts = found["models"][0]
    assert code == 3
    assert facts["gguf"]["engine"].startswith("torch, with kernels missing; transformers takes kernels>=0.")
    assert "torch computes with its blocks through kernels>=0." in found["problems"][0]["message"]
    monkeypatch.setattr(torch_gguf, "kernels_fit", lambda: True)
    code, found = document(*arguments)
    facts = found["models"][0]
    assert code == 0, found["problems"]
    assert facts["devices"].keys() == {"cuda:0"}
    assert facts["eos_ids"] == [0, 2]


@pytest.mark.slow
def test_the_library_says_the_same(tmp_path: Path) -> None:
    needs_llama()
    target = write(tmp_path / "t.gguf", "qwen3", "Q8_0", split=12)
    draft = write(tmp_path / "d.gguf", "qwen3", "Q8_0", layers=1)
    code, found = document("--target", str(target), "--draft", str(draft))
    facts = found["models"][0]
    assert code == 0, found["problems"]
    assert (facts["vocabulary"], facts["eos_ids"], found["shared_vocabulary"]) == (320, [0, 2], 320)
    code, found = document("--target", str(write(tmp_path / "n.gguf", "unheard")))
    assert code == 3
    assert "unknown model architecture: 'unheard'" in found["problems"][0]["message"]
