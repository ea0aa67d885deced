"""A head's arithmetic, its files, and the layout of the published ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_shared
from torch import nn

from specctl.errors import ModelError
from specctl.models.files.checkpoint import files_hash
from specctl.models.loading.assembly import load_pair
from specctl.models.predictors.predictor_checkpoint import CONFIG, WEIGHTS, locate_predictor, save_predictor
from specctl.models.predictors.state_predictor import StatePredictor, predictor_from, predictor_from_published
from specctl.profile.schema import Profile
from tests.support.checkpoints import llama_config, save_model
from tests.support.toys import random_predictor

WIDTH = 16


class PublishedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + nn.functional.silu(self.linear(state))


class PublishedHead(nn.Module):
    """As SpecDec++ released it: one block, repeated, and two classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.model = nn.Sequential(*([PublishedBlock(width)] * depth), nn.Linear(width, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_predictor(
        tmp_path / "head", random_predictor(WIDTH, reads_signals=False), {"draft_model": "some/draft"}, "# A card\n"
    )
    return tmp_path / "head"


def test_one_block_worked_out_by_hand() -> None:
    head = StatePredictor(2, depth=1)
    with torch.no_grad():
        head.blocks[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        head.blocks[0].bias.copy_(torch.tensor([0.0, -2.0]))
        head.output.weight.copy_(torch.tensor([[1.0, 3.0]]))
        head.output.bias.fill_(0.5)
    # silu(1) = 0.731059, silu(0) = 0: the state (1, 1) becomes (1.731059, 1).
    logit = head(torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16))
    assert logit.dtype == torch.float32
    assert logit.tolist() == pytest.approx([1.731059 + 3 + 0.5], abs=1e-5)
    assert head.accept_prob(torch.tensor([1.0, 1.0])).item() == pytest.approx(0.994681, abs=1e-5)


def test_signals_are_read_by_the_last_layer() -> None:
    head = random_predictor(4, depth=2)
    hidden, signals = torch.ones(4), torch.tensor([0.5, 0.25, 0.125])
    with torch.inference_mode():
        moved = head(hidden, signals) - head(hidden, torch.zeros(3))
        assert moved.item() == pytest.approx(float(head.output.weight[0, 4:] @ signals), abs=1e-5)


def test_an_untrained_block_is_the_identity() -> None:
    torch.manual_seed(0)
    head = StatePredictor(WIDTH, depth=3)
    hidden = torch.randn(5, WIDTH)
    assert torch.equal(head(hidden), head.output(hidden)[:, 0])


@pytest.mark.parametrize("reads_signals", [False, True])
def test_a_saved_head_comes_back(tmp_path: Path, reads_signals: bool) -> None:
    head = random_predictor(WIDTH, depth=2, reads_signals=reads_signals)
    save_predictor(tmp_path, head, {"draft_model": "m"}, "# Card\n")
    loaded = locate_predictor(str(tmp_path)).load(WIDTH)
    assert (loaded.depth, loaded.hidden_size, loaded.reads_signals) == (2, WIDTH, reads_signals)
    hidden, signals = torch.randn(7, WIDTH), torch.rand(7, 3)
    assert torch.equal(head(hidden, signals), loaded(hidden, signals))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["schema_version"], config["depth"], config["hidden_size"]) == (1, 2, WIDTH)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["stored once", "stored D times"])
