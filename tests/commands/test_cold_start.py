"""What a command imports where the graphs of its models are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx_models import needs_onnx, small_pair

from specctl.models.loading.assembly import load_pair

pytestmark = needs_onnx

HEAVY = ["transformers", "accelerate", "onnx", "onnx_ir", "onnxscript", "huggingface_hub", "safetensors"]
PROGRAM = """
import json, sys
from specctl.__main__ import main
try:
    main()
finally:
    print(json.dumps([name for name in json.loads({heavy!r}) if name in sys.modules]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two models, and a cache with their graphs."""
    made = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))
        load_pair(small_pair(made), torch_weights=False)
    return made


def generated(folder: Path, *flags: str, given: str | None = None) -> tuple[str, list[str]]:
    """What `specctl generate` prints in a process of its own, and which heavy modules it imported."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--engine", "onnx"]
    program = PROGRAM.format(heavy=json.dumps(HEAVY))
    # The default policy goes by the clock, and where drafts end says which numbers are drawn.
    settings = ["--policy", "constant:draft_length=3", "-n", "24"]
    found = subprocess.run(
        [sys.executable, "-c", program, "generate", *models, *settings, *flags],
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not found.returncode, found.stderr
    return found.stdout, json.loads(found.stderr.splitlines()[-1])


@pytest.mark.parametrize("flags", [["the th"], ["the th", "-t", "1", "--seed", "5", "--stop", "q"]])
@pytest.mark.representatives("flags0")
def test_a_text_from_graphs_that_are_there_takes_no_transformers(folder: Path, flags: list[str]) -> None:
    text, heavy = generated(folder, *flags)
    assert heavy == []
    other, whole = generated(folder, *flags, "--check")  # which reads the models
    assert "transformers" in whole
    assert len(text) > 10
    assert text == other


def test_neither_do_records(folder: Path) -> None:
    records = '{"prompt": "the"}\n{"turns": ["th", "e"]}\n{"prompt": "a", "seed": 3, "temperature": 1.0}\n'
    lines, heavy = generated(folder, "-i", "-", "--token-ids", given=records)
    assert heavy == []
    assert len(lines.splitlines()) == 3
