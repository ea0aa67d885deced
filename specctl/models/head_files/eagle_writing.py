"""Writing EAGLE heads: EAGLE-3 in speculators' layout, EAGLE-1 in the layout it was published in. vLLM loads both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.models.draft_heads.eagle1 import Eagle1Head
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.head_files.eagle_formats import eagle1_names, eagle3_names
from specctl.models.head_files.network_files import write_network

VERSION = "0.9.0"
"""The version of speculators whose layout is written."""


def write_eagle3(
    folder: Path, head: Eagle3Head, *, verifier: str, architectures: Sequence[str] = (), ahead: int = 3
) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    The verifier's embeddings are left out; who loads the head takes them from the verifier.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.
        verifier: the hub id or path of the model that it drafts for.
        architectures: the verifier's, as in its config.json.
        ahead: how many tokens to draft at a time where nothing else decides.

    Raises:
        OutputError: a file cannot be written.
    """
    names = eagle3_names(head)
    weights = {names[own]: weight for own, weight in head.state_dict().items()}
    if head.tokens is not None:
        ids = head.tokens.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(head.config.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    write_network(folder, weights, _described(head, verifier, list(architectures), ahead))


def write_eagle1(folder: Path, head: Eagle1Head) -> None:
    """Write model.safetensors, and last config.json, as SafeAILab does but for the format of the weights.

    The verifier's embeddings are left out.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.

    Raises:
        OutputError: a file cannot be written.
    """
    config = head.config
    weights = {name: head.state_dict()[own] for own, name in eagle1_names(head).items()}
    described = {
        "architectures": ["LlamaForCausalLM"],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "attention_bias": False,
        "qkv_bias": config.shape.qkv_bias,
        "bias": config.fc_bias,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    write_network(folder, weights, described)


def _described(head: Eagle3Head, verifier: str, architectures: list[str], ahead: int) -> dict[str, Any]:
    config = head.config
    proposal = {"proposal_type": "greedy", "speculative_tokens": ahead, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": transformer_table(config.shape, config.vocabulary, config.num_layers),
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }


def transformer_table(shape: LayerShape, vocabulary: int, num_layers: int) -> dict[str, Any]:
    """A `LayerShape` in the words of transformers' configurations."""
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.activation,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_parameters": dict(shape.rope),
        "tie_word_embeddings": False,
    }
