from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.files.checkpoint import files_hash, locate
from specctl.models.predictors.predictor_checkpoint import PredictorCheckpoint, mismatch
from specctl.profile import resolve
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite
from specctl.training.predictors import Predictors
from tests.support.checkpoints import llama_config, save_model
from tests.support.toy_heads import random_eagle3


def facts(*overrides: str) -> dict[str, Any]:
    return Predictors(resolve("embedded", overrides=overrides).profile).facts(Suite("suite", "0", ()))


def test_examples_of_quantised_models_are_others() -> None:
    """So that collecting is not continued with other weights, while earlier folders of plain models still can be."""
    plain = facts()
    assert not [key for key in plain if "quantize" in key]
    assert facts("target.quantize=int8") == plain | {"target_quantize": "int8"}
    assert facts("draft.quantize=int4") == plain | {"draft_quantize": "int4"}


@pytest.mark.parametrize("layout", ["safetensors", "pickle"])
def test_a_draft_head_is_known_by_its_weights(layout: str, tmp_path: Path) -> None:
    """However they are stored; an acceptance head on it is compared with the same file."""
    save_model(tmp_path / "target", llama_config())
    shape = LayerShape(hidden_size=12, intermediate_size=24, heads=2, kv_heads=1, head_dim=6)
    folder = tmp_path / "head"
    write_head(folder, random_eagle3(layers=(0, 1), states=16, vocabulary=258, shape=shape), Verifier("someone/target"))
    weights = folder / "model.safetensors"
    if layout == "pickle":
        weights = folder / "pytorch_model.bin"
        torch.save(load_file(folder / "model.safetensors"), weights)
        (folder / "model.safetensors").unlink()
    profile = Profile.model_validate({"target": {"model": str(tmp_path / "target")}, "draft": {"model": str(folder)}})
    found = Predictors(profile).facts(Suite("suite", "0", ()))
    assert found["draft_head"] == "eagle3"
    assert found["draft_sha256"] == files_hash([weights])
    assert profile.draft is not None
    draft = locate(profile.draft, "draft")
    assert mismatch(PredictorCheckpoint("a", tmp_path, {"draft_sha256": found["draft_sha256"]}), draft) is None
    assert mismatch(PredictorCheckpoint("a", tmp_path, {"draft_sha256": "0"}), draft) is not None


def test_so_is_one_in_its_targets_files() -> None:
    folder = Path(__file__).parents[1] / "data" / "draft_heads" / "mtp" / "qwen3_next"
    profile = Profile.model_validate({"target": {"model": str(folder)}, "draft": {"model": "target:mtp"}})
    found = Predictors(profile).facts(Suite("suite", "0", ()))
    assert found["draft_head"] == "mtp"
    assert found["draft_sha256"] == files_hash(locate(profile.target, "target").weight_files())
