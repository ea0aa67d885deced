"""GliDe heads on disk, in the layout of the paper's code: names of tensors, keys of the configuration, both ways.

The code keeps the verifier's layers out of the file: a head of n layers reads the last n. It turns queries to the
verifier's keys with frequencies of base 10,000, which are those of the verifiers that it was published for; here they
are always the verifier's.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.models.draft_heads.glide import GlideConfig, GlideHead, top_layers
from specctl.models.draft_heads.verifier_keys import VerifierKeys
from specctl.models.head_files.draft_head import GLIDE_ARCHITECTURE
from specctl.models.head_files.eagle_writing import transformer_table
from specctl.models.head_files.head_config import BOOKKEEPING, HeadConfig, layer_shape
from specctl.models.head_files.head_weights import fill, own_weights
from specctl.models.head_files.network_files import write_network
from specctl.models.head_files.verifier_fit import context_of, require_layers, require_same

ROPE_THETA = 10000.0
"""Of its own attention, where a configuration has none."""


def build_glide(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    target: PreTrainedModel,
    subject: str = "The draft head",
) -> GlideHead:
    """A GliDe head in the dtype of its file, in eval mode, on the weights' device.

    Args:
        config: the contents of config.json.
        weights: the tensors of its file.
        target: its verifier.
        subject: for messages.

    Raises:
        ModelError: a key or a tensor is missing, unknown or wrong, or the head does not fit the verifier.
    """
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
    fill(head, own_weights(weights), _names(head.state_dict()), subject)
    return head.eval()


def write_glide(folder: Path, head: GlideHead, *, verifier: str) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.
        verifier: the hub id or path of the model that it drafts for.

    Raises:
        OutputError: a file cannot be written.
    """
    config, keys = head.config, head.keys
    names = _names(head.state_dict())
    weights = {names[own]: weight for own, weight in head.state_dict().items()}
    described = {
        "architectures": [GLIDE_ARCHITECTURE],
        **transformer_table(config.shape, config.vocabulary, config.num_layers),
        "block_size": config.block_size,
        "large_hidden_size": keys.state_size,
        "large_num_attention_heads": keys.heads,
        "large_head_dim": keys.head_dim,
        "target_model_name_or_path": verifier,
        "dtype": str(head.lm_head.weight.dtype).removeprefix("torch."),
    }
    write_network(folder, weights, described)


def _names(own: Iterable[str]) -> dict[str, str]:
    """What a file calls each of a head's weights."""

    def published(name: str) -> str:
        return name if name.startswith("lm_head.") else f"model.{name.replace('blocks.', 'layers.', 1)}"

    return {name: published(name) for name in own}
