"""`specctl bench --peer` with engines in processes of their own: a program that plays the engine, and the real ones."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.errors import ModelError, UsageError
from specctl.observing.results import read_results
from specctl.peers.engines import ENGINES, NO_DRAFT, Converted, write_manifest
from tests.support.fake_peer import ended, install

PEER = "onnxruntime-genai"
LABEL = f"{PEER}:constant:5"
PROMPTS = [
    {"id": "kite", "category": "stories", "prompt": "Tom had a red kite. One windy day"},
    {"id": "long", "category": "stories", "prompt": "Once upon a time " * 700},
    {"id": "apples", "category": "maths", "prompt": "Question: Ann has 3 apples and buys 2. How many?\nAnswer:"},
]
REAL_MODELS, REAL_PROGRAMS = "TEST_PEER_MODELS", "TEST_PEER_PROGRAMS"
"""Environment variables with what --peer-models and --peer-program get, separated by blanks, to test real engines."""


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--details", "-q"], catch_exceptions=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder that says that it has converted models."""
    folder = tmp_path_factory.mktemp("models")
    write_manifest(folder, Converted(PEER, "target", "draft", "float32", "as exported", "builder 1"))
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def answers():
    """What the target writes, by its prompt's ids."""
    from specctl.decoding.prompt_format import PromptFormat
    from specctl.decoding.session import Session
    from specctl.models.loading.assembly import load_pair
    from specctl.profile import resolve

    profile = resolve("embedded").profile
    pair = load_pair(profile, drafts=[])
    format_ = PromptFormat.of(pair.tokenizer, profile.prompt)
    settings = profile.sampling.model_copy(update={"temperature": 0.0, "max_new_tokens": 16})
    found = {}
    for prompt in (PROMPTS[0], PROMPTS[2]):
        ids = format_.prompt(prompt["prompt"])
        found[" ".join(map(str, ids))] = list(Session(pair, None).generate(ids, settings).tokens)
    return found


def options(prompts, models, program):
    return ["-i", prompts, "-n", "12", "--policy", "constant", "--peer", PEER,
            "--peer-models", f"{PEER}={models}", "--peer-program", f"{PEER}={program}"]  # fmt: skip


def test_a_peer_is_measured_like_any_candidate(tmp_path, prompts, models, answers):
    program, path = install(tmp_path / "fake", answers), tmp_path / "results.jsonl"
    shown = bench(*options(prompts, models, program), "-o", path)
    assert shown.exit_code == 0, shown.output
    results = read_results(path)
    assert [run.prompt for run in results.of(LABEL)] == ["kite", "apples"]
    assert results.header.versions[PEER] == "1.2.3"
    assert results.header.devices[PEER].startswith("cpu")
    for run in results.of(LABEL):
        (turn,) = run.turns
        assert (turn.total_ms, turn.first_token_ms, turn.prefill_ms) == (500.0, 100.0, 0.0)
        assert (turn.target_forwards, turn.draft_forwards) == (len(turn.tokens), 2 * len(turn.tokens))
    assert "4 runs gave exactly the tokens of none." in shown.stdout
    assert f"{LABEL}  1.2.3" in shown.stdout
    document = json.loads(bench("--from", path, "--json").stdout)
    cost = next(one for one in document["costs"] if one["candidate"] == LABEL)
    assert cost["measured"] == pytest.approx(24.0)
    assert cost["predicted"] is None, "it ran on another engine than the measured passes"
    load, *runs = [json.loads(line) for line in (tmp_path / "fake" / "said").read_text(encoding="utf-8").splitlines()]
    assert (load["do"], load["draft"], load["tokens"], load["threads"]) == ("load", "constant", 5, 1)
    assert {len(ids) for run in runs for ids in run["batch"]} == {len(ids.split()) for ids in answers}


@pytest.mark.slow
def test_a_peer_without_a_draft_runs_as_many_prompts_at_once_as_others(tmp_path, prompts, models, answers):
    program, path = install(tmp_path / "fake", answers), tmp_path / "results.jsonl"
    peers = ["--peer", PEER, "--peer", f"{PEER}:{NO_DRAFT}"]
    flags = [*peers, "--peer-models", f"{PEER}={models}", "--peer-program", f"{PEER}={program}"]
    shown = bench("-i", prompts, "-n", "12", "--batch", "3", *flags, "-o", path)
    assert shown.exit_code == 0, shown.output
    results = read_results(path)
    for label, share in ((f"{PEER}:{NO_DRAFT}", 250.0), (LABEL, 500.0)):
        assert [(run.prompt, run.difference) for run in results.of(label)] == [("kite", None), ("apples", None)]
        for (turn,) in (run.turns for run in results.of(label)):
            assert (turn.total_ms, turn.first_token_ms, turn.end_ms) == (share, 100.0, 500.0)
    said = [json.loads(line) for line in (tmp_path / "fake" / "said").read_text(encoding="utf-8").splitlines()]
    assert sorted(len(asked["batch"]) for asked in said if asked.get("most") == 12) == [1, 1, 2]


