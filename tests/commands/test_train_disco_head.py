"""`specctl train-head --kind disco` from prompts to a head that `disco` stops by."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.errors import ModelError, ProfileError, UsageError
from tests.support.checkpoints import llama_config, save_model
from tests.support.invoked import invoke

pytestmark = pytest.mark.slow

PROMPTS = 30
TRAINING = ["--kind", "disco", "--epochs", "4", "--batch-size", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and their profile, whose policy needs a DISCO head."""
    folder = tmp_path_factory.mktemp("pair")
    # Wide weights, or an untrained model predicts nothing but noise.
    save_model(folder / "target", llama_config(initializer_range=0.3))
    save_model(folder / "draft", llama_config(initializer_range=0.3, num_hidden_layers=1))
    (folder / "pair.toml").write_text(
        f'[target]\nmodel = "{folder / "target"}"\ndevice = "cpu"\n'
        f'[draft]\nmodel = "{folder / "draft"}"\ndevice = "cpu"\nhead = "{folder / "whole"}"\n'
        '[draft.policy]\nname = "disco"\nthreshold = 0.1\n[sampling]\nmax_new_tokens = 12\n'
    )
    lines = [json.dumps({"id": n, "prompt": f"the {n} moons"}) + "\n" for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


def options(folder: Path, output: str, *more: str) -> list[str]:
    return ["train-head", "-p", str(folder / "pair.toml"), "-o", str(folder / output), *more]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, Any]:
    """A head trained without interruption, and the messages of the run."""
    prompts = str(folder / "prompts.jsonl")
    return folder / "whole", invoke(*options(folder, "whole", "-i", prompts, *TRAINING, "--json"))


def test_a_head_and_its_evaluation(whole: tuple[Path, Any]) -> None:
    path, result = whole
    config = json.loads((path / "config.json").read_text())
    assert (config["kind"], config["schema_version"]) == ("disco", 1)
    assert "hidden_size" not in config
    assert config["training"]["depth"] is None
    assert config["training"]["epochs"] == 4
    assert config["training"]["reject_weight"] == 1
    (found,) = json.loads(result.stdout)["heads"]
    assert found["head"] == config["metrics"]["head"]
    assert set(found["signals"]) == {"entropy", "top_prob", "token_prob"}
    card = (path / "README.md").read_text()
    assert "arXiv 2405.04304" in card
    assert "the 10 largest probabilities" in card
    assert "mix" not in card
    assert (path / "head.safetensors").stat().st_size < 4096


@pytest.mark.usefixtures("whole")
def test_the_policy_stops_by_the_head(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    arguments = ["-p", str(folder / "pair.toml"), "the moon", "--json", "-n", "40"]
    said = json.loads(invoke("generate", *arguments, "--trace", str(trace)).stdout)
    alone = json.loads(invoke("generate", *arguments, "--policy", "none").stdout)
    assert said["completion"] == alone["completion"]
    steps = [json.loads(line)["steps"] for line in trace.read_text().splitlines()]
    own = sorted(step["own_accept_prob"] for some in steps for step in some)
    middle = own[len(own) // 2]
    invoke("generate", *arguments, "--trace", str(trace), "--force", "--policy", f"disco:threshold={middle}")
    stopped = [json.loads(line) for line in trace.read_text().splitlines()]
    assert any(one["stop"] == "policy" for one in stopped)
    for one in stopped:
        *before, last = [step["own_accept_prob"] for step in one["steps"]] or [1.0]
        assert all(value >= middle for value in before)
        assert (last < middle) == (one["stop"] == "policy")
    found = json.loads(invoke("analyze", "--from", str(trace), "--json").stdout)["predictors"]
    assert found["own_accept_prob"]["tokens"] == found["entropy"]["tokens"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("whole")
def test_calibrate_finds_its_threshold(folder: Path) -> None:
    profile = ["-p", str(folder / "pair.toml"), "-q", "--no-verify", "--json"]
    prompts = ["-i", str(folder / "prompts.jsonl"), "--samples", "2", "--grid", "paper", "-n", "12"]
    trace = str(folder / "calibration.jsonl")
    found = json.loads(invoke("calibrate", *profile, *prompts, "--trace", trace).stdout)
    assert {"none", "constant", "disco"} <= {entry["policy"]["name"] for entry in found["ranking"]}
    again = json.loads(invoke("calibrate", *profile, "--from", trace, "--policy", "disco", "--grid", "paper").stdout)
    assert again["chosen"]["name"] in ("none", "constant", "disco")
    assert again["candidates"] == found["candidates"]


@pytest.mark.usefixtures("whole")
def test_the_wrong_kind_of_head_is_told(folder: Path) -> None:
    pair = ["-p", str(folder / "pair.toml")]
    with pytest.raises(
        ModelError, match=r"is of the kind disco, and the policy specdec\+\+ reads one of the kind spec"
    ):
        invoke("generate", *pair, "--policy", "specdec++", "the moon")
    result = CliRunner().invoke(app, ["doctor", *pair, "--set", "policy.name=specdec++", "--json"])
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["where"] == "draft.head"
    assert "--kind specdec++" in problem["hint"]
    assert json.loads(invoke("doctor", *pair, "--json").stdout)["ready"]
    with pytest.raises(ProfileError, match=r"draft\.head: is required by the policy disco.*train-head --kind disco"):
        invoke("generate", *pair, "--set", f"draft.model={folder / 'target'}", "the moon")
    with pytest.raises(ProfileError, match="disco reads signals that a lookup does not have"):
        invoke("generate", "-p", "embedded-lookup", "--policy", "disco", "the moon")


@pytest.mark.usefixtures("whole")
def test_examples_of_one_kind_are_not_for_the_other(folder: Path, whole: tuple[Path, Any]) -> None:
    with pytest.raises(UsageError, match="collected for heads of the kind disco, not specdec") as found:
        invoke(*options(folder, "other", "--examples", str(whole[0] / "examples"), "-q"))
    assert "--kind disco" in found.value.hint
    shown = invoke(*options(folder, "again", "--examples", str(whole[0] / "examples"), *TRAINING, "-q")).stdout
    assert "rejection weight 1" in shown
    assert (folder / "again" / "head.safetensors").read_bytes() == (whole[0] / "head.safetensors").read_bytes()
    invoke(*options(folder, "part", "-i", str(folder / "prompts.jsonl"), "--limit", "2", "--examples-only", "-q"))
    with pytest.raises(UsageError, match="'kind' differs"):
        invoke(*options(folder, "part", "-i", str(folder / "prompts.jsonl"), "--limit", "2", "--resume", *TRAINING))


@pytest.mark.parametrize("flags", [["--depth", "1"], ["--mix", "0.2"], ["--signals"], ["--sweep"]])
def test_what_belongs_to_hidden_states_is_an_error(folder: Path, flags: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{flags[0]} needs a head on hidden states"):
        invoke(*options(folder, "new", "-i", str(folder / "prompts.jsonl"), "--kind", "disco", *flags))
