"""After any extends and rollbacks the logits are those of one forward pass over the same tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from tests.support.toys import FAMILIES, WINDOW, random_model, seeded

pytestmark = pytest.mark.usefixtures("inference_mode")

SLIDING = ("mistral", "gemma2")
VOCABULARY = 60  # the models have four more, as padding
TOKENS: list[int] = torch.randint(0, VOCABULARY, (200,), generator=seeded(9)).tolist()


def from_scratch(family: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return random_model(family)(torch.tensor([tokens]), use_cache=False).logits[0, :, :VOCABULARY]


def runner_of(family: str) -> Slot:
    return Slot(EagerPasses(random_model(family), VOCABULARY))


@pytest.mark.parametrize("family", FAMILIES)
@given(
    prompt=st.integers(1, 3 * WINDOW),
    rounds=st.lists(st.tuples(st.integers(1, WINDOW), st.integers(0, WINDOW)), min_size=1, max_size=8),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=12)
@pytest.mark.representatives("llama", "gemma2", "mistral")
def test_rounds_leave_no_trace(family: str, prompt: int, rounds: list[tuple[int, int]], seed: int) -> None:
    """A round extends by some tokens and takes back some of them, as speculative decoding does."""
    draws = seeded(seed)
    runner, text = runner_of(family), TOKENS[:prompt]
    runner.extend(text, keep=0)
    for width, back in rounds:
        block = torch.randint(0, VOCABULARY, (width,), generator=draws).tolist()
        with torch.inference_mode():
            logits = runner.extend(block, keep=width).logits
        torch.testing.assert_close(logits, from_scratch(family, text + block)[-width:], atol=1e-5, rtol=1e-5)
        text = text + block[: max(0, width - back)]
        runner.rollback(len(text))
        assert runner.length == len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_single_steps_taken_back_at_once(family: str) -> None:
    """A draft extends one token at a time and is rolled back once."""
    runner, text = runner_of(family), TOKENS[:20]
    runner.extend(text, keep=0)
    for kept in (0, 3, 5, 1):
        for token in (1, 2, 3, 4, 5):
            runner.extend([token], keep=1)
        text = text + [1, 2, 3, 4, 5][:kept]
        runner.rollback(len(text))
        last = runner.extend([7], keep=1).logits
        torch.testing.assert_close(last, from_scratch(family, [*text, 7])[-1:], atol=1e-5, rtol=1e-5)
        text = [*text, 7]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4, 25])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.representatives("1-25", "3-4")
def test_a_far_rollback(family: str, length: int, width: int) -> None:
    """Behind an earlier rollback: the cache may end up shorter than asked, but what follows must be right."""
    runner = runner_of(family)
    runner.extend(TOKENS[:30], keep=0)
    runner.rollback(28)
    runner.extend(TOKENS[28:33], keep=1)
    runner.rollback(length)
    text = TOKENS[:length] + TOKENS[50 : 50 + width]
    assert runner.length <= length
    logits = runner.extend(text[runner.length :], keep=width).logits
    torch.testing.assert_close(logits, from_scratch(family, text)[-width:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_starting_over(family: str) -> None:
    runner = runner_of(family)
    runner.extend(TOKENS[:30], keep=0)
    runner.rollback(0)
    assert runner.length == 0
    logits = runner.extend(TOKENS[50:60], keep=10).logits
    torch.testing.assert_close(logits, from_scratch(family, TOKENS[50:60]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 6, 100])
def test_a_rollback_to_more_than_is_cached_changes_nothing(length: int) -> None:
    runner = runner_of("llama")
    runner.rollback(length)
    assert runner.length == 0
    runner.extend(TOKENS[:5], keep=0)
    runner.rollback(length)
    assert runner.length == 5
    torch.testing.assert_close(runner.extend(TOKENS[5:6], keep=1).logits, from_scratch("llama", TOKENS[:6])[-1:])


@pytest.mark.parametrize(("given_tokens", "keep"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)])
def test_logits_and_hidden_states_of_the_last_tokens(given_tokens: int, keep: int) -> None:
    model, runner = random_model("llama"), runner_of("llama")
    runner.extend(TOKENS[:3], keep=0)
    found = runner.extend(TOKENS[3 : 3 + given_tokens], keep=keep, hidden=True)
    whole = model(torch.tensor([TOKENS[: 3 + given_tokens]]), output_hidden_states=True)
    assert len(found.logits) == keep
    if keep:
        torch.testing.assert_close(found.logits, whole.logits[0, -keep:, :VOCABULARY], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.hidden, whole.hidden_states[-1][0, -keep:], atol=1e-5, rtol=1e-5)
    assert runner.extend([1], keep=1).hidden is None


def test_what_a_runner_says_of_itself() -> None:
    runner = runner_of("llama")
    assert (runner.length, runner.context, runner.device) == (0, 256, torch.device("cpu"))


@pytest.mark.parametrize("family", SLIDING)
def test_the_window_is_felt(family: str) -> None:
    """Or none of the above would have tested it: a token outside the window of every layer changes nothing."""
    change = [TOKENS[0] + 1, *TOKENS[1:40]]
    far, near = from_scratch(family, TOKENS[:40]), from_scratch(family, change)
    assert not torch.allclose(far[WINDOW - 1], near[WINDOW - 1])
    if family == "mistral":  # gemma2 has layers without a window too
        torch.testing.assert_close(far[3 * WINDOW], near[3 * WINDOW])
