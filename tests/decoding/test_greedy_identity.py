"""Greedy output equals transformers' own ``generate``, token for token, on real architectures with random weights."""

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES
from tests.support.toys import (
    FAMILIES,
    STOPPING,
    WINDOW,
    WITHOUT_FORESIGHT,
    generated,
    head_for,
    noisy_copy,
    random_model,
    random_predictor,
    seeded,
)

LENGTH = 4 * WINDOW
SHORT, LONG = (1, 5, 9), tuple(torch.randint(1, 64, (2 * WINDOW + 3,), generator=seeded(5)).tolist())
HEAD = random_predictor(hidden_size=32)


def drafts(family: str) -> dict[str, PreTrainedModel]:
    return {"smaller": random_model(family, layers=1, seed=1), "noisy copy": noisy_copy(family)}


# A policy reads numbers, whatever draft they come from: the draft that is hardly ever right is played with few.
@pytest.mark.parametrize(
    ("name", "draft"),
    [(name, "noisy copy") for name in WITHOUT_FORESIGHT] + [(name, "smaller") for name in ("constant", "svip")],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives(
    "llama",
    "qwen3-svip-noisy copy",
    "gpt-neox-cost-optimal",
    "gemma2-constant-noisy copy",
    "mistral-svip-noisy copy",
    slow=("constant", "cost-optimal-noisy copy"),
)
def test_tokens_are_those_of_generate(family: str, name: str, draft: str) -> None:
    target = Slot(EagerPasses(random_model(family), 64))
    policy = POLICIES[name](**STOPPING.get(name, {}))
    drafter = ModelDrafter(Slot(EagerPasses(drafts(family)[draft], 64)), policy, predictor=head_for(policy, HEAD))
    with torch.inference_mode():
        for prompt in (SHORT, LONG):
            target.rollback(0)
            drafter.rollback(0)
            prefill(target, drafter, prompt)
            rounds = list(decode(target, drafter, prompt, LENGTH, Sampling()))
            expected = generated(random_model(family), prompt, LENGTH)
            assert [token for round_ in rounds for token in round_.emitted] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_noisy_copy_is_sometimes_right_and_sometimes_wrong(family: str) -> None:
    """Or the identity above would not have gone through both acceptance and rollback."""
    drafter = ModelDrafter(Slot(EagerPasses(noisy_copy(family), 64)), POLICIES["constant"]())
    with torch.inference_mode():
        rounds = list(decode(Slot(EagerPasses(random_model(family), 64)), drafter, LONG, LENGTH, Sampling()))
    assert any(round_.fully_accepted for round_ in rounds)
    assert any(not round_.fully_accepted for round_ in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_drafting_for_itself_accepts_everything(family: str) -> None:
    model = random_model(family)
    drafter = ModelDrafter(Slot(EagerPasses(model, 64)), POLICIES["constant"]())
    with torch.inference_mode():
        rounds = list(decode(Slot(EagerPasses(model, 64)), drafter, LONG, LENGTH, Sampling()))
    assert all(round_.fully_accepted for round_ in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_generate_says_is_not_monotonous(family: str) -> None:
    assert len(set(generated(random_model(family), SHORT, LENGTH))) > 5
