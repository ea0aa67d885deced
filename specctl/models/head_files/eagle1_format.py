"""EAGLE-1 heads on disk, as SafeAILab published them; EAGLE-2's weights have this layout too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.models.draft_heads.eagle1 import Eagle1Config, Eagle1Head
from specctl.models.head_files.head_config import BOOKKEEPING, ROPE_THETA, HeadConfig, layer_shape, transformer_table
from specctl.models.head_files.head_weights import fill, own_weights, published_names, published_weights
from specctl.models.head_files.network_files import Verifier
from specctl.models.head_files.verifier_fit import borrowed_embeddings, context_of, require_same

NAMES = {"blocks.": "layers."}
"""How names of weights begin in a file, where it is not as in the network."""


def read(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
) -> Eagle1Head:
    """An EAGLE-1 head; see `HeadFormat.read`."""
    left = own_weights(weights)
    table = HeadConfig(config, subject)
    vocabulary, biased = table.take("vocab_size", int), table.take("qkv_bias", bool, False)
    shape = layer_shape(table, qk_norm=False, rope_theta=ROPE_THETA)
    text = target.config.get_text_config(decoder=True)
    parsed = Eagle1Config(
        # EAGLE's code knows no bias of attention's output.
        shape=replace(shape, qkv_bias=biased, output_bias=False),
        vocabulary=vocabulary,
        num_layers=table.take("num_hidden_layers", int, 1),
        fc_bias=table.take("bias", bool, True),
        context=context_of(shape, target),
    )
    table.drop(BOOKKEEPING)
    table.refuse_rest()
    require_same(subject, "hidden states of width", shape.hidden_size, text.hidden_size)
    require_same(subject, "a vocabulary of", vocabulary, text.vocab_size)
    shared = None if "embed_tokens.weight" in left else borrowed_embeddings(target, shape, subject)
    unembedding = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        head = Eagle1Head(parsed, unembedding, shared)
    fill(head, left, published_names(head, NAMES), subject)
    return head.eval()


def describe(head: Eagle1Head, _: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An EAGLE-1 head as SafeAILab's files, but for the format of the weights; see `HeadFormat.describe`."""
    config = head.config
    described = {
        "architectures": ["LlamaForCausalLM"],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "attention_bias": False,
        "qkv_bias": config.shape.qkv_bias,
        "bias": config.fc_bias,
    }
    return described, published_weights(head, NAMES)
