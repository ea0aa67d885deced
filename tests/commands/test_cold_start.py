"""What a command imports where the graphs of its models are there, and what where it needs no model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx_models import small_pair
from transformers import AutoTokenizer

from specctl.errors import ModelError
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx.engine_times import EAGER, ONNX, Times
from specctl.models.placing.accelerator import may_be_there

DATA = Path(__file__).parents[1] / "data"
HEAVY = ["torch", "transformers", "accelerate", "onnx", "onnx_ir", "onnxscript", "safetensors", "scipy", "matplotlib"]
PROGRAM = """
import json, sys
from specctl.__main__ import main
try:
    main()
finally:
    print(json.dumps([name for name in json.loads({heavy!r}) if name in sys.modules]), file=sys.stderr)
"""
OPENING = """
import json, sys
from specctl.models.loading.kept_pair import kept_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.threads import small_round
from specctl.profile import resolve
profile = resolve("embedded", overrides=sys.argv[1:]).profile
pair = kept_pair(profile, EngineSettings.of(profile))
assert pair is not None
runners = [pair.target, *pair.drafts]
small_round(runners, pair.vocabulary)()
for runner in runners:
    runner.rollback(0)
    assert runner.extend(pair.tokenizer.encode("the"), 1).rows.shape[1] == pair.vocabulary
print(json.dumps([pair.thread_count, *pair.devices(None)]))
print(json.dumps([name for name in json.loads({heavy!r}) if name in sys.modules]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two models, of which the target has a chat template, and a cache with their graphs, which are the faster."""
    made = tmp_path_factory.mktemp("cold")
    profile = small_pair(made)
    tokenizer = AutoTokenizer.from_pretrained(profile.target.model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    tokenizer.save_pretrained(profile.target.model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))
        load_pair(profile, torch_weights=False)
    for known in (made / "cache").rglob("*.model.json"):
        Times(known.with_name(known.name.replace("model", "times"))).note({EAGER: 2.0, ONNX: 1.0}, 1)
    return made


def run(
    program: str, *flags: str, cache: Path | None = None, given: str | None = None, status: int = 0
) -> tuple[str, list[str]]:
    """What a program prints in a process of its own, and which heavy modules it imported."""
    found = subprocess.run(
        [sys.executable, "-c", program.format(heavy=json.dumps(HEAVY)), *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)}),
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == status, found.stderr
    return found.stdout, json.loads(found.stderr.splitlines()[-1])


def generated(folder: Path, *flags: str, given: str | None = None) -> tuple[str, list[str]]:
    """What `specctl generate` prints with the graphs of the models in a folder."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    models += ["--set", "target.device=cpu", "--set", "draft.device=cpu"]
    # The default policy goes by the clock, and where drafts end says which numbers are drawn.
    settings = ["--policy", "constant:draft_length=3", "-n", "24"]
    return run(PROGRAM, "generate", *models, *settings, *flags, cache=folder / "cache", given=given)


@pytest.mark.parametrize(
    "flags",
    [
        ["the th", "--raw", "--engine", "onnx"],
        ["the th", "--raw", "--engine", "onnx", "-t", "1", "--seed", "5", "--stop", "q"],
        ["the th"],
        ["the th", "--engine", "onnx", "-t", "1", "--top-p", "0.9"],
    ],
    ids=["greedy", "sampled", "auto, in a chat", "sampled, in a chat"],
)
@pytest.mark.representatives("greedy", "auto, in a chat")
def test_a_text_from_graphs_that_are_there_takes_neither_torch_nor_transformers(folder: Path, flags: list[str]) -> None:
    text, heavy = generated(folder, *flags)
    assert heavy == []
    other, whole = generated(folder, *flags, "--check")  # which reads the models
    assert "transformers" in whole
    assert len(text) > 10
    assert text == other


def test_neither_do_records(folder: Path) -> None:
    records = '{"prompt": "the"}\n{"turns": ["th", "e"]}\n{"prompt": "a", "seed": 3, "temperature": 1.0}\n'
    lines, heavy = generated(folder, "-i", "-", "--token-ids", "--engine", "onnx", given=records)
    assert heavy == []
    assert len(lines.splitlines()) == 3


def test_opening_and_running_graphs_takes_no_torch(folder: Path) -> None:
    settings = [
        f"{name}.{key}={value}"
        for name in ("target", "draft")
        for key, value in (("model", folder / name), ("device", "cpu"))
    ]
    text, heavy = run(OPENING, *settings, "engine=onnx", cache=folder / "cache")
    assert heavy == []
    assert json.loads(text) == [1, "cpu"]


@pytest.mark.parametrize(
    "command",
    [
        "profiles list",
        "profiles show embedded",
        "analyze --from {data}/trace-sampled.jsonl",
        "calibrate --from {data}/trace-sampled.jsonl -t 1 --verification token --no-verify --policy adaedl",
        "bench --compare {data}/results.jsonl {data}/results.jsonl",
        "bench --from {data}/results.jsonl",
    ],
)
def test_what_is_read_from_files_takes_neither(command: str) -> None:
    text, heavy = run(PROGRAM, *command.format(data=DATA).split())
    assert heavy == []
    assert text


@pytest.mark.skipif(may_be_there(), reason="torch is asked for the memory of accelerators")
def test_neither_does_a_diagnosis_of_models_that_are_not_here(tmp_path: Path) -> None:
    settings = [flag for name in ("target", "draft") for flag in ("--set", f"{name}.model={tmp_path / name}")]
    text, heavy = run(PROGRAM, "doctor", *settings, status=ModelError.exit_code)
    assert heavy == []
    assert "cannot run, 2 problems" in text
