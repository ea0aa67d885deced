"""What a command imports where the graphs of its models are there, and what where it needs no model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from test_entry import IMPORTS, forked
from transformers import AutoTokenizer

from specctl.errors import ModelError
from specctl.models.loading import assembly
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx.store import EAGER, ONNX, Times
from specctl.models.placing.memory import may_be_there
from tests.support import tiny_gguf
from tests.support.invoked import invoke
from tests.support.onnx_models import small_pair
from tests.support.pretended_llama import needs_llama

DATA = Path(__file__).parents[1] / "data"
HEAVY = ["torch", "transformers", "accelerate", "onnx", "onnx_ir", "onnxscript", "safetensors", "scipy", "matplotlib"]
HEAVY += ["starlette", "uvicorn", "prometheus_client", "asyncio"]
BEFORE = f"""{IMPORTS}
import json, numpy, specctl.policies, specctl.profile
heavy = lambda: [name for name in {HEAVY!r} if name in sys.modules]
assert heavy() == []
"""
RUN = """
sys.argv = ["specctl", *case]
try:
    main()
finally:
    print(json.dumps(heavy()), file=sys.stderr)
"""
OPENING = """
import json, sys
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.threads import small_round
from specctl.profile import resolve
profile = resolve("embedded", overrides=sys.argv[1:]).profile
pair = load_pair(profile, with_predictors=False, engines=EngineSettings.of(profile), models=False)
assert not pair.models
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


