"""Tiny random models of every family of transformers that keeps a recurrent or convolution state, by ``model_type``."""

from copy import deepcopy
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from specctl.models.passes.cache import cannot_go_back

WINDOW = 8
BOTH = ["linear_attention", "full_attention"]
_COMMON = {"hidden_size": 32, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_PLAIN = {**_COMMON, "intermediate_size": 64, "max_position_embeddings": 256}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_FOUR = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
_DELTA = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
_DELTA |= {"linear_num_value_heads": 4, "layer_types": BOTH, "num_hidden_layers": 2}
_TWO = {"num_hidden_layers": 2}
_MIXED = {"layer_types": BOTH, **_TWO}
_UNTIED = {"tie_word_embeddings": False}  # tied, an untrained model repeats its input for ever
_INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
_ZAYA = {**_COMMON, **_HEADS, **_TWO, **_UNTIED, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
_ZAYA |= {"router_hidden_size": 8, "max_position_embeddings": 256}
_MAMBA = {**_COMMON, **_TWO, **_UNTIED, "state_size": 8}


def _supported(family: str) -> bool:
    name = family.partition(",")[0]
    return name in CONFIG_MAPPING_NAMES and cannot_go_back(AutoConfig.for_model(name), None) is None


_RECURRENT: dict[str, dict[str, object]] = {
    "bailing_hybrid": {**_PLAIN, **_MIXED, **_LATENT, **_EXPERTS, "head_dim": 8, "n_group": 2, "topk_group": 1},
    "bamba": {**_PLAIN, **_HEADS, **_SSM, **_TWO, "attn_layer_indices": [1]},
    "deepseek_v4": {
        **_COMMON,
        **_UNTIED,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 8,
        "o_lora_rank": 8,
        "o_groups": 2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
        "sliding_window": WINDOW,
        "index_topk": 4,
        "index_head_dim": 8,
        "index_n_heads": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 256,
    },
    "falcon_h1": {**_PLAIN, **_HEADS, **_SSM, **_TWO, "mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": {**_MAMBA, "time_step_rank": 4},
    "granitemoehybrid": {**_PLAIN, **_HEADS, **_SSM, **_MIXED, "shared_intermediate_size": 32, "num_local_experts": 4},
    "jamba": {**_PLAIN, **_HEADS, **_TWO, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "kimi_linear": {**_PLAIN, **_MIXED, **_LATENT, **_EXPERTS, "linear_head_dim": 8, "linear_num_heads": 4},
    "lara_mini": {
        **_COMMON,
        **_HEADS,
        **_DELTA,
        **_FOUR,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "mamba": {**_MAMBA, "time_step_rank": 4},
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "nemotron_h": {
        **_PLAIN,
        **_HEADS,
        "head_dim": 8,
        "layers_block_type": [*BOTH, "mlp"],
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "olmo_hybrid": {**_PLAIN, **_HEADS, **_DELTA, "linear_num_value_heads": 2},
    "qwen3_5_moe_text": {**_COMMON, **_HEADS, **_DELTA, **_FOUR, "max_position_embeddings": 256},
    "qwen3_5_text": {**_PLAIN, **_HEADS, **_DELTA},
    "qwen3_next": {**_PLAIN, **_HEADS, **_DELTA, **_FOUR},
    "qwen4_exp_text": {
        **_COMMON,
        **_HEADS,
        **_DELTA,
        **_FOUR,
        **_INDEXER,
        "eos_token_id": 63,
        "hc_lowrank": 8,
        "max_position_embeddings": 256,
        "ple_layer_ids": [1],
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 1,
    },
    "zamba": {
        **_PLAIN,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 5,
        "layers_block_type": [*["linear_attention", "hybrid"] * 2, "linear_attention"],
    },
    "zamba2": {
        **_PLAIN,
        **_HEADS,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": _ZAYA,
    "zaya, sliding": {**_ZAYA, "sliding_window": WINDOW, "layer_types": ["hybrid_sliding", "hybrid"]},
}
RECURRENT = {family: settings for family, settings in _RECURRENT.items() if _supported(family)}
"""Families with a recurrent state that this version of transformers has and specctl can run."""
NOT_HERE = _RECURRENT.keys() - RECURRENT.keys()
"""Those that it does not have, or that specctl refuses with it."""

CONVOLUTIONS: dict[str, dict[str, object]] = {
    "lfm2": {**_PLAIN, **_HEADS, **_TWO, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**_PLAIN, **_HEADS, **_TWO, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    | {**_EXPERTS, "num_experts": 4},
}
"""Families that keep the last columns of a convolution and nothing else, which can be cropped like keys and values."""

FAMILIES = {**RECURRENT, **CONVOLUTIONS}


@cache
def recurrent_model(family: str, seed: int = 0, vocabulary: int = 64) -> PreTrainedModel:
    """An untrained float32 model, the same for the same arguments."""
    settings = {**FAMILIES[family], "vocab_size": vocabulary}
    config = AutoConfig.for_model(family.partition(",")[0], **settings)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.float().eval()


@cache
def noisy_recurrent(family: str, noise: float = 0.02, vocabulary: int = 64) -> PreTrainedModel:
    """The same model with noise on its weights: agrees with it often, not always."""
    original, generator = recurrent_model(family, vocabulary=vocabulary), torch.Generator().manual_seed(1)
    with torch.inference_mode(False), torch.no_grad():
        model = deepcopy(original)
        for weight in model.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model
