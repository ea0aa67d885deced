"""Sizes that differ from layer to layer, wherever they are asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import specctl
from specctl.doctor.expectations import WeightReads
from specctl.errors import ModelError
from specctl.models.draft_heads.glide import VerifierKeys
from specctl.models.draft_heads.training import Given
from specctl.models.files.checkpoint import locate
from specctl.models.files.skeleton import skeleton
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import cached_values, largest, sizes
from specctl.models.placing.placement import weights_by_rank
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import save_model
from tests.support.invoked import invoke
from tests.support.recurrent_models import NOT_HERE, RECURRENT, recurrent_model

PLAIN = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PLAIN |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}
PLAIN |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False}
GEMMA = PLAIN | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA |= {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
INPUTS = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 258}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
NO_INPUTS = {"hidden_size_per_layer_input": 0}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 4}
DOTS = PLAIN | LATENT | EXPERTS | INDEXED | {"num_key_value_heads": 4, "num_hidden_layers": 3, "sliding_window": 8}
DOTS |= {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "head_dim": 16}
DOTS |= {f"swa_{name}": size for name, size in LATENT.items()} | {"shared_experts_intermediate_size": 16}
DOTS |= {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_kv_lora_rank": 16, "swa_head_dim": 12}
DEEPSEEK = PLAIN | LATENT | EXPERTS | {"num_key_value_heads": 4, "num_hidden_layers": 2, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "head_dim": 4}
INKLING = PLAIN | {"num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 8}
INKLING |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "head_dim": 8, "d_rel": 8}
INKLING |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 258}
INKLING |= {"rel_extent": 16}
DORY = PLAIN | {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
DORY |= {"n_recurrent_loops": 3, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
DORY |= {"head_dim": 8}
MIMO = PLAIN | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
MIMO |= {"head_dim": 8, "v_head_dim": 4, "mlp_layer_types": ["dense"] * 2}
HY = PLAIN | LATENT | EXPERTS | INDEXED | {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
HY |= {"num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("gemma4_text", GEMMA | INPUTS | {"num_kv_shared_layers": 2}),
    "experts": (
        "gemma4_text",
        GEMMA
        | NO_INPUTS
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "key is value": ("gemma4_text", GEMMA | NO_INPUTS | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "unified": ("gemma4_unified_text", GEMMA),
    "dots": ("dots3_note_text", DOTS),
    "latent": ("deepseek_v3", DEEPSEEK),
    "indexed": ("deepseek_v32", DEEPSEEK | INDEXED),
    "one key": ("gpt_bigcode", {"vocab_size": 258, "n_embd": 32, "n_layer": 2, "n_head": 4, "multi_query": True}),
    "own windows": ("inkling_text", INKLING),
    "another index": ("qwen4_exp_text", {**RECURRENT.get("qwen4_exp_text", {}), "vocab_size": 258}),
    "loops": ("dory", DORY),
    "wider windows": ("mimo_v2_flash", MIMO),
    "shared index": ("hy_v4", HY),
    "plain": ("llama", PLAIN | {"num_hidden_layers": 2}),
}


def config_of(name: str) -> Any:
    family, settings = CONFIGS[name]
    if family not in CONFIG_MAPPING or family in NOT_HERE:
        pytest.skip(f"this version of transformers has no {family}")
    return CONFIG_MAPPING[family](**settings)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # transformers 5.17's
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.representatives(
    "shared",
    "key is value",
    "dots",
    slow=(
        *("experts", "unified", "latent", "indexed", "plain", "one key", "own windows", "another index"),
        *("loops", "wider windows", "shared index"),
    ),
)
def test_what_layers_cache_is_what_a_pass_caches(name: str) -> None:
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)

    model(torch.tensor([[1, 2, 3]]), **{cache_argument(type(model)): cache})

    parts = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values", "indexer_keys")]
    assert 3 * cached_values(config) == sum(part.numel() for part in parts if part is not None)


@pytest.mark.slow
def test_compressed_entries_are_counted_by_how_many_tokens_they_stand_for() -> None:
    model = recurrent_model("deepseek_v4", vocabulary=258)
    cache = DynamicCache(config=model.config)
    sizes = []
    for _ in range(2):  # 60 tokens, which both kinds of entries divide
        model(torch.randint(1, 258, (1, 60)), **{cache_argument(type(model)): cache})
        entries = [layer.compressed_kv.values() for layer in cache.layers if hasattr(layer, "compressed_kv")]
        sizes.append(sum(entry.numel() for each in entries for entry in each))

    window = 2 * 1 * 16  # of the one layer without entries
    assert cached_values(model.config) - window == -(-(16 + 8) // 3) + -(-16 // 5)
    assert sizes[1] - sizes[0] == 60 * (16 + 8) // 3 + 60 * 16 // 5


def test_sizes_of_layers_that_differ() -> None:
    config = config_of("key is value")

    assert sizes(config, "head_dim") == [8, 16, 8, 16]
    assert sizes(config, "unknown", "num_key_value_heads") == [2, 1, 2, 1]
    assert largest(config, "head_dim") == 16
    assert largest(config, "unknown") is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 checkpoint with larger heads and fewer of them in the layers that see the whole text."""
    return save_model(tmp_path_factory.mktemp("gemma4"), config_of("key is value"))


def test_a_model_whose_heads_differ_drafts_and_verifies(folder: Path) -> None:
    prompt = torch.randint(1, 258, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    expected = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    dtypes = ["target.dtype=float32", "draft.dtype=float32", "prompt.chat=false"]

    pair = specctl.load(target=str(folder), draft=str(folder), policy="constant:draft_length=3", overrides=dtypes)
    found = pair.generate(prompt, max_new_tokens=12)

    assert found.tokens == tuple(expected[0, 20:].tolist())
    assert sum(round_.accepted for round_ in found.rounds) > 0


def test_doctor_counts_heads_by_layer(folder: Path) -> None:
    shown = invoke("doctor", "--target", folder, "--set", "target.dtype=float32").stdout

    values = 2 * (2 * 2 * 8 + 2 * 1 * 16)  # two layers of each kind, keys and values
    assert f"cache per 1k tokens: {values * 4 * 1000 // 1024} KiB" in shown
    assert "Verdict: ready" in shown


def test_plans_count_heads_by_layer(folder: Path) -> None:
    checkpoint = locate(ModelTable(model=str(folder)), "target")
    model = skeleton(checkpoint)

    with pytest.raises(ModelError, match="4 attention heads and 1 or 2 key-value heads do not divide by 2"):
        weights_by_rank(model, "tensor", 2, "target")
    assert WeightReads.of(model, model.config, None).chosen == 1.0


def test_new_heads_have_the_first_layers_sizes(folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder)

    shape = Given.of(target, None, 0).shape

    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 8)


def test_keys_of_layers_that_differ_are_not_read_together(folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(folder)

    with pytest.raises(ModelError, match="GliDe head cannot read"):
        VerifierKeys(target, (0, 1))
