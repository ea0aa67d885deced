"""`specctl train-draft` from prompts to a draft head that `generate` drafts with."""

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
from specctl.errors import UsageError
from specctl.models.draft_heads.kinds import RECIPES
from specctl.training.material import INDEX
from specctl.training.subject import PROMPTS_PER_SHARD
from tests.support.checkpoints import llama_config, save_model
from tests.support.invoked import invoke

PROMPTS = 2 * PROMPTS_PER_SHARD
TRAINING = ["--steps", "3", "--epochs", "2", "--lr", "0.003"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft model with their profile, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "target", llama_config(initializer_range=0.3, num_hidden_layers=4))
    save_model(folder / "draft", llama_config(initializer_range=0.3, num_hidden_layers=1))
    (folder / "pair.toml").write_text(
        f'[target]\nmodel = "{folder / "target"}"\ndevice = "cpu"\n'
        f'[draft]\nmodel = "{folder / "draft"}"\ndevice = "cpu"\n[sampling]\nmax_new_tokens = 12\n'
    )
    prompts = [{"id": n, "prompt": f"the {n} moons"} for n in range(PROMPTS)]
    prompts[3] = {"id": 3, "prompt": "too long " * 4000}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def options(folder: Path, kind: str, output: str, *more: str) -> list[str]:
    return ["train-draft", "--kind", kind, "-p", str(folder / "pair.toml"), "-o", str(folder / output), *more]


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, Any]:
    """An EAGLE-3 head trained without interruption, and the messages of the run."""
    prompts = str(folder / "prompts.jsonl")
    more = ["-i", prompts, *TRAINING, "--draft-vocabulary", "200", "--json"]
    return folder / "eagle3", invoke(*options(folder, "eagle3", "eagle3", *more))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.slow
def test_a_head_and_its_evaluation(whole: tuple[Path, Any], folder: Path) -> None:
    path, result = whole
    config = json.loads((path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 200
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(folder / "target")
    found = json.loads(result.stdout)["drafts"]
    assert found == json.loads((path / "evaluation.json").read_text())
    assert [(one["draft"], one["answers"]) for one in found] == [
        ("EAGLE-3", "greedy"),
        (str(folder / "draft"), "greedy"),
        ("EAGLE-3", "temperature 1"),
        (str(folder / "draft"), "temperature 1"),
    ]
    for one in found:
        assert one["rounds"] > 0
        assert len(one["accepted"]) == 7
        assert one["accepted"][0] == one["acceptance"][0]
    assert "EAGLE-3" in (path / "README.md").read_text()
    assert not (path / "training.safetensors").exists()
    assert not (path / "states").exists()
    assert "warning: prompt 3 is left out" in result.stderr


SMALL = {kind: ["--depth", "1", "--steps", "3", "--anchors", "4"] for kind in ("dflash", "dspark")}
SMALL["glide"] = ["--depth", "2", "--steps", "3"]


@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "eagle3"])
@pytest.mark.representatives("dflash")
def test_other_kinds_learn_from_the_same_answers(kind: str, folder: Path, whole: tuple[Path, Any]) -> None:
    more = ["--answers", str(whole[0] / "answers"), "--epochs", "1"]
    size = SMALL.get(kind, [])
    shown = invoke(*options(folder, kind, kind, *more, *size)).stdout
    assert "Tokens accepted of a round" in shown
    assert not (folder / kind / "answers").exists()


def test_an_eagle1_head_that_learns_few_tokens_drafts_them(folder: Path, whole: tuple[Path, Any]) -> None:
    more = ["--answers", str(whole[0] / "answers"), "--epochs", "1", "--draft-vocabulary", "40"]
    invoke(*options(folder, "eagle1", "few", *more))
    held = {path.name for path in (folder / "few").iterdir()}
    assert held == {"README.md", "config.json", "evaluation.json", "model.safetensors", "token_counts.json"}
    profile = (folder / "pair.toml").read_text().replace(str(folder / "draft"), str(folder / "few"))
    counts = folder / "few" / "token_counts.json"
    few = profile.replace("[sampling]", f'tokens = 40\ntoken_counts = "{counts}"\n[sampling]')
    (folder / "few.toml").write_text(few)
    arguments = ["generate", "the moon", "-n", "20", "--json", "-p", str(folder / "few.toml")]
    alone = json.loads(invoke(*arguments, "--policy", "none").stdout)
    drafted = json.loads(invoke(*arguments).stdout)
    assert drafted["completion"] == alone["completion"]
    assert drafted["metrics"]["drafted"] > 0


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.representatives("eagle3", "dflash")
def test_generate_drafts_with_it_and_writes_what_the_target_writes(folder: Path, kind: str) -> None:
    if not (folder / kind / "config.json").exists():
        answers = str(folder / "eagle3" / "answers")
        size = SMALL.get(kind, [])
        invoke(*options(folder, kind, kind, "--answers", answers, "--epochs", "1", *size))
    arguments = ["generate", "-p", str(folder / "pair.toml"), "the moon", "-n", "20", "--json"]
    alone = json.loads(invoke(*arguments, "--policy", "none").stdout)
    drafted = json.loads(invoke(*arguments, "--draft", str(folder / kind)).stdout)
    assert drafted["completion"] == alone["completion"]
    assert drafted["metrics"]["drafted"] > 0


