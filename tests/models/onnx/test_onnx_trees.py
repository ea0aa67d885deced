"""A graph that was made for trees says of each token what torch says, and keeps the path that it is told."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedModel

from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import WIDEST, path_to
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from tests.support.onnx_models import needs_onnx, small_config, sure_runner
from tests.support.toys import random_model, seeded

pytestmark = [needs_onnx, pytest.mark.usefixtures("inference_mode")]
VOCABULARY = 60
TOKENS: list[int] = torch.randint(0, VOCABULARY, (256,), generator=seeded(3)).tolist()
WIDE_HEADS = "llama, rotated by onnxruntime"
FAMILIES = ("llama", "qwen3", "gpt-neox", WIDE_HEADS)
LAYERS = {"gpt-neox": 1}
"""Exports take most of the time; two layers of one family show whether each has its own memory."""


@cache
def model_of(family: str) -> PreTrainedModel:
    """A model that no other test puts hooks on."""
    if family != WIDE_HEADS:
        model: PreTrainedModel = random_model.__wrapped__(family, LAYERS.get(family, 2))
        return model
    # onnxruntime rotates heads of 16 and more by tables, at the positions that it is given.
    with torch.inference_mode(False), torch.no_grad():
        wide = LlamaForCausalLM(small_config()).eval()
        for number, weight in enumerate(wide.parameters()):
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=seeded(number)))
    return wide


@cache
def plain_copy(family: str) -> PreTrainedModel:
    return deepcopy(model_of(family))


def same(found: Forward, expected: Forward) -> None:
    torch.testing.assert_close(found.logits, expected.logits, atol=5e-5, rtol=1e-4)
    assert (found.states is None) == (expected.states is None)
    if found.states is not None and expected.states is not None:
        assert found.states.keys() == expected.states.keys()
        for layer, states in found.states.items():
            torch.testing.assert_close(torch.as_tensor(states), expected.states[layer], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives(WIDE_HEADS, slow=("llama",))
@given(
    prompt=st.integers(1, 100),
    rounds=st.lists(st.lists(st.floats(0, 0.999), min_size=1, max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=8)
def test_trees_and_paths_are_torchs_own(family: str, prompt: int, rounds: list[list[float]], seed: int) -> None:
    draws = seeded(seed)
    runner, plain = (
        sure_runner(model_of(family), VOCABULARY, trees=True),
        Slot(EagerPasses(plain_copy(family), VOCABULARY)),
    )
    assert runner.no_trees is None
    for each in (runner, plain):
        each.watch([-1, 0])
        each.extend(TOKENS[:prompt], keep=0)
    for shares in rounds:
        parents = [int(share * (token + 1)) for token, share in enumerate(shares)]
        tokens = torch.randint(0, VOCABULARY, (len(parents) + 1,), generator=draws).tolist()
        same(*(each.extend_tree(tokens, parents) for each in (runner, plain)))
        for each in (runner, plain):
            each.keep_path(path_to(parents, len(parents)))
        assert runner.length == plain.length
        same(*(each.extend([5, 9, 3], keep=3) for each in (runner, plain)))
        for each in (runner, plain):
            each.rollback(each.length - 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives(WIDE_HEADS)
def test_a_tree_that_grows_is_torchs_own(family: str) -> None:
    runner, plain = (
        sure_runner(model_of(family), VOCABULARY, trees=True),
        Slot(EagerPasses(plain_copy(family), VOCABULARY)),
    )
    for each in (runner, plain):
        each.extend(TOKENS[:20], keep=0)
    levels = [([7, 3, 9], [0, 0, 0]), ([1, 5, 8], [1, 1, 3]), ([2, 4], [6, 4])]
    before = 1
    for tokens, parents in levels:
        found, expected = (each.extend_tree(tokens, parents, before=before, hidden=True) for each in (runner, plain))
        same(found, expected)
        torch.testing.assert_close(found.hidden, expected.hidden, atol=5e-5, rtol=1e-4)
        before += len(tokens)
    for each in (runner, plain):
        each.keep_path([0, 3, 6, 7])
    assert runner.length == plain.length == 23
    same(*(each.extend([5, 9, 3], keep=3) for each in (runner, plain)))


@pytest.mark.slow
def test_the_widest_tree_where_buffers_have_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.onnx.passes.CAPACITY", 16)
    runner, plain = (
        sure_runner(model_of("qwen3"), VOCABULARY, trees=True),
        Slot(EagerPasses(random_model("qwen3"), VOCABULARY)),
    )
    for each in (runner, plain):
        each.extend(TOKENS[:10], keep=0)
    parents = [token // 2 for token in range(WIDEST - 1)]
    same(*(each.extend_tree(TOKENS[20 : 20 + WIDEST], parents) for each in (runner, plain)))


@pytest.mark.parametrize("family", ["qwen3", WIDE_HEADS])
@pytest.mark.representatives(WIDE_HEADS)
def test_a_wide_tree_at_the_end_of_the_context(family: str) -> None:
    runner = sure_runner(model_of(family), VOCABULARY, trees=True)
    plain = Slot(EagerPasses(plain_copy(family), VOCABULARY))
    for each in (runner, plain):
        each.extend((TOKENS * (each.context // 256))[: each.context - 2], keep=0)
    parents = [0] * (WIDEST - 1)
    same(*(each.extend_tree(TOKENS[:WIDEST], parents) for each in (runner, plain)))
    for each in (runner, plain):
        each.keep_path([0, WIDEST - 1])
    assert runner.length == runner.context


@pytest.mark.slow
def test_graphs_that_read_chains_say_why() -> None:
    assert sure_runner(model_of("llama"), VOCABULARY).no_trees == "its onnx graph was made for chains"
    assert "sliding window" in str(sure_runner(model_of("gemma2"), VOCABULARY, trees=True).no_trees)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_graphs_read_chains(quantize: str) -> None:
    runner = sure_runner(model_of("llama"), VOCABULARY, quantize=quantize, trees=True)
    assert f"for the branches of a tree where weights are {quantize}" in str(runner.no_trees)


def test_text_drafted_in_trees_is_the_targets_own() -> None:
    prompt = TOKENS[:19]
    target = sure_runner(model_of(WIDE_HEADS), VOCABULARY, trees=True)
    noisy = deepcopy(plain_copy(WIDE_HEADS))
    with torch.no_grad():
        noisy.lm_head.weight += 0.1 * torch.randn(noisy.lm_head.weight.shape, generator=seeded(1))
    drafter = TreeDrafter(Slot(EagerPasses(noisy, VOCABULARY)), Constant(4), TreeSize(12, 3))
    prefill(target, drafter, prompt)
    rounds = list(decode(target, drafter, prompt, 60, Sampling()))
    alone = list(decode(Slot(EagerPasses(plain_copy(WIDE_HEADS), VOCABULARY)), None, prompt, 60, Sampling()))
    assert [token for one in rounds for token in one.emitted] == [token for one in alone for token in one.emitted]
    assert any(one.nodes > one.drafted for one in rounds)
