"""Writing DFlash and DSpark heads in speculators' layout, which vLLM loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specctl.models.draft_heads.block import BlockHead
from specctl.models.head_files.block_formats import published_names
from specctl.models.head_files.eagle_writing import VERSION, transformer_table
from specctl.models.head_files.network_files import write_network


def write_block(folder: Path, head: BlockHead, *, verifier: str, architectures: Sequence[str] = ()) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    The verifier's embeddings and output layer are left out if the head uses them.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.
        verifier: the hub id or path of the model that it drafts for.
        architectures: the verifier's, as in its config.json.

    Raises:
        ValueError: the head's layers are not Qwen3's.
        OutputError: a file cannot be written.
    """
    config, shape = head.config, head.config.shape
    if not shape.qk_norm or shape.mlp_bias or shape.qkv_bias != shape.output_bias:
        raise ValueError("speculators' block heads have Qwen3's layers: normed queries and keys, no other biases")
    weights = {name: head.state_dict()[own] for own, name in published_names(head).items()}
    if head.tokens is not None:
        ids = head.tokens.cpu()
        known = torch.zeros(config.vocabulary, dtype=torch.bool)
        known[ids] = True
        weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    write_network(folder, weights, _described(head, verifier, list(architectures)))


def _described(head: BlockHead, verifier: str, architectures: list[str]) -> dict[str, Any]:
    config = head.config
    chained = config.markov is not None or config.confidence
    kind = "dspark" if chained else "dflash"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": head.longest,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    table = transformer_table(config.shape, config.vocabulary, config.num_layers)
    found = {
        "architectures": ["DSparkDraftModel" if chained else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        # Qwen3's configuration has no key for biases of its gated network.
        "transformer_layer_config": {key: value for key, value in table.items() if key != "mlp_bias"}
        | {"layer_types": ["full_attention"] * config.num_layers},
        "draft_vocab_size": config.draft_vocabulary,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.layers),
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if chained:
        found |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov or "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_reads_token,
        }
    return found
