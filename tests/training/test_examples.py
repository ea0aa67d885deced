import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from specctl.errors import UsageError
from specctl.training.predictor_examples import Example, ExampleFolder
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
