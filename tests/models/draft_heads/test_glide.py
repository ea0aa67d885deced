"""GliDe's network, and the verifier's keys and values that it reads."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.draft_heads.chain_runner import ChainPasses, GraphChainPasses
from specctl.models.draft_heads.checkpoint import draft_head
from specctl.models.draft_heads.file_layout import Verifier, read_head, write_head
from specctl.models.draft_heads.glide import GlideHead, VerifierKeys
from specctl.models.draft_heads.head_layers import LayerShape, rotated
from specctl.models.draft_heads.kinds import recognise
from specctl.models.files.checkpoint import locate
from specctl.models.loading.assembly import load_pair
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.watching import LayerWatch, States
from specctl.models.running.slot import Slot
from specctl.profile.schema import ModelTable, Profile
from tests.support.toy_heads import random_glide
from tests.support.toys import FAMILIES, Replays, random_model, seeded

LENGTH = 14
TEXT = torch.randint(1, 64, (LENGTH,), generator=seeded(4)).tolist()
WIDE = LayerShape(hidden_size=24, intermediate_size=40, heads=4, kv_heads=2, head_dim=6)
"""Neither as wide as the verifier nor with its heads."""


HEADS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(model: PreTrainedModel, layers: tuple[int, ...]) -> tuple[States, DynamicCache]:
    """The inputs of layers, and the cache, of one pass over `TEXT`."""
    watch, cache = LayerWatch(model), DynamicCache()
    watch.watch(layers)
    with torch.no_grad():
        model(torch.tensor([TEXT]), use_cache=True, **{cache_argument(type(model)): cache})
    states = watch.take()
    assert states is not None
    return states, cache


def scaled() -> PreTrainedModel:
    """Positions that are scaled, which makes keys longer too."""
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(**HEADS, rope_parameters=rope, max_position_embeddings=256)
    return LlamaForCausalLM(config).eval()


def normed() -> PreTrainedModel:
    """No norm before attention, and keys normed over all heads together."""
    torch.manual_seed(0)
    return Olmo2ForCausalLM(Olmo2Config(**HEADS)).eval()


TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    **{family: lambda family=family: random_model(family) for family in FAMILIES},  # type: ignore[misc]
    "yarn": scaled,
    "olmo2": normed,
    "bfloat16": lambda: deepcopy(random_model("qwen3")).bfloat16(),
}


@pytest.mark.parametrize("family", TARGETS)
def test_keys_and_values_are_those_that_the_verifier_caches(family: str) -> None:
    model = TARGETS[family]()
    keys = VerifierKeys(model, (0, 1))
    states, cache = read(model, (0, 1))
    rope = keys.rope(torch.arange(LENGTH))
    for index, layer in enumerate(keys.layers):
        own, values = keys(index, states[layer])
        assert own.shape == values.shape == (keys.kv_heads, LENGTH, keys.head_dim)
        torch.testing.assert_close(rotated(own[None], rope), cache.layers[layer].keys)
        torch.testing.assert_close(values[None], cache.layers[layer].values)
        # At another place, or of another layer, they would be others.
        assert not torch.allclose(rotated(own[None], keys.rope(torch.arange(LENGTH) + 1)), cache.layers[layer].keys)
        assert not torch.allclose(keys(1 - index, states[layer])[1], values)


def test_asking_for_keys_leaves_the_verifiers_watched_states_alone() -> None:
    model = random_model("llama")
    watch = LayerWatch(model)
    watch.watch((0,))
    with torch.no_grad():
        model(torch.tensor([TEXT]), use_cache=False)
    before = watch.take()
    VerifierKeys(model, (0,))(0, torch.zeros(3, 32))
    after = watch.take()
    assert before is not None
    assert after is not None
    assert torch.equal(before[0], after[0])


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4)),
        "gpt2 model: its layers do not share one rotary embedding",
    ),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**HEADS)), "cohere model: its layer 3 rotates keys differently"),
    "gemma3": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**HEADS, head_dim=8)),
        "gemma3_text model: its layers do not share",
    ),
    "deepseek": (
        lambda: DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{**HEADS, "num_key_value_heads": 4},
                q_lora_rank=None,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=8,
                v_head_dim=8,
                first_k_dense_replace=4,
            )
        ),
        "deepseek_v3 model: the keys and values of its layer 3 differ in size",
    ),
    "recurrent": (
        lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **HEADS, head_dim=8, layer_types=["linear_attention"] * 4, num_experts=0, mlp_only_layers=[0, 1, 2, 3]
            )
        ),
        "qwen3_next model: its layer 3 gives no keys",
    ),
    "dynamic": (
        lambda: LlamaForCausalLM(
            LlamaConfig(**HEADS, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        ),
        "llama model: its rotary embedding is of type 'dynamic'",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_verifier_whose_keys_cannot_be_read_is_refused_by_name(family: str) -> None:
    make, message = REFUSED[family]
    with pytest.raises(ModelError, match=message) as refused:
        VerifierKeys(make().eval(), (3,))
    assert "EAGLE-3" in str(refused.value.hint)


def test_what_a_verifier_on_the_meta_device_caches_is_known() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**HEADS))
    keys = VerifierKeys(model.eval(), (1,))
    assert (keys.heads, keys.kv_heads, keys.head_dim, keys.state_size) == (4, 2, 8, 32)


# The network, computed again by hand over what the verifier itself cached.


def turned(heads: torch.Tensor, places: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """``(heads, T, d)`` turned as complex numbers, of which a head's two halves are the parts."""
    size = 2 * len(frequencies)
    pairs = torch.complex(*heads[..., :size].chunk(2, -1))
    pairs = pairs * torch.polar(torch.ones(()), places[:, None].float() * frequencies)
    return torch.cat([pairs.real, pairs.imag, heads[..., size:]], -1)


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """``(T, heads * d)``: each query over the first so many keys, and 0 over none."""
    groups = len(queries) // len(keys)
    rows = []
    for place, count in enumerate(counts):
        heads = []
        for head, query in enumerate(queries[:, place]):
            seen, of = keys[head // groups, :count], values[head // groups, :count]
            weights = (seen @ query / len(query) ** 0.5).softmax(0)
            heads.append(weights @ of if count else torch.zeros_like(query))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def by_hand(head: GlideHead, model: PreTrainedModel, known: int, upto: int) -> torch.Tensor:
    """Logits ``(upto, V)`` of the first tokens, in a round for which the keys of ``known`` places are known."""
    _, cache = read(model, head.layers)
    places = torch.arange(upto)
    own = 10000.0 ** (-torch.arange(0, head.config.shape.head_dim, 2) / head.config.shape.head_dim)
    theirs = model.get_decoder().rotary_emb.inv_freq  # type: ignore[no-untyped-call]

    def split(projected: torch.Tensor, size: int) -> torch.Tensor:
        return projected.view(upto, -1, size).transpose(0, 1)

    states = head.embed_tokens.weight[torch.tensor(TEXT[:upto])]
    for layer, block in zip(head.layers, head.blocks, strict=True):
        part: Any = block
        normed = part.input_layernorm(states)
        queries, keys, values = (
            split(project(normed), part.self_attn.head_dim)
            for project in (part.self_attn.q_proj, part.self_attn.k_proj, part.self_attn.v_proj)
        )
        mixed = attended(turned(queries, places, own), turned(keys, places, own), values, [p + 1 for p in range(upto)])
        states = states + part.self_attn.o_proj(mixed)
        cached: Any = cache.layers[layer]
        queries = turned(split(part.cross_attn.q_proj(states), cached.keys.shape[-1]), places, theirs)
        counts = [min(place, known) for place in range(upto)]
        states = states + part.cross_attn.o_proj(attended(queries, cached.keys[0], cached.values[0], counts))
        states = states + part.mlp(part.post_attention_layernorm(states))
    return head.lm_head(head.norm(states))


@pytest.mark.parametrize("known", [0, 1, 5, LENGTH - 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox", "gemma2"])
@torch.no_grad()
@pytest.mark.representatives("llama", "gemma2-2-5")
def test_logits_are_the_papers_over_the_verifiers_own_cache(family: str, depth: int, known: int) -> None:
    """A token attends to the verifier's keys of all places before it that were known when its round began."""
    model = random_model(family)
    head = random_glide(model, vocabulary=64, depth=depth, shape=WIDE, spread=0.3)
    states, _ = read(model, head.layers)
    expected = by_hand(head, model, known, LENGTH)
    runner = Slot(ChainPasses(head, 64, capacity=4))
    if known:
        runner.observe_states(0, {layer: rows[:known] for layer, rows in states.items()})
    newest = known + 1  # tokens, of which the last is in no place that is known
    found = [runner.extend(TEXT[:newest], keep=newest).logits]
    found += [runner.extend([token], keep=1).logits for token in TEXT[newest:]]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
    if 0 < known < LENGTH - 2:  # one place more or fewer is seen by the tokens behind
        for other in (known - 1, known + 1):
            assert not torch.allclose(by_hand(head, model, other, LENGTH)[-1], expected[-1], atol=1e-2)


def test_passes_are_captured_once_and_say_the_same() -> None:
    model = random_model("llama")
    head = random_glide(model, vocabulary=64, depth=2, shape=WIDE, spread=0.3)
    with torch.inference_mode():
        states, _ = read(model, head.layers)
        plain, captured = Slot(ChainPasses(head, 64)), Slot(GraphChainPasses(head, 64, Replays()))
        for runner in (plain, captured):
            runner.observe_states(0, {layer: rows[:6] for layer, rows in states.items()})
            runner.extend(TEXT[:6], keep=0)
        for token in TEXT[6:9]:
            one, other = (runner.extend([token], keep=1).logits for runner in (plain, captured))
            torch.testing.assert_close(one, other)
        for runner in (plain, captured):
            runner.rollback(8)
            runner.observe_states(6, {layer: rows[6:8] for layer, rows in states.items()})
        one, other = (runner.extend(TEXT[runner.length : 9], keep=2).logits for runner in (plain, captured))
        torch.testing.assert_close(one, other)


# Files.


def written(folder: Path, depth: int = 2) -> tuple[GlideHead, PreTrainedModel]:
    model = random_model("qwen3")
    head = random_glide(model, vocabulary=64, depth=depth, shape=WIDE, spread=0.3)
    write_head(folder, head, Verifier("some/target"))
    return head, model


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    found = draft_head(locate(ModelTable(model=str(folder)), "draft"))
    assert found is not None
    assert (found.kind, found.verifier) == ("glide", "some/target")
    return found.config, found.read()


def test_the_layout_is_that_of_the_papers_code(tmp_path: Path) -> None:
    """Its trainer's configuration and names, without what its code derives."""
    head, model = written(tmp_path)
    _, weights = stored(tmp_path)
    assert "model.layers.1.cross_attn.q_proj.weight" in weights
    config = {
        "architectures": ["smallLlamaForCausalLM"],
        "attention_bias": False,
        "block_size": 5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.02,
        "intermediate_size": 40,
        "large_head_dim": 8,
        "large_hidden_size": 32,
        "large_num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.34.0",
        "use_cache": True,
        "use_remap": False,
        "vocab_size": 64,
    }
    assert recognise(config, ()) == recognise({}, weights) == "glide"
    assert read_head("glide", config, weights, model).config.shape == head.config.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_remap": True}, "use_remap in its config.json is True"),
        ({"attention_bias": True}, "attention_bias in its config.json is True"),
        ({"gate": 1}, "keys that specctl does not know: gate = 1"),
        ({"large_hidden_size": 64}, "hidden states of width 64; the verifier has 32"),
        ({"large_num_attention_heads": 8}, "attention heads, in number 8; the verifier has 4"),
        ({"large_head_dim": 16}, "attention heads of width 16; the verifier has 8"),
        ({"large_head_dim": None}, "has no large_head_dim"),
        ({"vocab_size": 65}, "a vocabulary of 65; the verifier has 64"),
        ({"num_hidden_layers": 3}, "reads the inputs of layers -1, 0, 1; the verifier has 2 layers"),
        ({"num_hidden_layers": 1}, "holds unknown tensors: model.layers.1.cross_attn.o_proj.weight"),
    ],
    ids=str,
)
def test_what_a_configuration_may_not_say(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, model = written(tmp_path)
    config, weights = stored(tmp_path)
    with pytest.raises(ModelError, match=message):
        read_head("glide", {**config, **changes}, weights, model)


def test_every_tensor_is_needed_and_no_other_is_known(tmp_path: Path) -> None:
    _, model = written(tmp_path, depth=1)
    config, weights = stored(tmp_path)
    for name in weights:
        with pytest.raises(ModelError, match=f"lacks tensors: {name}"):
            read_head("glide", config, {key: weight for key, weight in weights.items() if key != name}, model)
    with pytest.raises(ModelError, match=r"holds unknown tensors: model\.layers\.0\.cross_attn\.k_proj"):
        read_head("glide", config, {**weights, "model.layers.0.cross_attn.k_proj.weight": torch.zeros(1)}, model)


def test_a_profile_names_a_glide_head(tmp_path: Path) -> None:
    target = load_pair(Profile.model_validate({"target": {"model": "embedded:target"}})).models[0]
    shape = LayerShape(hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16)
    write_head(tmp_path, random_glide(target, vocabulary=4096, shape=shape, spread=0.1), Verifier("embedded:target"))
    settings = Profile.model_validate({"target": {"model": "embedded:target"}, "draft": {"model": str(tmp_path)}})
    facts = diagnose(settings).models[1]
    assert (facts.architecture, facts.reads_layers, facts.draft_tokens) == ("GlideHead", [11], 4096)
    runner = load_pair(settings).drafts[0]
    assert isinstance(runner.passes, ChainPasses)
    assert runner.layers == (11,)
    # Its own keys and values in one layer, the verifier's, and whether those are known.
    assert facts.cache_per_1k_tokens == 1000 * 4 * (2 * 16 + 2 * 6 * 32 + 2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "large_head_dim": 64}))
    assert "heads of width 64; the verifier has 32" in diagnose(settings).problems[0].message
