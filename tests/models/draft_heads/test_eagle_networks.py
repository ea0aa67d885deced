"""EAGLE heads compute what their publishers' code computes, and can be traced whole."""

import pytest
import torch
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specctl.errors import ModelError
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.head_layers import LayerShape, Rotary
from specctl.models.passes.fixed_buffers import Cursor, FixedLayer
from tests.support.eagle_references import EAGLE1, EAGLE3, STEPS, Reference, all_logits, causal, reference

SHAPE = LayerShape(hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, head_dim=4)
SCALINGS = [
    {"rope_type": "default", "rope_theta": 1000.0},
    {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 512},
]


def known_columns(data: Reference) -> torch.Tensor:
    """The ids that the head can draft."""
    offsets = data.weights.get("d2t", torch.zeros(96, dtype=torch.long))
    return torch.arange(len(offsets)) + offsets


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE1])
def test_logits_are_those_of_the_published_code(name: str) -> None:
    data = reference(name)
    logits = all_logits(data.build(), data)
    recorded = torch.stack([data.expected[f"logits.{step}"] for step in range(STEPS)])
    torch.testing.assert_close(logits[..., known_columns(data)], recorded, atol=1e-4, rtol=1e-4)
    assert recorded.std() > 0.3, "logits that hardly differ would show nothing"


@pytest.mark.parametrize("name", ["eagle3-speculators", "eagle3-safeailab"])
def test_tokens_outside_the_draft_vocabulary_have_no_mass(name: str) -> None:
    data = reference(name)
    logits = all_logits(data.build(), data)
    inside = torch.zeros(96, dtype=torch.bool).index_fill(0, known_columns(data), True)
    assert inside.sum() == 40
    assert not torch.equal(known_columns(data), torch.arange(40))
    assert torch.equal(logits.isneginf(), ~inside.expand_as(logits))


@pytest.mark.parametrize("name", ["eagle3-speculators-normed", "eagle3-safeailab", "eagle1-safeailab"])
@pytest.mark.representatives("eagle3-safeailab")
def test_a_step_is_traced_whole_over_fixed_buffers(name: str) -> None:
    data = reference(name)
    head = data.build()
    cursor = Cursor()
    cache = Cache(layers=[FixedLayer(cursor, 12) for _ in range(head.num_layers)])

    def step(ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        cursor.positions, cursor.span = positions, mask.shape[-1]
        return head(ids, rows, positions, mask, cache).logits

    with torch.inference_mode():
        rows = head.fuse(data.states)[None]
        whole = (data.ids[None, :9], rows, torch.arange(9), causal(0, 9))
        direct = step(*whole)
        torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="eager")(*whole), direct)


def test_only_the_last_tokens_need_logits() -> None:
    data = reference("eagle1-safeailab")
    head = data.build()
    cache = [Cache(layers=[FixedLayer(Cursor(), 9)]) for _ in range(2)]
    for each in cache:
        each.layers[0]._cursor.positions, each.layers[0]._cursor.span = torch.arange(9), 9
    given = (data.ids[None, :9], head.fuse(data.states)[None], torch.arange(9), causal(0, 9))
    with torch.no_grad():
        whole, last = head(*given, cache[0]), head(*given, cache[1], 2)
    for all_rows, kept in zip(whole, last, strict=True):
        torch.testing.assert_close(kept, all_rows[-2:])


def test_what_is_the_verifiers_is_no_part_of_the_head() -> None:
    data = reference("eagle1-safeailab")
    verifier = data.verifier()
    head = data.build(verifier)
    head.to(torch.bfloat16)
    assert {name.split(".")[0] for name in head.state_dict()} == {"fc", "blocks"}
    assert verifier.lm_head.weight.dtype == verifier.model.embed_tokens.weight.dtype == torch.float32


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda rope: rope["rope_type"])
def test_rotary_embeddings_are_transformers_own(rope: dict[str, object]) -> None:
    shape = LayerShape(32, 48, 4, 2, 8, rope=rope, max_positions=2048)
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=2048, rope_parameters=dict(rope)
    )
    positions = torch.tensor([0, 1, 70, 1999])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    for own, other in zip(Rotary(shape)(positions), theirs, strict=True):
        torch.testing.assert_close(own, other[0])


@pytest.mark.parametrize("positions", [[0, 5, 511], [512, 700]], ids=["short", "long"])
def test_longrope_turns_each_place_as_transformers_turns_texts_of_its_length(positions: list[int]) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "original_max_position_embeddings": 512,
        "factor": 4.0,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 8.0],
    }
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, head_dim=4, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    mine = Rotary(LayerShape(16, 24, 4, 2, 4, rope=rope))(torch.tensor(positions))
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other[0])


def test_frequencies_stay_exact_when_a_head_is_cast() -> None:
    rotary = Rotary(SHAPE)
    before = rotary.frequencies.clone()
    assert torch.equal(rotary.to(torch.bfloat16).frequencies, before)


@pytest.mark.parametrize("kind", ["dynamic", "other"])
def test_frequencies_that_change_with_the_length_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"type '{kind}'"):
        Rotary(LayerShape(16, 24, 4, 2, 4, rope={"rope_type": kind, "rope_theta": 1000.0, "factor": 2.0}))


def test_incomplete_scaling_is_refused() -> None:
    with pytest.raises(ModelError, match="incomplete"):
        Rotary(LayerShape(16, 24, 4, 2, 4, rope={"rope_type": "llama3", "rope_theta": 1000.0}))


def test_a_head_may_be_narrower_than_its_verifier() -> None:
    config = Eagle3Config(SHAPE, (1, 2, 3), vocabulary=8, draft_vocabulary=8, target_hidden_size=24)
    head = Eagle3Head(config)
    assert head.fuse({layer: torch.randn(5, 24) for layer in head.layers}).shape == (5, 16)
