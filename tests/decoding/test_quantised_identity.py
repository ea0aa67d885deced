"""With a quantised target the text of every policy is that of the same quantised target alone."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import STOPPING, WITHOUT_FORESIGHT, generated, head_for, noisy_copy, random_head, random_model
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.loading.model import load_model
from specctl.models.loading.pair import load_pair
from specctl.models.running.eager import EagerRunner
from specctl.policies import POLICIES, Setting
from specctl.profile import resolve
from specctl.profile.schema import ModelTable
from specctl.records import Round

pytest.importorskip("torchao")

PROMPT = (1, 5, 9)
LENGTH = 32
OPENINGS = ("Once upon a time", "Tom has 3 red apples and buys", "The little dog was sad because")
HEAD = random_head(hidden_size=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    random_model("llama").save_pretrained(path)
    return path


@cache
def quantised(folder: Path, quantize: str) -> PreTrainedModel:
    return load_model(
        ModelTable(model=str(folder), device="cpu", dtype="float32", quantize=quantize), role="target"
    ).model


def rounds(target: PreTrainedModel, draft: PreTrainedModel, policy: str) -> list[Round]:
    runner = EagerRunner(target, 64)
    stopping = POLICIES[policy](**STOPPING.get(policy, {}))
    drafter = ModelDrafter(EagerRunner(draft, 64), stopping, head=head_for(stopping, HEAD))
    with torch.inference_mode():
        prefill(runner, drafter, PROMPT)
        return list(decode(runner, drafter, PROMPT, LENGTH, Sampling()))


@pytest.mark.parametrize("policy", WITHOUT_FORESIGHT)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_tokens_are_those_of_generate_on_the_quantised_target(folder: Path, quantize: str, policy: str) -> None:
    found = rounds(quantised(folder, quantize), noisy_copy("llama", 0.02), policy)

    expected = generated(quantised(folder, quantize), PROMPT, LENGTH)
    assert [token for round_ in found for token in round_.emitted] == expected


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_drafts_of_a_noisy_copy_are_accepted_and_rejected(folder: Path, quantize: str) -> None:
    found = rounds(quantised(folder, quantize), noisy_copy("llama", 0.02), "constant")

    assert any(round_.accepted for round_ in found)
    assert any(not round_.fully_accepted for round_ in found)


@pytest.mark.parametrize(
    "settings",
    [
        {"target.quantize": "int8"},
        {"target.quantize": "int8", "draft.quantize": "int8"},
        {"target.quantize": "int4", "target.dtype": "bfloat16", "deterministic": "true"},
    ],
    ids=["int8", "int8 pair", "int4 in bfloat16"],
)
def test_the_embedded_pair_writes_what_its_quantised_target_writes(settings: dict[str, Any]) -> None:
    profile = resolve("embedded", overrides=[f"{key}={value}" for key, value in settings.items()]).profile
    pair = load_pair(profile)
    sampling = profile.sampling.model_copy(update={"max_new_tokens": 40})
    rounds = []

    for opening in OPENINGS:
        prompt = pair.tokenizer.encode(opening)
        alone = Session(pair, None).generate(prompt, sampling)
        for policy in ("constant", "svip"):
            drafted = Session(pair, build_drafter(pair, Setting(policy))).generate(prompt, sampling)
            assert drafted.tokens == alone.tokens
            rounds += drafted.rounds

    assert any(round_.accepted for round_ in rounds)
    assert any(not round_.fully_accepted for round_ in rounds)