@pytest.mark.exhaustive
def test_a_run_that_is_interrupted_gives_the_same_head(folder: Path, whole: tuple[Path, Any]) -> None:
    """Killed while answers are collected, and stopped by Ctrl-C in training."""
    more = ["-i", str(folder / "prompts.jsonl"), *TRAINING, "--draft-vocabulary", "200", "-q"]
    arguments = options(folder, "eagle3", "torn", *more)
    index, state = folder / "torn" / "answers" / INDEX, folder / "torn" / "training.safetensors"

    def shards() -> int:
        return len(json.loads(index.read_text())["shards"]) if index.exists() else 0

    end_when(arguments, lambda: shards() >= 1, signal.SIGKILL)
    (index.parent / "shard-00001.safetensors").write_bytes(b"torn")
    end_when([*arguments, "--resume"], lambda: shards() == 2, signal.SIGINT)
    assert not (folder / "torn" / "config.json").exists()
    invoke(*arguments, "--resume")
    assert not state.exists()
    assert files(folder / "torn" / "answers") == files(whole[0] / "answers")
    assert files(folder / "torn") == files(whole[0])
    invoke(*arguments, "--resume")  # once more changes nothing
    assert files(folder / "torn") == files(whole[0])


def end_when(arguments: list[str], ready: Any, how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-m", "specctl", *arguments], stdout=subprocess.DEVNULL) as process:
        while not ready() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(how)
    assert process.returncode in (-signal.SIGKILL, 130), "it was over before it could be ended"


@pytest.mark.usefixtures("whole")
def test_earlier_results_are_not_overwritten(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"already holds README\.md"):
        invoke(*options(folder, "eagle3", "eagle3", "-i", str(folder / "prompts.jsonl")))


@pytest.mark.usefixtures("whole")
def test_other_prompts_cannot_be_mixed_in(folder: Path) -> None:
    prompts = ["-i", str(folder / "prompts.jsonl"), "--limit"]
    invoke(*options(folder, "eagle3", "part", *prompts, "2", "--answers-only", "-q"))
    with pytest.raises(UsageError, match="'prompts' differs"):
        invoke(*options(folder, "eagle3", "part", *prompts, "3", "--resume"))


@pytest.mark.usefixtures("whole")
def test_answers_of_another_target_are_an_error(folder: Path) -> None:
    other = ["--set", f"target.model={folder / 'draft'}", "--answers", str(folder / "eagle3" / "answers")]
    with pytest.raises(UsageError, match="another target"):
        invoke(*options(folder, "eagle3", "other", *other))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("eagle3", [], "there are no prompts to train on"),
        ("eagle3", ["--answers", "x", "--answers-only"], "use either"),
        ("eagle3", ["--answers", "x", "-i", "prompts.jsonl"], "--answers replaces the prompts"),
        ("eagle3", ["--answers", "nowhere"], "holds no training data of specctl train-draft"),
        ("eagle3", ["--lr", "0", "-i", "prompts.jsonl"], "--lr must be more than 0"),
        ("eagle3", ["-i", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        ("eagle3", ["--anchors", "4", "-i", "prompts.jsonl"], "--anchors does not apply to --kind eagle3"),
        ("eagle1", ["--anchors", "4", "-i", "prompts.jsonl"], "--anchors does not apply to --kind eagle1"),
        ("glide", ["--anchors", "4", "-i", "x"], "--anchors does not apply to --kind glide"),
        ("mtp", ["--depth", "2", "-i", "x"], "--depth does not apply to --kind mtp"),
        ("dspark", ["--draft-vocabulary", "9", "-i", "x"], "--draft-vocabulary does not apply to --kind dspark"),
    ],
)
def test_invalid_options(folder: Path, tmp_path: Path, kind: str, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        invoke(*options(folder, kind, str(tmp_path / "new"), *arguments))
    assert not (tmp_path / "new").exists()


def test_a_kind_that_is_unknown(folder: Path) -> None:
    result = CliRunner().invoke(app, options(folder, "medusa", "new", "-i", "x"))
    assert result.exit_code == 2
    assert "'medusa' is not one of" in result.output


def test_a_folder_of_something_else_is_not_continued(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(b"x")
    with pytest.raises(UsageError, match="nothing that specctl train-draft has written"):
        invoke(*options(folder, "eagle3", str(tmp_path), "-i", str(folder / "prompts.jsonl"), "--resume"))
