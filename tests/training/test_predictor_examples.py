"""Sequences are read in groups that are no wider than memory is meant to be."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.errors import UsageError
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.files.checkpoint import files_hash, locate
from specctl.models.predictors.predictor_checkpoint import PredictorCheckpoint, mismatch
from specctl.profile import resolve
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite
from specctl.training import predictor_examples
from specctl.training.predictor_examples import Example, ExampleFolder
from specctl.training.predictors import Predictors
from tests.support.checkpoints import llama_config, save_model
from tests.support.toy_heads import random_eagle3
from tests.support.toys import seeded


def example(number: int, prompt: int = 3, answer: int = 5) -> Example:
    generator = seeded(number)
    ids = [torch.randint(60, (size,), generator=generator, dtype=torch.int32) for size in (prompt, answer, answer)]
    return Example(number, *ids, *torch.rand(4, answer, generator=generator))


def filled(path: Path, prompts: int, per_shard: int = 4) -> ExampleFolder:
    folder = ExampleFolder.create(path, {"draft": "d"}, prompts)
    for first in range(0, prompts, per_shard):
        numbers = range(first, min(first + per_shard, prompts))
        made = [example(n, prompt=n + 1, answer=n % 3 + 1) for n in numbers]
        folder.add(folder.content(made), len(numbers), {}, 0.5)
    return folder


def test_examples_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path / "data", 11)
    folder = ExampleFolder.open(tmp_path / "data")
    assert (folder.done, folder.prompts, folder.facts, folder.seconds) == (11, 11, {"draft": "d"}, 1.5)
    split = folder.split()
    assert [found.number for found in split.dev] == [9]
    assert [found.number for found in split.train] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
    for found in (*split.train, *split.dev):
        expected = example(found.number, prompt=found.number + 1, answer=found.number % 3 + 1)
        for name in ("prompt", "answer", "proposals", "acceptance", "entropy", "top_prob", "token_prob"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_draft_heads_states_come_back_with_its_tokens(tmp_path: Path, dtype: torch.dtype) -> None:
    """Which may be fewer than those of the answer."""
    folder = ExampleFolder.create(tmp_path, {}, 4)
    made = [
        replace(example(number, answer=number + 1), answer=torch.zeros(9, dtype=torch.int32), hidden=states)
        for number in range(4)
        for states in [torch.randn(number + 1, 6, generator=seeded(number)).to(dtype)]
    ]
    folder.add(folder.content(made[:2]), 2, {}, 0.1)
    folder.add(folder.content(made[2:]), 2, {}, 0.1)
    split = ExampleFolder.open(tmp_path).split()
    for found, expected in zip([*split.train, *split.dev], made, strict=True):
        for one in fields(Example)[1:]:
            if one.name not in ("top_probs", "index"):
                assert torch.equal(getattr(found, one.name), getattr(expected, one.name)), one.name
        assert found.hidden is not None
        assert found.hidden.dtype == dtype


def test_what_disco_reads_comes_back_with_the_tokens(tmp_path: Path) -> None:
    folder = ExampleFolder.create(tmp_path, {}, 3)
    made = [
        replace(
            example(number, answer=number + 2),
            answer=torch.zeros(9, dtype=torch.int32),
            top_probs=torch.rand(number + 2, 10, generator=seeded(number)),
            index=torch.arange(1, number + 3, dtype=torch.int32),
        )
        for number in range(3)
    ]
    folder.add(folder.content(made), 3, {}, 0.1)
    split = ExampleFolder.open(tmp_path).split()
    for found, expected in zip([*split.train, *split.dev], made, strict=True):
        assert found.hidden is None
        for name in ("proposals", "acceptance", "entropy", "top_probs", "index"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_few_prompts_give_up_their_last(tmp_path: Path) -> None:
    assert [found.number for found in filled(tmp_path, 3).split().dev] == [2]


def test_a_prompt_that_was_left_out_counts_as_done(tmp_path: Path) -> None:
    folder = ExampleFolder.create(tmp_path, {}, 3)
    folder.add(folder.content([example(0), example(2)]), 3, {"b": "too long"}, 0.1)
    assert folder.done == 3
    assert ExampleFolder.open(tmp_path).left_out == {"b": "too long"}


def test_data_that_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no training data"):
        ExampleFolder.open(tmp_path)
    with pytest.raises(UsageError, match="0 of 5 prompts"):
        ExampleFolder.create(tmp_path / "new", {}, 5).split()
    with pytest.raises(UsageError, match="too few answers"):
        filled(tmp_path / "one", 1).split()
    folder = filled(tmp_path / "torn", 11)
    shard = tmp_path / "torn" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UsageError, match=r"shard-00001\.safetensors is damaged"):
        folder.split()
    index = tmp_path / "torn" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "schema_version": 9}))
    with pytest.raises(UsageError, match="schema_version 9; this specctl reads 1"):
        ExampleFolder.open(tmp_path / "torn")


def test_groups_are_of_similar_length_and_at_most_the_limit_when_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_examples, "TOKENS_AT_ONCE", 12)
    assert predictor_examples._groups([4, 6, 4, 4]) == [[1, 0], [2, 3]]
    assert predictor_examples._groups([6, 6, 1]) == [[0, 1], [2]]
    assert predictor_examples._groups([40, 1, 1]) == [[0], [1, 2]]
    assert predictor_examples._groups([]) == []


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
