"""Models converted for peers, by exporters that this test plays."""

import json
import sys
from pathlib import Path

import pytest

from specctl.peers import convert as converter
from specctl.peers.engines import MANIFEST, read_manifest

PYTHON = f"""#!{sys.executable}
import sys
from pathlib import Path
with Path(__file__).with_name("ran").open("a") as ran:
    print(*sys.argv[1:], file=ran)
if "-c" in sys.argv[1:2]:
    print("9.8")
sys.exit(Path(__file__).with_name("code").read_text() if Path(__file__).with_name("code").exists() else 0)
"""


@pytest.fixture
def python(tmp_path) -> Path:
    """A Python that notes what it is asked to run, and runs nothing."""
    program = tmp_path / "python"
    program.write_text(PYTHON, encoding="utf-8")
    program.chmod(0o755)
    return program


def convert(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    converter.main()


@pytest.mark.parametrize(
    ("peer", "options", "words", "weights", "cache"),
    [
        ("onnxruntime-genai", [], ["-m onnxruntime_genai.models.builder", "-p fp32"], "float32", "float32"),
        ("openvino", ["--weights", "int4"], ["export openvino", "--weight-format int4"], "int4", "its default"),
        ("llama.cpp", ["--source", "lc"], ["gguf_of_any_tokenizer.py lc", "--outtype f32"], "float32", "float16"),
        ("llama.cpp", ["--source", "lc", "--cache", "float32"], ["--outtype f32"], "float32", "float32"),
    ],
)
def test_both_models_are_given_to_the_exporter(monkeypatch, tmp_path, python, peer, options, words, weights, cache):
    folder = tmp_path / "out"
    pair = ["--target", "embedded:target", "--draft", "embedded:draft"]
    convert(monkeypatch, peer, folder, *pair, "--python", python, *options)
    first, second, *_ = (tmp_path / "ran").read_text(encoding="utf-8").splitlines()
    for word in words:
        assert word in first
        assert word in second
    assert str(folder / "draft") in second
    found = read_manifest(folder, peer)
    assert (found.target, found.draft, found.weights, found.cache) == ("target", "draft", weights, cache)
    assert found.exporter in (f"{peer} 9.8", "optimum-intel 9.8", "llama.cpp's converter")


def test_a_folder_is_converted_only_once_everything_is_in_it(monkeypatch, tmp_path, python):
    (tmp_path / "code").write_text("no memory", encoding="utf-8")
    with pytest.raises(SystemExit, match="the exporter failed"):
        convert(monkeypatch, "openvino", tmp_path / "out", "--target", "embedded:target", "--python", python)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_target_alone_has_no_draft(monkeypatch, tmp_path, python):
    convert(monkeypatch, "openvino", tmp_path / "out", "--target", "embedded:target", "--python", python)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text(encoding="utf-8"))["draft"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["openvino", "out", "--target", "nowhere"], "not a folder of a transformers model"),
        (["openvino", "out", "--target", "embedded:target", "--weights", "int3"], "this peer supports float32"),
        (
            ["openvino", "out", "--target", "embedded:target", "--cache", "int8"],
            "this peer supports float32, its default",
        ),
        (["llama.cpp", "out", "--target", "embedded:target"], "part of its source"),
        (["openvino", ".", "--target", "embedded:target"], "is not empty"),
    ],
)
def test_mistakes_are_told_before_anything_is_converted(monkeypatch, tmp_path, python, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        convert(monkeypatch, *arguments, "--python", python)
    assert message in str(caught.value)
    assert not (tmp_path / "ran").exists()