def heavy_of(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The heavy modules that a process imported, as the last line of what it says."""
    return list(json.loads(done.stderr.splitlines()[-1]))


def command(folder: Path, *flags: str) -> list[str]:
    """`specctl generate` with the models in a folder."""
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    models += ["--set", "target.device=cpu", "--set", "draft.device=cpu"]
    # The default policy goes by the clock, and where drafts end says which numbers are drawn.
    return ["generate", *models, "--policy", "constant:draft_length=3", "-n", "24", *flags]


TEXTS = {
    "greedy": ["the th", "--raw", "--engine", "onnx"],
    "sampled": ["the th", "--raw", "--engine", "onnx", "-t", "1", "--seed", "5", "--stop", "q"],
    "auto, in a chat": ["the th"],
    "sampled, in a chat": ["the th", "--engine", "onnx", "-t", "1", "--top-p", "0.9"],
}
RECORDS = '{"prompt": "the"}\n{"turns": ["th", "e"]}\n{"prompt": "a", "seed": 3, "temperature": 1.0}\n'


@pytest.fixture(scope="module")
def generated(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> "dict[str, subprocess.CompletedProcess[str]]":
    """What commands that are tested do, in a process of its own each, with the graphs of the models in a folder."""
    tested = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    (folder / "in.jsonl").write_text(RECORDS)
    cases = {name: flags for name, flags in TEXTS.items() if name in tested} | {
        "records": ["-i", str(folder / "in.jsonl"), "--token-ids", "--engine", "onnx"]
    }
    before = f"{BEFORE}\nos.environ['XDG_CACHE_HOME'] = {str(folder / 'cache')!r}"
    lines = [command(folder, *flags) for flags in cases.values()]
    return dict(zip(cases, forked(tmp_path_factory.mktemp("generated"), before, RUN, lines), strict=True))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.representatives("greedy", "auto, in a chat")
def test_a_text_from_graphs_that_are_there_takes_neither_torch_nor_transformers(
    folder: Path,
    generated: "dict[str, subprocess.CompletedProcess[str]]",
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = generated[name]
    assert (done.returncode, heavy_of(done)) == (0, []), done.stderr
    assert len(done.stdout) > 10
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    with patch.object(assembly, "load_found", wraps=assembly.load_found) as read:
        assert invoke(*command(folder, *TEXTS[name]), "--check").stdout.replace("\r", "\n") == done.stdout
    assert read.called


def test_neither_do_records(generated: "dict[str, subprocess.CompletedProcess[str]]") -> None:
    done = generated["records"]
    assert (done.returncode, heavy_of(done)) == (0, []), done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_opening_and_running_graphs_takes_no_torch(folder: Path) -> None:
    settings = [
        f"{name}.{key}={value}"
        for name in ("target", "draft")
        for key, value in (("model", folder / name), ("device", "cpu"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", OPENING.format(heavy=json.dumps(HEAVY)), *settings, "engine=onnx"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert heavy_of(done) == []
    assert json.loads(done.stdout) == [1, "cpu"]


FROM_FILES = [
    "profiles list",
    "profiles show embedded",
    "analyze --from {data}/trace-sampled.jsonl",
    "calibrate --from {data}/trace-sampled.jsonl -t 1 --verification token --no-verify --policy adaedl",
    "bench --compare {data}/results.jsonl {data}/results.jsonl",
    "bench --from {data}/results.jsonl",
]


def test_what_is_read_from_files_takes_neither(tmp_path: Path) -> None:
    cases = [line.format(data=DATA).split() for line in FROM_FILES]
    for line, done in zip(FROM_FILES, forked(tmp_path, BEFORE, RUN, cases), strict=True):
        assert (done.returncode, heavy_of(done)) == (0, []), f"{line}: {done.stderr}"
        assert done.stdout, line


@pytest.mark.skipif(may_be_there(), reason="torch is asked for the memory of accelerators")
def test_neither_does_a_diagnosis(tmp_path: Path) -> None:
    gone = [flag for name in ("target", "draft") for flag in ("--set", f"{name}.model={tmp_path / name}")]
    whole = [[], ["--profile", "embedded-lookup"], ["--profile", "embedded-hsddw", "--json"]]
    absent, *here = forked(tmp_path, BEFORE, RUN, [["doctor", *flags] for flags in (gone, *whole)])
    assert (absent.returncode, heavy_of(absent)) == (ModelError.exit_code, []), absent.stderr
    assert "cannot run, 2 problems" in absent.stdout
    for flags, done in zip(whole, here, strict=True):
        assert done.returncode == 0, done.stderr
        # The headers of weights are read with safetensors, which imports torch for tensors alone.
        assert heavy_of(done) == ["safetensors"], flags
        assert "Verdict: ready." in done.stdout or json.loads(done.stdout)["ready"]


LLAMA = """
import tests.support.pretended_llama as pretended, pytest
import specctl.models.llama.vocabulary, specctl.models.llama.width_trial, specctl.models.llama.passes
import specctl.models.loading.file_models, specctl.models.loading.pair_members
pretended.PretendedLlama().install(pytest.MonkeyPatch())
"""
GGUF_PAIRS = {
    "a draft": ["{draft}"],
    "a lookup": ["prompt:lookup"],
    "both": ["prompt:lookup+{draft}"],
}


@pytest.mark.parametrize("real", [pytest.param(True, marks=pytest.mark.slow), False])
def test_neither_do_gguf_files_on_llama_cpp(tmp_path: Path, real: bool) -> None:
    if real:
        needs_llama()
    files = {name: tiny_gguf.write(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate(["draft", "it"])}
    flags = ["-n", "12", "--policy", "constant:draft_length=3", "--threads", "1", "--target", str(files["it"])]
    pairs = [[*flags, "--draft", *(each.format(**files) for each in draft)] for draft in GGUF_PAIRS.values()]
    cases = [
        ["generate", "the th", *pairs[0]],
        ["generate", "the th", "--raw", "-t", "1", *pairs[0]],
        *(["generate", "the th", *pair] for pair in pairs[1:]),
        ["generate", "-i", str(tmp_path / "in.jsonl"), *pairs[0]],
        ["chat", *pairs[0]],
    ]
    (tmp_path / "in.jsonl").write_text(RECORDS)
    before = f"{BEFORE}\nos.environ['XDG_CACHE_HOME'] = {str(tmp_path / 'cache')!r}" + ("" if real else LLAMA)
    if real:  # the stand-in reads files with it
        before += f"\nheavy = lambda: [name for name in {[*HEAVY, 'gguf', 'tokenizers']!r} if name in sys.modules]"
    for flags, done in zip(cases, forked(tmp_path, before, RUN, cases), strict=True):
        assert (done.returncode, heavy_of(done)) == (0, []), f"{flags}: {done.stderr}"
