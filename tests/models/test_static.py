"""Every engine says what one forward pass over the same tokens says, whatever was extended and taken back before."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BloomConfig, OPTConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specctl.decoding.draws import uniforms
from specctl.decoding.logits.token_sampler import TokenSampler, packed_signals
from specctl.decoding.sampling import Sampling
from specctl.models.passes.fixed_buffers import PIECE, SHORTEST, span_class
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import WIDTHS, GraphPasses, width_class
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses, obstacle
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies import DISTRIBUTION_SIGNALS
from tests.support.toys import FAMILIES, Replays, random_model, random_predictor, seeded

pytestmark = pytest.mark.usefixtures("inference_mode")

VOCABULARY = 60  # the models have four more, as padding
TOKENS: list[int] = torch.randint(0, VOCABULARY, (256,), generator=seeded(9)).tolist()
PLAIN = ("llama", "qwen3", "gpt-neox")


ENGINES: dict[str, Callable[[PreTrainedModel], Slot]] = {
    "static": lambda model: Slot(StaticPasses(model, VOCABULARY, capacity=8)),
    "graph": lambda model: Slot(GraphPasses(model, VOCABULARY, Replays())),
    "fixed width over eager": lambda model: Slot(FixedWidthPasses(Slot(EagerPasses(model, VOCABULARY)), width=4)),
    "fixed width over static": lambda model: Slot(FixedWidthPasses(Slot(StaticPasses(model, VOCABULARY)), width=4)),
    "fixed width over graph": lambda model: Slot(
        FixedWidthPasses(Slot(GraphPasses(model, VOCABULARY, Replays())), width=4)
    ),
}


def from_scratch(family: str, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return random_model(family)(torch.tensor([tokens]), use_cache=False).logits[0, :, :VOCABULARY]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.representatives("llama-static", "llama-graph", "llama-fixed width over static", "qwen3-graph")
@given(
    prompt=st.integers(1, 100),
    rounds=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=6),
    seed=st.integers(0, 100),
)
@settings(deadline=None, derandomize=True, max_examples=8)
def test_rounds_leave_no_trace(engine: str, family: str, prompt: int, rounds: list[tuple[int, int]], seed: int) -> None:
    draws = seeded(seed)
    runner, text = ENGINES[engine](random_model(family)), TOKENS[:prompt]
    runner.extend(text, keep=0)
    for width, back in rounds:
        block = torch.randint(0, VOCABULARY, (width,), generator=draws).tolist()
        logits = runner.extend(block, keep=width).logits
        torch.testing.assert_close(logits, from_scratch(family, text + block)[-width:], atol=5e-5, rtol=1e-4)
        text = text + block[: max(0, width - back)]
        runner.rollback(len(text))
        assert runner.length == len(text)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sequence_up_to_the_last_place_of_the_context(engine: str) -> None:
    runner = ENGINES[engine](random_model("llama"))
    assert runner.context == 256
    whole = from_scratch("llama", TOKENS)
    runner.extend(TOKENS[:250], keep=0)
    torch.testing.assert_close(runner.extend(TOKENS[250:], keep=6).logits, whole[-6:], atol=5e-5, rtol=1e-4)
    runner.rollback(255)
    torch.testing.assert_close(runner.extend(TOKENS[255:], keep=1).logits, whole[-1:], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("given_tokens", "keep"), [(1, 0), (1, 1), (6, 0), (6, 1), (6, 6), (90, 3), (90, 90)])
@pytest.mark.representatives("6-1", "90-3")
def test_logits_and_hidden_states_of_the_last_tokens(engine: str, given_tokens: int, keep: int) -> None:
    model = random_model("llama")
    runner = ENGINES[engine](model)
    runner.extend(TOKENS[:3], keep=0)
    found = runner.extend(TOKENS[3 : 3 + given_tokens], keep=keep, hidden=True)
    whole = model(torch.tensor([TOKENS[: 3 + given_tokens]]), output_hidden_states=True)
    assert found.logits.shape == (keep, VOCABULARY)
    if keep:
        torch.testing.assert_close(found.logits, whole.logits[0, -keep:, :VOCABULARY], atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found.hidden, whole.hidden_states[-1][0, -keep:], atol=5e-5, rtol=1e-4)
    assert runner.extend([1], keep=1).hidden is None


@pytest.mark.parametrize("keep", [1, PIECE, PIECE + 30])
def test_a_prompt_of_several_pieces(keep: int) -> None:
    model = random_model("gpt-neox")
    runner = Slot(StaticPasses(model, VOCABULARY))
    tokens = [7 * place % VOCABULARY for place in range(PIECE + 40)]
    found = runner.extend(tokens, keep=keep, hidden=True)
    whole = model(torch.tensor([tokens]), output_hidden_states=True)
    torch.testing.assert_close(found.logits, whole.logits[0, -keep:, :VOCABULARY], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.hidden, whole.hidden_states[-1][0, -keep:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ["static", "graph"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "head",
    [None, random_predictor(32, reads_signals=False), random_predictor(32)],
    ids=["no head", "a head", "a head that reads signals"],
)
def test_the_last_token_read_in_the_pass_is_the_one_read_after_it(
    engine: str, sampling: Sampling, head: StatePredictor | None
) -> None:
    model = random_model("llama")
    fused, plain = ENGINES[engine](model), Slot(EagerPasses(model, VOCABULARY))
    read = TokenSampler(sampling, frozenset(DISTRIBUTION_SIGNALS), head)
    previous = torch.tensor([1.5, 0.4, 0.3], dtype=torch.float64)
    for runner in (fused, plain):
        runner.extend(TOKENS[:10], keep=0)
    kept = []
    ends = [10, 11, 12, 14, 15, 18, 26]
    for start, end in pairwise(ends):
        tokens = TOKENS[start:end]
        noise = None if sampling.greedy else uniforms((), plain.device, seeded(start))
        values, probs = fused.sample(tokens, read, None if noise is None else noise.item(), previous)  # type: ignore[attr-defined]
        step = plain.extend(tokens, keep=1, hidden=True)
        assert step.hidden is not None
        found, expected = read(step.logits[0], noise, step.hidden[0], previous)
        previous = packed_signals(found)
        torch.testing.assert_close(values, found, atol=5e-5, rtol=1e-4)
        assert (probs is None) == sampling.greedy
        kept.append((probs, expected))
    for probs, expected in kept:  # a later step must not have written over an earlier one's distribution
        torch.testing.assert_close(probs, expected, atol=5e-5, rtol=1e-4)


def test_addresses_stay_while_a_sequence_fits() -> None:
    runner = Slot(StaticPasses(random_model("llama"), VOCABULARY, capacity=32))
    runner.extend(TOKENS[:10], keep=0)
    before = [layer.keys.data_ptr() for layer in runner.passes._layers]
    for _ in range(5):
        runner.extend(TOKENS[10:20], keep=1)
        runner.rollback(10)
    runner.rollback(0)
    runner.extend(TOKENS[:32], keep=0)
    assert [layer.keys.data_ptr() for layer in runner.passes._layers] == before


def test_a_class_of_pass_is_captured_once() -> None:
    capture = Replays()
    runner = Slot(GraphPasses(random_model("llama"), VOCABULARY, capture))
    runner.extend(TOKENS[:3], keep=0)  # makes the buffers
    for width in (1, 2, 9, 10, 12, 1, 2, 11):
        runner.extend(TOKENS[:width], keep=width)
        runner.rollback(3)
    assert capture.captured == 3  # 1, 2 and the one for 9 to 12
    assert runner.preparing_seconds > 0


def test_longer_sequences_have_passes_of_their_own() -> None:
    capture = Replays()
    runner = Slot(GraphPasses(random_model("llama"), VOCABULARY, capture))
    runner.extend(TOKENS[:100], keep=0)
    runner.extend(TOKENS[100:101], keep=1)
    runner.extend(TOKENS[101:250], keep=0)
    runner.extend(TOKENS[250:255], keep=1)
    whole = from_scratch("llama", TOKENS)
    torch.testing.assert_close(runner.extend(TOKENS[255:], keep=1).logits, whole[-1:], atol=5e-5, rtol=1e-4)
    assert capture.captured == 2 + (span_class(256) > SHORTEST)


def test_a_pass_that_cannot_be_captured_runs_as_it_is() -> None:
    def refuse(_: Callable[[], Any]) -> Callable[[], Any]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    heard: list[str] = []
    runner = Slot(GraphPasses(random_model("llama"), VOCABULARY, refuse, name="it", notice=heard.append))
    runner.extend(TOKENS[:20], keep=0)
    for begin in (20, 23):
        logits = runner.extend(TOKENS[begin : begin + 3], keep=3).logits
        expected = from_scratch("llama", TOKENS[: begin + 3])[-3:]
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-4)
    assert heard == ["it runs uncaptured from here on: operation not permitted when stream is capturing"]


def test_classes_cover_every_pass() -> None:
    assert [width_class(width) for width in range(1, 9)] == list(range(1, 9))
    assert all(width_class(width) >= width for width in range(1, WIDEST + 1))
    assert WIDTHS[-1] == WIDEST
    assert [span_class(places) for places in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_can_have_fixed_buffers(family: str) -> None:
    why = obstacle(random_model(family))
    assert why is None if family in PLAIN else "sliding window" in str(why)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4),
        OPTConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            ffn_dim=32,
            word_embed_proj_dim=32,
        ),
    ],
    ids=["bloom", "opt"],
)
def test_models_that_place_tokens_by_their_mask_run_eagerly_and_right(config: Any) -> None:
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    assert "mask" in str(obstacle(model))
    runner = Slot(EagerPasses(model, VOCABULARY))
    runner.extend(TOKENS[:9], keep=0)
    runner.rollback(7)
    whole = model(torch.tensor([TOKENS[:12]]), use_cache=False).logits[0, -5:, :VOCABULARY]
    torch.testing.assert_close(runner.extend(TOKENS[7:12], keep=5).logits, whole, atol=5e-5, rtol=1e-4)


class Uncompiled:
    """A compiler that notes what it is told of the passes that it is given."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, bool]] = []

    def compiled(self, step: Any, given: Any, _buffers: Any, single: bool, _rows: Any = ()) -> Any:
        self.told.append((given[0].shape[1] == 1, single))
        return step


def test_a_compiler_is_told_which_passes_read_one_token() -> None:
    compiler = Uncompiled()
    runner = Slot(StaticPasses(random_model("llama"), VOCABULARY, compiler=compiler))  # type: ignore[arg-type]
    for count in (3, 1, 4, 1):
        runner.extend(TOKENS[:count], keep=1)
    assert sorted(compiler.told) == [(False, False), (True, True)]


def test_tokens_that_are_read_one_by_one_outgrow_the_buffers() -> None:
    runner, reader = Slot(StaticPasses(random_model("llama"), VOCABULARY, capacity=8)), TokenSampler(Sampling())
    runner.extend(TOKENS[:60], keep=0)
    found = [int(runner.sample([token], reader, None)[0][0]) for token in TOKENS[60:75]]
    assert found == from_scratch("llama", TOKENS[:75])[60:].argmax(-1).tolist()
