"""Models of single characters: whatever times, warms up or tries passes takes ids that they know."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specctl.observing.results import read_results
from tests.support.checkpoints import llama_config
from tests.support.invoked import invoke

pytestmark = pytest.mark.slow

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."


def pair_of(folder: Path, tokens: int) -> tuple[Path, Path]:
    """A target and a draft whose tokens are an end of sequence and ``tokens - 1`` characters."""
    ids = {token: number for number, token in enumerate(["<eos>", *LETTERS[: tokens - 1]])}
    core = Tokenizer(models.WordLevel(ids, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    found = []
    for layers in (2, 1):
        path = folder / f"{layers}"
        AutoModelForCausalLM.from_config(llama_config(tokens, num_hidden_layers=layers)).save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(path)
        found.append(path)
    return found[0], found[1]


@pytest.fixture(scope="module", params=[pytest.param(64, marks=pytest.mark.exhaustive), 3])
def models_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    target, draft = pair_of(tmp_path_factory.mktemp("tiny"), request.param)
    return "--target", str(target), "--draft", str(draft)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abba", "baab", "bb", "ab")))
    return path


@pytest.mark.parametrize("engine", ["eager", "onnx"])
def test_they_can_be_benched(models_: tuple[str, ...], prompts: Path, engine: str, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    options = ("--policy", "constant", "--oracle", "--limit", 2, "-n", 6, "--engine", engine, "-q")
    invoke("bench", *models_, "-i", prompts, *options, "-o", output)
    assert len(read_results(output).runs) == 4


@pytest.mark.exhaustive
def test_they_can_be_calibrated(models_: tuple[str, ...], prompts: Path, tmp_path: Path) -> None:
    options = ("--policy", "svip", "-n", 6, "--engine", "eager", "--samples", 2, "-q", "-o", tmp_path / "fast.toml")
    invoke("calibrate", *models_, "-i", prompts, *options)


@pytest.mark.parametrize("setting", ["engine=static", "draft.tree=8"])
def test_they_can_generate(models_: tuple[str, ...], setting: str) -> None:
    engine = [] if "engine" in setting else ["--engine", "eager"]
    invoke("generate", *models_, *engine, "--set", setting, "-n", 8, "-q", "abba")


def test_doctor_can_run_them(models_: tuple[str, ...]) -> None:
    invoke("doctor", *models_, "--engine", "eager", "--run")
