"""A DISCO head's arithmetic and its files."""

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specctl.errors import ModelError
from specctl.models.loading.assembly import load_pair
from specctl.models.predictors.disco_predictor import FEATURES, DiscoPredictor, disco_predictor_from
from specctl.models.predictors.predictor_checkpoint import (
    CONFIG,
    KIND,
    WEIGHTS,
    locate_predictor,
    save_predictor,
    save_weights,
)
from specctl.profile import resolve
from tests.support.toys import random_predictor


def weights(width: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = {"hidden.weight": (width, FEATURES), "hidden.bias": (width,), "output.weight": (1, width)}
    made = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {**made, "output.bias": torch.tensor([0.25])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_weights(tmp_path / "head", weights(), {KIND: "disco", "draft_model": "some/draft"}, "# A card\n")
    return tmp_path / "head"


def test_two_layers_worked_out_by_hand() -> None:
    first = (2.0, *[0.0] * 9, -1.0, 0.5)
    head = DiscoPredictor((first, (0.0,) * FEATURES), (0.25, -1.0), (2.0, 5.0), -1.0)
    tops = [0.75, 0.25, *[0.0] * 8]
    # relu(2 * 0.75 - 0.5 + 0.5 * 2 + 0.25) = 2.25, relu(-1) = 0: the logit is 2 * 2.25 - 1.
    assert head.own_accept_prob(tops, 0.5, 2) == pytest.approx(1 / (1 + exp(-3.5)))
    assert head.own_accept_prob(tops, 900.0, 2) == pytest.approx(1 / (1 + exp(1)))
    far = DiscoPredictor((first,), (0.0,), (1e9,), 0.0)
    assert far.own_accept_prob(tops, 0.0, 1) == pytest.approx(1.0)


def test_a_saved_head_computes_what_torch_does(folder: Path) -> None:
    checkpoint = locate_predictor(str(folder))
    assert checkpoint.kind == "disco"
    head = checkpoint.load(hidden_size=99)  # it reads no hidden state
    assert isinstance(head, DiscoPredictor)
    made = weights()
    for seed in range(5):
        tops = torch.rand(10, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
        features = torch.cat([tops, torch.tensor([1.5, 4.0])])
        inner = torch.relu(made["hidden.weight"] @ features + made["hidden.bias"])
        expected = (made["output.weight"][0] @ inner + made["output.bias"][0]).sigmoid()
        assert head.own_accept_prob(tops.tolist(), 1.5, 4) == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"hidden.weight": torch.ones(3, 5)}, r"hidden\.weight \[3, 5\]"),
        ({"output.weight": torch.ones(2, 3)}, r"output\.weight \[2, 3\]"),
        ({"more": torch.ones(1)}, r"more \[1\]"),
        ({"output.bias": None}, r"output\.bias \[\]"),
    ],
)
def test_weights_of_something_else_are_refused(change: dict[str, Any], first: str) -> None:
    found = {name: weight for name, weight in {**weights(), **change}.items() if weight is not None}
    with pytest.raises(ModelError, match=f"not those of a DISCO head .first: {first}"):
        disco_predictor_from(found)


def test_a_torn_file_and_another_heads_weights_are_named(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(ModelError, match="is damaged"):
        locate_predictor(str(folder)).load(16)
    save_file({"output.weight": torch.ones(1, 4), "output.bias": torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="not those of a DISCO head"):
        locate_predictor(str(folder)).load(16)
    save_file({**weights(), "output.bias": torch.tensor([torch.nan])}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="NaN"):
        locate_predictor(str(folder)).load(16)


def test_a_kind_from_the_future_is_an_error(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, KIND: "oracle"}))
    with pytest.raises(ModelError, match="of the kind 'oracle'; this specctl knows "):
        locate_predictor(str(folder))


def test_a_head_says_its_kind_and_a_published_one_reads_states(tmp_path: Path) -> None:
    save_predictor(tmp_path, random_predictor(4), {"draft_model": "m"}, "# Card\n")
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config.pop(KIND) == locate_predictor(str(tmp_path)).kind == "specdec++"
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ModelError, match="of the kind None"):
        locate_predictor(str(tmp_path))
    (tmp_path / CONFIG).write_text(json.dumps({"num_layers": 1, KIND: "of its publisher's own"}))
    assert locate_predictor(str(tmp_path)).kind == "specdec++"


@pytest.mark.parametrize(
    ("policy", "head", "wanted"), [("disco", "draft-head", "disco"), ("specdec++", "disco-head", "specdec")]
)
def test_a_policy_with_a_head_of_the_other_kind_is_told_before_a_model_is_loaded(
    policy: str, head: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.models.loading.assembly.load_found", lambda *_: pytest.fail("a model was loaded"))
    profile = resolve("embedded", overrides=[f"policy.name={policy}", f"draft.head=embedded:{head}"]).profile
    with pytest.raises(ModelError, match=f"reads one of the kind {wanted}") as found:
        load_pair(profile)
    assert f"specctl train-head --kind {policy}" in found.value.hint