def test_the_published_layout_becomes_one_logit(tmp_path: Path, depth: int, shared: bool) -> None:
    torch.manual_seed(1)
    published = PublishedHead(WIDTH, depth)
    path = tmp_path / "model.safetensors"
    if shared:
        save_shared(published, str(path))
    else:
        save_file({name: weight.clone() for name, weight in published.state_dict().items()}, path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": WIDTH, "num_layers": depth}))
    head = locate_predictor(str(tmp_path)).load(WIDTH)
    assert head.depth == depth
    hidden = torch.randn(50, WIDTH)
    torch.testing.assert_close(head.accept_prob(hidden), published.model(hidden).softmax(-1)[:, 1])


def test_weights_of_something_else_are_refused() -> None:
    with pytest.raises(ModelError, match="not those of an acceptance head"):
        predictor_from({"lm_head.weight": torch.ones(2, 2)})
    linear = {"output.weight": torch.ones(1, 4), "output.bias": torch.ones(1)}
    assert predictor_from(linear).depth == 0
    with pytest.raises(ModelError, match="not those of an acceptance head"):
        predictor_from({**linear, "blocks.1.weight": torch.ones(4, 4)})
    with pytest.raises(ModelError, match="SpecDec"):
        predictor_from_published({"model.0.weight": torch.ones(3, 4), "model.0.bias": torch.ones(3)}, 0)


def broken(folder: Path, how: str) -> None:
    match how:
        case "no weights":
            (folder / WEIGHTS).unlink()
        case "cut short":
            (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-10])
        case "other weights":
            save_file({"lm_head.weight": torch.ones(2, 2)}, folder / WEIGHTS)
        case "not numbers":
            weights = load_file(folder / WEIGHTS)
            next(iter(weights.values())).view(-1)[0] = torch.nan
            save_file(weights, folder / WEIGHTS)
        case "integers":
            save_file({name: weight.long() for name, weight in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
        case "no config":
            (folder / CONFIG).unlink()
        case "torn config":
            (folder / CONFIG).write_text('{"schema_version": 1,')
        case "another version":
            (folder / CONFIG).write_text('{"schema_version": 2}')
        case "gone":
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no weights", "there is no head.safetensors"),
        ("cut short", "head.safetensors is damaged"),
        ("other weights", "not those of an acceptance head"),
        ("not numbers", "are not numbers .NaN"),
        ("integers", "of dtype torch.int64"),
        ("no config", "no config.json"),
        ("torn config", "damaged config.json"),
        ("another version", "has schema_version 2; this specctl reads 1"),
        ("gone", "there is no such folder"),
    ],
)
def test_a_damaged_head_is_told_in_one_message(folder: Path, how: str, message: str) -> None:
    broken(folder, how)
    with pytest.raises(ModelError, match=message) as caught:
        locate_predictor(str(folder)).load(WIDTH)
    assert caught.value.hint
    assert caught.value.exit_code == 3


def test_a_head_of_another_width_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"of 16 numbers; the draft's have 32") as caught:
        locate_predictor(str(folder)).load(32)
    assert "some/draft" in caught.value.hint


def test_large_files_are_hashed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.files.checkpoint._WHOLE", 1000)
    monkeypatch.setattr("specctl.models.files.checkpoint._SAMPLE", 10)
    path = tmp_path / "weights"
    found = set()
    for changed in (None, 0, 4999):
        content = bytearray(5000)
        if changed is not None:
            content[changed] = 1
        path.write_bytes(content)
        found.add(files_hash([path]))
    path.write_bytes(bytes(5001))
    found.add(files_hash([path]))
    assert len(found) == 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    save_model(folder / "draft", llama_config(num_hidden_layers=1))
    return folder


def profile(models: Path, head: Path) -> Profile:
    draft = {"model": str(models / "draft"), "device": "cpu", "head": str(head)}
    return Profile.model_validate({"target": {"model": str(models / "target"), "device": "cpu"}, "draft": draft})


def test_a_head_comes_with_the_pair_if_wanted(models: Path, folder: Path) -> None:
    pair = load_pair(profile(models, folder))
    assert pair.predictor is not None
    assert pair.predictor.hidden_size == WIDTH
    assert load_pair(profile(models, folder), with_predictors=False).predictor is None
    assert load_pair(profile(models, folder), drafts=[]).predictor is None


def test_a_head_of_another_draft_is_refused_or_warned_about(models: Path, tmp_path: Path) -> None:
    right = files_hash([models / "draft" / "model.safetensors"])
    wrong = files_hash([models / "target" / "model.safetensors"])
    for sha256 in (right, wrong):
        save_predictor(
            tmp_path / sha256, random_predictor(WIDTH), {"draft_model": "old/draft", "draft_sha256": sha256}, ""
        )
    assert load_pair(profile(models, tmp_path / right)).predictor is not None
    with pytest.raises(ModelError, match=r"trained on other weights.*old/draft"):
        load_pair(profile(models, tmp_path / wrong))
    heard: list[str] = []
    assert load_pair(profile(models, tmp_path / wrong), on_foreign_predictor=heard.append).predictor is not None
    assert len(heard) == 1
    assert "old/draft" in heard[0]
