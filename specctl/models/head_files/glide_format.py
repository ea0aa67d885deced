"""GliDe heads on disk, in the layout of the paper's code: names of tensors, keys of the configuration, both ways.

The code keeps the verifier's layers out of the file: a head of n layers reads the last n. It turns queries to the
verifier's keys with frequencies of base 10,000, which are those of the verifiers that it was published for; here they
are always the verifier's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.models.draft_heads.glide import GlideConfig, GlideHead, top_layers
from specctl.models.draft_heads.verifier_keys import VerifierKeys
from specctl.models.head_files.head_config import BOOKKEEPING, ROPE_THETA, HeadConfig, layer_shape, transformer_table
from specctl.models.head_files.head_weights import fill, own_weights, published_names, published_weights
from specctl.models.head_files.network_files import Verifier
from specctl.models.head_files.verifier_fit import context_of, require_layers, require_same

NAMES = {"lm_head.": "lm_head.", "blocks.": "model.layers.", "": "model."}
"""How names of weights begin in a file, by how they begin in the network."""


def read(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
) -> GlideHead:
    """A GliDe head; see `HeadFormat.read`."""
    table = HeadConfig(config, subject)
    table.demand("use_remap", (False,))
    table.demand("attention_bias", (False,))
    shape = layer_shape(table, qk_norm=False, rope_theta=ROPE_THETA)
    parsed = GlideConfig(
        shape=shape,
        vocabulary=table.take("vocab_size", int),
        num_layers=table.take("num_hidden_layers", int, 1),
        block_size=table.take("block_size", int, 5),
        context=context_of(shape, target),
    )
    wide, heads, size = (
        table.take(key, int) for key in ("large_hidden_size", "large_num_attention_heads", "large_head_dim")
    )
    table.drop(BOOKKEEPING | {"target_model_name_or_path"})
    table.refuse_rest()
    text = target.config.get_text_config(decoder=True)
    layers = top_layers(text.num_hidden_layers, parsed.num_layers)
    require_layers(subject, layers, text.num_hidden_layers)
    keys = VerifierKeys(target, layers)
    for what, own, verifiers in (
        ("hidden states of width", wide, text.hidden_size),
        ("a vocabulary of", parsed.vocabulary, text.vocab_size),
        ("attention heads, in number", heads, keys.heads),
        ("attention heads of width", size, keys.head_dim),
    ):
        require_same(subject, what, own, verifiers)
    with torch.device("meta"):
        head = GlideHead(parsed, keys)
    fill(head, own_weights(weights), published_names(head, NAMES), subject)
    return head.eval()


def describe(head: GlideHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A GliDe head as the paper's code writes it; see `HeadFormat.describe`."""
    config, keys = head.config, head.keys
    described = {
        "architectures": ["smallLlamaForCausalLM"],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "block_size": config.block_size,
        "large_hidden_size": keys.state_size,
        "large_num_attention_heads": keys.heads,
        "large_head_dim": keys.head_dim,
        "target_model_name_or_path": verifier.name,
    }
    return described, published_weights(head, NAMES)