@pytest.mark.slow
def test_a_batch_of_a_peer_that_fails_is_told_once(tmp_path, prompts, models, answers):
    program, path = install(tmp_path / "fake", answers, "error"), tmp_path / "results.jsonl"
    flags = ["--peer-models", f"{PEER}={models}", "--peer-program", f"{PEER}={program}"]
    shown = bench("-i", prompts, "-n", "12", "--batch", "2", "--peer", f"{PEER}:{NO_DRAFT}", *flags, "-o", path)
    assert shown.exit_code == 0, shown.output
    assert read_results(path).failed == {f"{PEER}:{NO_DRAFT}": f"{PEER}:{NO_DRAFT}: RuntimeError: out of cheese"}


def test_other_tokens_are_told_as_those_of_a_policy_are(tmp_path, prompts, models, answers):
    program = install(tmp_path / "fake", answers, "wrong")
    shown = bench(*options(prompts, models, program), "--limit", "1", "-o", tmp_path / "results.jsonl")
    assert "GREEDY OUTPUT DIFFERS in 1 of 2 runs" in shown.stdout
    (run,) = read_results(tmp_path / "results.jsonl").of(LABEL)
    assert (run.difference.position, run.difference.gap is not None) == (2, True)


def test_a_peer_that_dies_leaves_the_other_runs_and_is_asked_again_on_resuming(tmp_path, prompts, models, answers):
    program, path = install(tmp_path / "fake", answers, "die"), tmp_path / "results.jsonl"
    shown = bench(*options(prompts, models, program), "-o", path)
    why = f"{LABEL}: its process was ended by signal 9: the model fell over"
    assert shown.exit_code == 0
    assert shown.stderr.count(f"warning: {why}") == 1
    assert "Peers that failed" in shown.stdout
    results = read_results(path)
    assert results.failed == {LABEL: why}
    assert [len(results.of(label)) for label in ("none", "constant", LABEL)] == [2, 2, 0]
    (tmp_path / "fake" / "behaviour").write_text("", encoding="utf-8")
    shown = bench(*options(prompts, models, program), "-o", path, "--resume")
    results = read_results(path)
    assert (results.failed, len(results.of(LABEL))) == ({}, 2)
    assert "Peers that failed" not in shown.stdout


def test_a_peer_that_hangs_is_given_up(tmp_path, prompts, models, monkeypatch):
    monkeypatch.setattr("specctl.peers.process.RUN_SECONDS", 0.5)
    monkeypatch.setattr("specctl.peers.process.TOKEN_SECONDS", 0.0)
    program, path = install(tmp_path / "fake", {}, "hang"), tmp_path / "results.jsonl"
    assert bench(*options(prompts, models, program), "--limit", "1", "-o", path).exit_code == 0
    assert read_results(path).failed[LABEL].endswith("did not answer within 0 s")
    assert ended(int((tmp_path / "fake" / "pid").read_text(encoding="utf-8")))


@pytest.mark.exhaustive
def test_an_interrupt_ends_the_peers_too(tmp_path, prompts, models):
    program = install(tmp_path / "fake", {}, "hang")
    command = [sys.executable, "-m", "specctl", "bench", *options(prompts, models, program)]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said, end = tmp_path / "fake" / "said", monotonic() + 300
    while not (said.exists() and said.read_text(encoding="utf-8").count("\n") == 2):
        assert process.poll() is None
        assert monotonic() < end
        sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert ended(int((tmp_path / "fake" / "pid").read_text(encoding="utf-8")))


def test_a_peer_without_its_package_is_told_before_the_models_are_loaded(prompts, models):
    """This Python has none of the packages, or a test of the real engine runs instead."""
    program = Path(sys.executable)
    try:
        __import__("onnxruntime_genai")
    except ImportError:
        with pytest.raises(ModelError) as caught:
            bench(*options(prompts, models, program))
        assert "No module named 'onnxruntime_genai'" in caught.value.message
        assert caught.value.hint == f"{sys.executable} -m pip install onnxruntime-genai"
    else:
        pytest.skip("this Python has onnxruntime-genai")


def test_sampling_is_not_measured(prompts, models):
    with pytest.raises(UsageError, match="only in greedy decoding"):
        bench(*options(prompts, models, sys.executable), "-t", "1")


@pytest.mark.slow
@pytest.mark.parametrize("peer", ENGINES)
def test_a_real_engine_writes_the_targets_own_tokens(peer, tmp_path):
    found = [text for text in shlex.split(os.environ.get(REAL_MODELS, "")) if text.startswith(f"{peer}=")]
    if not found:
        pytest.skip(f"no models of the embedded pair for {peer} are named in {REAL_MODELS}")
    programs = [text for text in shlex.split(os.environ.get(REAL_PROGRAMS, "")) if text.startswith(f"{peer}=")]
    arguments = ["--peer-models", *found, *(["--peer-program", *programs] if programs else [])]
    labels = [f"{peer}:none", *(f"{peer}:{name}:{way.default:g}" for name, way in ENGINES[peer].ways.items())]
    path = tmp_path / "results.jsonl"
    peers = [part for label in labels for part in ("--peer", label)]
    shown = bench("-p", "embedded", *peers, *arguments, "--samples-per-category", "1", "-n", "48", "-o", path)
    assert shown.exit_code == 0, shown.output
    results = read_results(path)
    assert not results.failed
    for label in labels:
        assert results.of(label)
        for run in results.of(label):
            assert run.difference is None or (run.difference.gap or 0.0) < 1e-3
            assert run.turns[0].draft_forwards > 0 or label == f"{peer}:none"
