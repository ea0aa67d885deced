"""What onnxruntime computes is what torch computes, whatever was read and taken back before."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.onnx.graph import DeviceMemory
from specctl.models.onnx.passes import Opening
from specctl.models.passes.forward import Forward
from specctl.models.running.branches import continue_branches
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies.published import Constant, Svip
from tests.support.onnx_models import needs_onnx, sure_runner
from tests.support.toys import FAMILIES, generated, noisy_copy, random_model, seeded

pytestmark = [needs_onnx, pytest.mark.usefixtures("inference_mode")]
VOCABULARY = 60
TOKENS: list[int] = torch.randint(0, VOCABULARY, (256,), generator=seeded(3)).tolist()
CLOSE = {"atol": 5e-5, "rtol": 1e-4}


@cache
def model_of(family: str) -> PreTrainedModel:
    """A model that no other test puts hooks on."""
    return random_model.__wrapped__(family)


def same(found: Forward, expected: Forward) -> None:
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    assert (found.hidden is None) == (expected.hidden is None)
    if found.hidden is not None:
        torch.testing.assert_close(found.hidden, expected.hidden, **CLOSE)
    assert (found.states is None) == (expected.states is None)
    if found.states is not None and expected.states is not None:
        assert found.states.keys() == expected.states.keys()
        for layer, states in found.states.items():
            torch.testing.assert_close(torch.as_tensor(states), expected.states[layer], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", slow=("gemma2", "gpt-neox"))
@given(
    prompt=st.integers(1, 100),
    rounds=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.booleans()), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=8)
def test_rounds_leave_no_trace(family: str, prompt: int, rounds: list[tuple[int, int, bool]], seed: int) -> None:
    draws = seeded(seed)
    runner, plain = sure_runner(model_of(family), VOCABULARY), Slot(EagerPasses(random_model(family), VOCABULARY))
    text = TOKENS[:prompt]
    for each in (runner, plain):
        each.extend(text, keep=0)
    for width, back, hidden in rounds:
        block = torch.randint(0, VOCABULARY, (width,), generator=draws).tolist()
        keep = width // 2 if hidden else width
        same(*(each.extend(block, keep=keep, hidden=hidden) for each in (runner, plain)))
        text = [*text, *block][: max(1, runner.length - back)]
        for each in (runner, plain):
            each.rollback(len(text))
        if plain.length < len(text):  # layers with a window cannot always go back
            plain.extend(text[plain.length :], keep=0)
        assert runner.length == plain.length


def test_over_memory_of_torch_as_a_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Opening, "memory", property(lambda opening: DeviceMemory(opening.device)))
    runner, plain = sure_runner(model_of("llama"), VOCABULARY), Slot(EagerPasses(random_model("llama"), VOCABULARY))
    assert isinstance(runner.passes.memory, DeviceMemory)
    for start, end, keep in ((0, 20, 0), (20, 21, 1), (21, 27, 6), (27, 200, 2), (200, 202, 2)):
        with torch.inference_mode(start > 20):
            first = runner.extend(TOKENS[start:end], keep=keep, hidden=keep > 1)
            same(first, plain.extend(TOKENS[start:end], keep=keep, hidden=keep > 1))
    kept = first.logits.clone()
    runner.rollback(200)
    runner.extend(TOKENS[100:102], keep=2)
    assert torch.equal(first.logits, kept)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.representatives("llama", slow=("gemma2",))
def test_states_of_watched_layers(family: str) -> None:
    runner, plain = sure_runner(model_of(family), VOCABULARY), Slot(EagerPasses(random_model(family), VOCABULARY))
    assert runner.extend(TOKENS[:3], keep=1).states is None
    runner.rollback(0)
    for each in (runner, plain):
        each.watch([1])
        each.watch([-1, 0])
    for start, end, keep in ((0, 20, 0), (20, 21, 1), (21, 27, 6), (27, 33, 2)):
        same(*(each.extend(TOKENS[start:end], keep=keep, hidden=keep > 1) for each in (runner, plain)))
    with pytest.raises(IndexError, match="2 layers"):
        runner.watch([2])


def test_a_sequence_up_to_the_last_place_of_the_context_in_pieces() -> None:
    runner, plain = sure_runner(model_of("llama"), VOCABULARY), Slot(EagerPasses(random_model("llama"), VOCABULARY))
    assert runner.context == plain.context == 256
    for start, end in ((0, 3), (3, 250), (250, 256)):
        same(*(each.extend(TOKENS[start:end], keep=3, hidden=True) for each in (runner, plain)))
    runner.rollback(255)
    plain.rollback(255)
    same(*(each.extend(TOKENS[255:], keep=1) for each in (runner, plain)))


def test_buffers_double_and_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.onnx.passes.CAPACITY", 16)
    monkeypatch.setattr("specctl.models.onnx.passes.BOUND_WIDTH", 20)
    monkeypatch.setattr("specctl.models.onnx.passes.PIECE", 40)
    runner, plain = sure_runner(model_of("gemma2"), VOCABULARY), Slot(EagerPasses(random_model("gemma2"), VOCABULARY))
    for width in (10, 1, 6, 7, 30, 1, 100, 1):
        block = TOKENS[runner.length : runner.length + width]
        same(*(each.extend(block, keep=min(width, 60)) for each in (runner, plain)))


def test_results_stay_when_later_passes_run() -> None:
    runner = sure_runner(model_of("llama"), VOCABULARY)
    first = runner.extend(TOKENS[:6], keep=6, hidden=True)
    logits, hidden = first.logits, first.hidden
    assert hidden is not None
    before = logits.clone(), hidden.clone()
    runner.extend(TOKENS[6:12], keep=6, hidden=True)
    assert torch.equal(logits, before[0])
    assert torch.equal(hidden, before[1])


def test_blocks_of_one_shape_do_not_depend_on_how_they_were_cut() -> None:
    """Bit for bit, which `deterministic` promises."""
    whole = Slot(FixedWidthPasses(sure_runner(model_of("llama"), VOCABULARY), width=4))
    cut = Slot(FixedWidthPasses(sure_runner(model_of("llama"), VOCABULARY), width=4))
    for each in (whole, cut):
        each.extend(TOKENS[:9], keep=0)
    expected = whole.extend(TOKENS[9:20], keep=11).logits
    rows = []
    for token in TOKENS[9:20]:
        cut.extend([1, 2, 3], keep=3)
        cut.rollback(cut.length - 3)
        rows.append(cut.extend([token], keep=1).logits)
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.parametrize("keep", [0, 1])
def test_blocks_keep_the_states_of_every_pass(keep: int) -> None:
    """Passes of up to 64 tokens share a place in memory for each power of two."""
    runner, plain = sure_runner(model_of("llama"), VOCABULARY), Slot(EagerPasses(random_model("llama"), VOCABULARY))
    for each in (runner, plain):
        each.watch([0])
    blocks = Slot(FixedWidthPasses(runner))
    for prompt in range(25, 32):
        for each in (blocks, plain):
            each.rollback(0)
        blocks.extend(TOKENS[:3], keep=0) if keep else None
        plain.extend(TOKENS[:3], keep=0) if keep else None
        same(*(each.extend(TOKENS[each.length : prompt], keep=keep) for each in (blocks, plain)))


def test_branches_are_those_of_the_eager_engine() -> None:
    found: list[list[list[int]]] = []
    for runner in (sure_runner(model_of("llama"), VOCABULARY), Slot(EagerPasses(random_model("llama"), VOCABULARY))):
        chosen: list[list[int]] = []

        def choose(_: object, forward: Forward, chosen: list[list[int]] = chosen) -> list[int]:
            chosen.append(forward.logits.argmax(-1).tolist())
            return chosen[-1]

        runner.extend(TOKENS[:30], keep=0)
        continue_branches(runner, TOKENS[:30], [3, 10, 29], [1, 2, 3], 4, choose)
        found.append(chosen)
        assert runner.length == 29
    one_by_one, at_once = found
    assert [step for (step,) in one_by_one] == [step[branch] for branch in range(3) for step in at_once]


def test_another_runner_of_the_same_graph_has_a_cache_of_its_own() -> None:
    runner = sure_runner(model_of("llama"), VOCABULARY)
    runner.extend(TOKENS[:20], keep=0)
    other = runner.fresh()
    assert other.length == 0
    other.extend(TOKENS[30:60], keep=0)
    expected = Slot(EagerPasses(random_model("llama"), VOCABULARY))
    expected.extend(TOKENS[:20], keep=0)
    same(*(each.extend(TOKENS[20:24], keep=4) for each in (runner, expected)))


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
@pytest.mark.representatives("gemma2")
def test_greedy_tokens_beyond_a_sliding_window_are_those_of_generate(family: str) -> None:
    """The other families are among the engines of `tests/decoding/test_engines.py`."""
    prompt = TOKENS[:20]
    expected = generated(random_model(family), tuple(prompt), 40)
    target, draft = sure_runner(model_of(family), 64), Slot(EagerPasses(noisy_copy(family), 64))
    for policy in (Constant(draft_length=5), Svip(threshold=1.2)):
        drafter = ModelDrafter(draft, policy)
        for each in (target, draft):
            each.rollback(0)
        prefill(target, drafter, prompt)
        rounds = list(decode(target, drafter, prompt, 40, Sampling(), frozenset(), None))
        assert [token for round_ in rounds for token in round_.emitted] == expected
        assert any(round_.accepted < len(round_.steps) for round_ in rounds), "nothing was taken back"
