"""`Decoder.generate_many` and `generate_as_finished`: the texts of one prompt at a time."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specctl
from specctl.errors import RecordError, UsageError
from tests.support.onnx_models import needs_onnx, small_pair

pytestmark = needs_onnx
PROMPTS: list[Any] = ["the th", {"prompt": "a", "max_new_tokens": 2}, "", {"prompt": "he said", "temperature": 1.0}]
PROMPTS += [{"prompt": "of the", "temperature": 1.0, "seed": 5}, {"prompt": "an", "top": 1}, "and then it was"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> specctl.Decoder:
    folder = tmp_path_factory.mktemp("pair")
    small_pair(folder)
    models = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    settings = ["engine=onnx", "sampling.max_new_tokens=8", "prompt.chat=false"]
    return specctl.load(**models, policy="constant", overrides=settings)


def told(found: Any) -> Any:
    return found.kind if isinstance(found, RecordError) else found.tokens


@pytest.fixture(scope="module")
def alone(pair: specctl.Decoder) -> list[Any]:
    return [told(found) for found in pair.generate_many(PROMPTS, batch=1)]


def test_one_at_a_time_they_are_what_generate_gives(pair: specctl.Decoder, alone: list[Any]) -> None:
    assert alone[0] == pair.generate("the th").tokens
    assert alone[1] == pair.generate("a", max_new_tokens=2).tokens
    assert (alone[2], alone[5]) == ("empty_prompt", "invalid_sampling")
    assert alone[3] == pair.generate("he said", temperature=1.0, seed=3).tokens, "the prompt's number is in its seed"
    assert alone[4] == pair.generate("of the", temperature=1.0, seed=5).tokens


@pytest.mark.parametrize("batch", [2, 5, "auto"])
def test_several_at_once_they_are_the_same(pair: specctl.Decoder, alone: list[Any], batch: Any) -> None:
    assert [told(found) for found in pair.generate_many(PROMPTS, batch=batch)] == alone
    assert [told(found) for found in pair.generate_many(iter(PROMPTS), batch=batch)] == alone
    finished = list(pair.generate_as_finished(PROMPTS, batch=batch))
    assert {number: told(found) for number, found in finished} == dict(enumerate(alone))


def test_a_short_text_does_not_wait_for_a_long_one(pair: specctl.Decoder) -> None:
    prompts = [{"prompt": "the th", "max_new_tokens": 8}, {"prompt": "a", "max_new_tokens": 1}]
    assert [number for number, _ in pair.generate_as_finished(prompts, batch=2)] == [1, 0]
    assert len(list(pair.generate_many(prompts, batch=2))) == 2


def test_prompts_are_taken_as_they_are_needed_and_closing_ends_all(pair: specctl.Decoder, alone: list[Any]) -> None:
    taken: list[int] = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(len(taken))
            yield "the th"

    texts, others = pair.generate_many(endless(), batch=2), pair.generate_many(PROMPTS, batch=2)
    assert told(next(texts)) == told(next(others)) == alone[0], "both at once have caches of their own"
    assert len(taken) <= 5
    texts.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled(), "the mode that the texts were in ends with them"
    assert [told(found) for found in others] == alone[1:]
    assert pair.generate("the th").tokens == alone[0]


@pytest.mark.parametrize("batch", [0, -1, "two", 1.5])
def test_what_is_no_number_of_texts(pair: specctl.Decoder, batch: Any) -> None:
    with pytest.raises(UsageError, match="batch must be a number from 1 on or 'auto', not"):
        pair.generate_many(["a"], batch=batch)


def test_a_prompt_of_another_type_is_an_error_of_the_program(pair: specctl.Decoder) -> None:
    with pytest.raises(TypeError, match="a prompt is a text"):
        list(pair.generate_many(["a", 5], batch=2))  # type: ignore[list-item]
