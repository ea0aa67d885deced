"""Draft heads by onnxruntime in the loop: the law of the output, and greedy text."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from law_table import FEW, SAMPLINGS, Case, enumerate_decode, error, expected_law

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant
from specctl.records import ExtraToken, Round
from tests.support.onnx_heads import HEADS, KINDS, VOCABULARY, sure_head, torch_runner, verifier
from tests.support.onnx_models import needs_onnx, sure_runner
from tests.support.toy_heads import random_block, random_eagle3
from tests.support.toys import random_model

pytestmark = needs_onnx

EXACT = 3e-7
PROMPT = [5, 9, 2, 40, 33, 7, 12, 60]
LOOKED_AT, LIMIT = 3, 4
"""Tokens of the text whose law is enumerated, and all of its tokens."""
STANDING_ALONE = ("eagle3", "dflash", "dspark")
"""Heads without weights of their verifier: the model that other modules export will do."""
TOY = LayerShape(hidden_size=3, intermediate_size=6, heads=2, kv_heads=1, head_dim=8)


@cache
def toy_runner(kind: str) -> Slot:
    """Over the states of a `TableRunner`, which are its logits."""
    with torch.inference_mode(False):
        if kind == "eagle3":
            return sure_head(random_eagle3(states=3, vocabulary=3, shape=TOY), 3)
        return sure_head(random_block(vocabulary=3, tokens=[0, 2], markov="rnn", shape=TOY, seed=6), 3)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("eagle3", Case("constant", "T=1", {"draft_length": 2})),
        ("eagle3", Case("svip", FEW, {"c": 1.0, "threshold": 0.9, "keep_trigger": False})),
        ("dspark", Case("confidence", "T=1", {"threshold": 0.5})),
        ("dspark", Case("confidence", FEW, {"threshold": 0.5})),
    ],
    ids=str,
)
@pytest.mark.representatives(slow=("eagle3",))
def test_output_has_the_law_of_the_target(kind: str, case: Case) -> None:
    runner, sampling = toy_runner(kind), SAMPLINGS[case.sampling]

    def drafter() -> ModelDrafter:
        runner.rollback(0)
        return ModelDrafter(runner, case.policy())

    found = enumerate_decode(drafter, sampling, LOOKED_AT, LIMIT, layers=(0,))
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(sampling, LOOKED_AT)) < EXACT
    assert found.extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}


def play(target: Slot, drafter: ModelDrafter | None, prompt: Sequence[int]) -> list[Round]:
    target.rollback(0)
    if drafter is not None:
        drafter.rollback(0)
        target.watch(drafter.runner.layers)
    with torch.inference_mode():
        prefill(target, drafter, prompt)
        return list(decode(target, drafter, prompt, 60, Sampling()))


def text_of(rounds: Sequence[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.emitted]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives(slow=("eagle3",))
def test_greedy_text_is_the_targets_own_and_drafts_are_those_of_the_network(kind: str, prompt: list[int]) -> None:
    with torch.inference_mode(False):
        own = random_model("llama") if kind in STANDING_ALONE else verifier()
        target, head = sure_runner(own, VOCABULARY), HEADS[kind]()
        runners = sure_head(head), torch_runner(head)
    expected = text_of(play(target, None, prompt))
    mine, theirs = (play(target, ModelDrafter(runner, Constant(draft_length=3)), prompt) for runner in runners)
    assert text_of(mine) == expected
    assert sum(round_.accepted < round_.drafted for round_ in mine) > 3, "nothing was ever taken back"
    assert [[step.token for step in round_.steps] for round_ in mine] == [
        [step.token for step in round_.steps] for round_ in theirs
    ]
