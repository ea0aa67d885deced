"""`specctl train-head` from prompts to a head that `specdec++` stops by."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.errors import ModelError, ProfileError, UsageError
from specctl.training.material import INDEX
from specctl.training.subject import PROMPTS_PER_SHARD
from tests.support.checkpoints import llama_config, save_model
from tests.support.invoked import invoke

PROMPTS = 5 * PROMPTS_PER_SHARD
TRAINING = ["--depth", "1", "--reject-weight", "1", "--lr", "0.01", "--epochs", "40", "--batch-size", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and their profile, whose policy needs a head."""
    folder = tmp_path_factory.mktemp("pair")
    # Wide weights, or an untrained model predicts nothing but noise.
    save_model(folder / "target", llama_config(initializer_range=0.3))
    save_model(folder / "draft", llama_config(initializer_range=0.3, num_hidden_layers=1))
    (folder / "pair.toml").write_text(
        f'[target]\nmodel = "{folder / "target"}"\ndevice = "cpu"\n'
        f'[draft]\nmodel = "{folder / "draft"}"\ndevice = "cpu"\nhead = "{folder / "whole"}"\n'
        '[draft.policy]\nname = "specdec++"\nthreshold = 0.5\n[sampling]\nmax_new_tokens = 6\n'
    )
    prompts = [{"id": n, "prompt": f"the {n} moons"} for n in range(PROMPTS)]
    prompts[3] = {"id": 3, "prompt": "too long " * 4000}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def options(folder: Path, output: str, *more: str) -> list[str]:
    pair = ["-p", str(folder / "pair.toml"), "-o", str(folder / output)]
    return ["train-head", *pair, *more]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, Any]:
    """A head trained without interruption, and the messages of the run."""
    prompts = str(folder / "prompts.jsonl")
    return folder / "whole", invoke(*options(folder, "whole", "-i", prompts, *TRAINING, "--json"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_head_and_its_evaluation(whole: tuple[Path, Any]) -> None:
    path, result = whole
    config = json.loads((path / "config.json").read_text())
    assert (config["hidden_size"], config["depth"], config["schema_version"]) == (16, 1, 1)
    assert len(config["draft_sha256"]) == 64
    assert config["sampling"]["temperature"] == 1
    assert config["sampling"]["top_k"] == 50
    assert config["prompts"] == {"name": "prompts.jsonl", "sha256": config["prompts"]["sha256"], "count": PROMPTS}
    assert config["training"]["reject_weight"] == 1
    assert set(config["seconds"]) == {"data", "training", "evaluation"}
    (found,) = json.loads(result.stdout)["heads"]
    assert found["head"] == config["metrics"]["head"]
    assert found["prompts"] == PROMPTS // 10
    assert set(found["signals"]) == {"entropy", "top_prob", "token_prob"}
    assert config["draft_sha256"] in (path / "README.md").read_text()
    assert (path / "reliability.png").stat().st_size > 1000
    assert not (path / "training.safetensors").exists()


def test_a_prompt_that_cannot_be_answered_is_left_out_with_a_message(whole: tuple[Path, Any]) -> None:
    assert "warning: prompt 3 is left out" in whole[1].stderr
    assert "examples: 80 prompts" in whole[1].stderr


@pytest.mark.usefixtures("whole")
def test_the_policy_stops_by_the_head(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    arguments = ["the moon", "--json", "-n", "40", "--trace", str(trace)]
    said = json.loads(invoke("generate", "-p", str(folder / "pair.toml"), *arguments).stdout)
    alone = json.loads(invoke("generate", "-p", str(folder / "pair.toml"), "--policy", "none", *arguments[:4]).stdout)
    assert said["completion"] == alone["completion"]
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    for round_ in rounds:
        product = 1.0
        for step in round_["steps"][:-1]:
            product *= step["accept_prob"]
        if round_["stop"] == "policy" and len(round_["steps"]) > 2:
            assert 1 - product <= 0.5 < 1 - product * round_["steps"][-1]["accept_prob"]
    assert any(round_["stop"] == "policy" for round_ in rounds)
    analysis = json.loads(invoke("analyze", "--from", str(trace), "--json").stdout)
    assert analysis["predictors"]["accept_prob"]["tokens"] < analysis["predictors"]["entropy"]["tokens"]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_analyze_reads_the_head_too(folder: Path, temperature: str) -> None:
    (folder / "two.jsonl").write_text('{"prompt": "the moon"}\n{"prompt": "a star"}\n')
    pair = ["-p", str(folder / "pair.toml"), "-i", str(folder / "two.jsonl"), "-n", "10", "-t", temperature]
    found = json.loads(invoke("analyze", *pair, "--json", "-q").stdout)["predictors"]
    assert found["accept_prob"]["tokens"] == found["entropy"]["tokens"]
    assert 0 < found["accept_prob"]["bins"][0]["low"] < found["accept_prob"]["bins"][-1]["high"] < 1


@pytest.mark.usefixtures("whole")
def test_doctor_checks_the_head(folder: Path) -> None:
    found = json.loads(invoke("doctor", "-p", str(folder / "pair.toml"), "--json").stdout)
    assert found["ready"]
    arguments = ["doctor", "-p", str(folder / "pair.toml"), "--set", "draft.head=./nowhere", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["where"] == "draft.head"
    assert "'./nowhere'" in problem["message"]


@pytest.mark.usefixtures("whole")
@pytest.mark.slow
def test_bench_compares_heads(folder: Path) -> None:
    (folder / "one.jsonl").write_text('{"prompt": "the moon"}\n')
    pair = str(folder / "pair.toml")
    shown = invoke(
        "bench", "-p", pair, "-i", str(folder / "one.jsonl"), "-n", "8", "--policy", "specdec++", "-q", "--details"
    ).stdout
    assert "specdec++" in shown
    assert "The draft's head adds" in shown
    (folder / "results.jsonl").unlink(missing_ok=True)
    kept = ["-o", str(folder / "results.jsonl"), "-q"]
    invoke("bench", "-p", pair, "-i", str(folder / "one.jsonl"), "-n", "8", "--policy", "specdec++", *kept)
    assert "The draft's head adds" in invoke("bench", "--details", "--from", str(folder / "results.jsonl")).stdout


@pytest.mark.exhaustive
def test_a_run_killed_in_collection_and_in_training_gives_the_same_head(folder: Path, whole: tuple[Path, Any]) -> None:
    """Examples and head are the same as without interruption, byte for byte."""
    arguments = options(folder, "torn", "-i", str(folder / "prompts.jsonl"), *TRAINING, "-q")
    index, state = folder / "torn" / "examples" / INDEX, folder / "torn" / "training.safetensors"

    def shards() -> int:
        return len(json.loads(index.read_text())["shards"]) if index.exists() else 0

    kill_when(arguments, lambda: shards() >= 2)
    assert shards() < 5
    kill_when([*arguments, "--resume"], state.exists)
    assert shards() == 5
    invoke(*arguments, "--resume")
    assert files(folder / "torn" / "examples") == files(whole[0] / "examples")
    assert files(folder / "torn") == files(whole[0])
    # Once more changes nothing.
    invoke(*arguments, "--resume")
    assert files(folder / "torn") == files(whole[0])


def kill_when(arguments: list[str], ready: Any) -> None:
    with subprocess.Popen([sys.executable, "-m", "specctl", *arguments], stdout=subprocess.DEVNULL) as process:
        while not ready() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it was over before it could be killed"


@pytest.mark.exhaustive
def test_a_sweep_trains_every_head_from_the_same_data(folder: Path, whole: tuple[Path, Any]) -> None:
    data = ["--examples", str(whole[0] / "examples"), "--sweep", "--epochs", "1", "--lr", "0.01", "-q"]
    shown = invoke(*options(folder, "sweep", *data)).stdout
    assert "KL (nats) by depth and rejection weight" in shown
    heads = json.loads((folder / "sweep" / "sweep.json").read_text())
    assert [(head["depth"], head["reject_weight"]) for head in heads[:5]] == [(0, 1), (0, 3), (0, 6), (0, 12), (1, 1)]
    for head in heads:
        place = folder / "sweep" / f"d{head['depth']}-w{head['reject_weight']:g}"
        config = json.loads((place / "config.json").read_text())
        assert config["metrics"]["head"] == head["head"]


@pytest.mark.usefixtures("whole")
def test_earlier_results_are_not_overwritten(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"already holds README\.md"):
        invoke(*options(folder, "whole", "-i", str(folder / "prompts.jsonl")))


@pytest.mark.usefixtures("whole")
def test_other_prompts_cannot_be_mixed_in(folder: Path) -> None:
    invoke(*options(folder, "part", "-i", str(folder / "prompts.jsonl"), "--limit", "2", "--examples-only", "-q"))
    with pytest.raises(UsageError, match="'prompts' differs"):
        invoke(*options(folder, "part", "-i", str(folder / "prompts.jsonl"), "--limit", "3", "--resume"))
    with pytest.raises(UsageError, match="'sampling' differs"):
        invoke(*options(folder, "part", "-i", str(folder / "prompts.jsonl"), "--limit", "2", "--resume", "-t", "0.5"))


def test_examples_of_another_draft_are_an_error(folder: Path, whole: tuple[Path, Any]) -> None:
    other = ["--set", f"draft.model={folder / 'target'}", "--set", "policy.name=constant"]
    with pytest.raises(UsageError, match="another draft"):
        invoke(*options(folder, "other", "--examples", str(whole[0] / "examples"), *other))


def test_a_head_of_another_draft_is_an_error_unless_forced(folder: Path, whole: tuple[Path, Any]) -> None:
    other = ["--set", f"draft.model={folder / 'target'}", "--set", f"draft.head={whole[0]}"]
    arguments = ["generate", "-p", str(folder / "pair.toml"), *other, "the moon", "-n", "4"]
    with pytest.raises(ModelError, match="trained on other weights"):
        invoke(*arguments)
    assert "warning: The acceptance head" in invoke(*arguments, "--foreign-head").stderr


@pytest.mark.usefixtures("whole")
def test_another_draft_does_not_keep_the_head(folder: Path) -> None:
    with pytest.raises(ProfileError, match=r"draft\.head: is required by the policy specdec\+\+"):
        invoke("generate", "-p", str(folder / "pair.toml"), "--set", f"draft.model={folder / 'target'}", "the moon")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--examples", "x", "--examples-only"],
        ["--examples", "x", "-i", "prompts.jsonl"],
        ["--examples", "nowhere"],
        ["--lr", "0", "-i", "prompts.jsonl"],
        [],
        ["-i", "prompts.jsonl", "--suite", "gsm8k"],
    ],
)
def test_invalid_options(folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        invoke(*options(folder, str(tmp_path / "new"), *arguments))
