"""`specctl train-head` for a draft that is itself a head on the target's states."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.errors import UsageError
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.training import predictors, subject
from specctl.training.material import INDEX
from specctl.training.predictor_examples import ExampleFolder
from specctl.training.subject import PROMPTS_PER_SHARD
from tests.support.checkpoints import llama_config, save_model
from tests.support.invoked import invoke
from tests.support.toy_heads import random_block, random_eagle3

pytestmark = pytest.mark.slow

PROMPTS = 2 * PROMPTS_PER_SHARD
SHAPE = LayerShape(hidden_size=12, intermediate_size=24, heads=2, kv_heads=1, head_dim=6)
TRAINING = ["--depth", "1", "--reject-weight", "1", "--lr", "0.01", "--epochs", "4", "--batch-size", "8", "-q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a random head on its states, and their profile, whose policy needs an acceptance head."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "target", llama_config(initializer_range=0.1))
    for name, seed in (("draft", 1), ("another", 2)):
        head = random_eagle3(layers=(0, 1), states=16, vocabulary=258, shape=SHAPE, seed=seed, spread=0.2)
        write_head(folder / name, head, Verifier("someone/target"))
    (folder / "pair.toml").write_text(
        f'[target]\nmodel = "{folder / "target"}"\ndevice = "cpu"\n'
        f'[draft]\nmodel = "{folder / "draft"}"\nhead = "{folder / "whole"}"\n'
        '[draft.policy]\nname = "specdec++"\nthreshold = 0.6\n[sampling]\nmax_new_tokens = 10\n'
    )
    prompts = [{"id": n, "prompt": f"the {n} moons"} for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def options(folder: Path, output: str, *more: str) -> list[str]:
    return ["train-head", "-p", str(folder / "pair.toml"), "-o", str(folder / output), *more]


def collecting(folder: Path, output: str, *more: str) -> list[str]:
    return options(folder, output, "-i", str(folder / "prompts.jsonl"), *TRAINING, *more)


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, Any]:
    return folder / "whole", json.loads(invoke(*collecting(folder, "whole", "--json")).stdout)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_head_for_the_draft_heads_own_states(whole: tuple[Path, Any]) -> None:
    path, shown = whole
    config = json.loads((path / "config.json").read_text())
    assert config["hidden_size"] == SHAPE.hidden_size
    assert config["training"]["mix"] == 0
    (found,) = shown["heads"]
    assert found["head"] == config["metrics"]["head"]
    assert found["prompts"] == PROMPTS // 10
    assert set(found["signals"]) == {"entropy", "top_prob", "token_prob"}
    assert "mix 0" in (path / "README.md").read_text()
    facts = json.loads((path / "examples" / INDEX).read_text())["facts"]
    assert facts["draft_head"] == "eagle3"
    with safe_open(path / "examples" / "shard-00000.safetensors", framework="pt") as file:
        tokens, answers = file.get_tensor("proposals"), file.get_tensor("answer_lengths")
        assert file.get_tensor("hidden").shape == (len(tokens), SHAPE.hidden_size)
    assert 0.9 * answers.sum() < len(tokens) <= answers.sum()


@pytest.mark.usefixtures("whole")
def test_the_policy_stops_by_it(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    arguments = ["generate", "-p", str(folder / "pair.toml"), "the moon", "--json", "-n", "40"]
    said = json.loads(invoke(*arguments, "--trace", str(trace)).stdout)
    assert said["completion"] == json.loads(invoke(*arguments, "--policy", "none").stdout)["completion"]
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    assert any(round_["stop"] == "policy" for round_ in rounds)
    assert all(0 < step["accept_prob"] < 1 for round_ in rounds for step in round_["steps"][1:])


@pytest.mark.exhaustive
def test_an_interrupted_run_goes_on_to_the_same_head(
    folder: Path, whole: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ExampleFolder.add

    def add_one(self: ExampleFolder, *shard: Any) -> None:
        if self.done:
            raise KeyboardInterrupt
        add(self, *shard)

    with monkeypatch.context() as patched:
        patched.setattr(ExampleFolder, "add", add_one)
        assert CliRunner().invoke(app, collecting(folder, "torn")).exit_code
    assert len(list((folder / "torn" / "examples").glob("shard*"))) == 1
    invoke(*collecting(folder, "torn", "--resume"))
    assert files(folder / "torn" / "examples") == files(whole[0] / "examples")
    assert files(folder / "torn") == files(whole[0])


def test_earlier_examples_need_no_model(folder: Path, whole: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictors, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(subject, "load_pair", lambda *_, **__: pytest.fail("a model was loaded"))
    examples = ["--examples", str(whole[0] / "examples"), *TRAINING]
    invoke(*options(folder, "again", *examples))
    assert files(folder / "again") == files(whole[0])
    other = ["--set", f"draft.model={folder / 'another'}", "--set", "policy.name=constant"]
    with pytest.raises(UsageError, match="another draft"):
        invoke(*options(folder, "other", *examples, *other))


def test_a_share_of_the_targets_tokens_makes_no_sense(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "load_pair", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match="--mix is for draft models"):
        invoke(*collecting(folder, "mixed", "--mix", "0.2"))


def test_one_for_a_head_that_drafts_blocks(folder: Path) -> None:
    """No state follows the last token of its block, so no example does either."""
    shape = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8, qk_norm=True)
    head = random_block(block_size=5, layers=(0, 1), vocabulary=258, shape=shape, spread=0.2)
    write_head(folder / "block", head, Verifier("someone/target"))
    drafting = ["--set", f"draft.model={folder / 'block'}"]
    invoke(
        *collecting(folder, "on-blocks", "--signals", "--limit", "12", *drafting, "--set", f"draft.head={folder / 'x'}")
    )
    config = json.loads((folder / "on-blocks" / "config.json").read_text())
    assert (config["hidden_size"], config["reads_signals"]) == (16, True)
    trace = folder / "blocks.jsonl"
    more = [*drafting, "--set", f"draft.head={folder / 'on-blocks'}", "--trace", str(trace), "-n", "20", "--json"]
    invoke("generate", "-p", str(folder / "pair.toml"), "the moon", *more)
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    predicted = [step["accept_prob"] for round_ in rounds for step in round_["steps"][1:]]
    assert predicted
    assert all(0 < each < 1 for each in predicted)
