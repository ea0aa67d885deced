"""EAGLE-3 and P-EAGLE heads on disk: configurations, names of tensors, and which layers their ids mean.

There are two layouts of tensors, ``midlayer.*`` (SafeAILab, SpecForge, NVIDIA) and ``layers.0.*`` (speculators,
DeepSpec), and three conventions of layer ids, of which two count a layer's output.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.head_files.head_config import (
    BOOKKEEPING,
    ROPE_THETA,
    HeadConfig,
    layer_shape,
    layer_windows,
    transformer_table,
)
from specctl.models.head_files.head_weights import drafted_tokens, fill, own_weights, published_names, published_weights
from specctl.models.head_files.network_files import Verifier
from specctl.models.head_files.verifier_fit import borrowed_embeddings, context_of, require_layers, require_same

TRAINING = frozenset(
    {
        *("embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version"),
        *("step_loss_decay", "ttt_length", "num_target_layers", "target_model_name_or_path", "target_model_type"),
        "draft_num_hidden_layers",  # DeepSpec's, equal to num_hidden_layers
        "bias",  # of EAGLE-1's fc; EAGLE-3's has none, or the file would hold fc.bias
        # Mixtures of experts in the verifier that a configuration was copied from: their tensors would be unknown.
        *("experts_per_token", "num_experts_per_tok", "num_local_experts"),
    }
)
"""Keys about how an EAGLE head was trained and what for."""


def read(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
) -> Eagle3Head:
    """An EAGLE-3 or P-EAGLE head; see `HeadFormat.read`."""
    left = own_weights(weights)
    parsed = _parsed(config, left, target, subject)
    tokens = drafted_tokens(left, parsed.draft_vocabulary, parsed.vocabulary, subject)
    shared = None
    if "embed_tokens.weight" not in left:
        shared = borrowed_embeddings(target, parsed.shape, subject)
    with torch.device("meta"):
        head = Eagle3Head(parsed, tokens, shared)
    first = max(("midlayer", "layers.0"), key=lambda layer: sum(name.startswith(f"{layer}.") for name in left))
    fill(head, left, published_names(head, _names(head, first)), subject)
    return head.eval()


def describe(head: Eagle3Head, _: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """An EAGLE-3 head in speculators' layout; see `HeadFormat.describe`."""
    config = head.config
    if config.window or config.mask_token is not None:
        raise ValueError("windows and masks are written by nobody here")
    described = {
        "architectures": ["Eagle3DraftModel"],
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
    }
    return described, published_weights(head, _names(head))


def _names(head: Eagle3Head, first: str = "layers.0") -> dict[str, str]:
    """How names of weights begin in a file, whose first layer is ``layers.0`` or ``midlayer``."""
    further = {f"further.{index}.": f"layers.{index + 1}." for index in range(len(head.further))}
    return {"first.": f"{first}.", **further}


def _parsed(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: PreTrainedModel, subject: str
) -> Eagle3Config:
    """The network that a config.json describes, checked against the verifier; see `HeadFormat.read`."""
    table = HeadConfig(config, subject)
    if "transformer_layer_config" in config:
        inner = table.table("transformer_layer_config")
        normed = config["transformer_layer_config"].get("model_type") == "qwen3"
        theta = None if normed else ROPE_THETA
    elif any("Qwen3" in str(name) for name in config.get("architectures") or ()):
        inner, normed, theta = table, True, None
    else:
        inner, normed, theta = table, any(name.endswith(".q_norm.weight") for name in weights), ROPE_THETA
    vocabulary, depth = inner.take("vocab_size", int), inner.take("num_hidden_layers", int, 1)
    windows = layer_windows(inner, depth)
    if len(set(windows)) > 1:
        raise ModelError(f"{subject}: its layers have different windows, which specctl does not run in this kind.")
    shape = layer_shape(inner, qk_norm=normed, rope_theta=theta)
    text = target.config.get_text_config(decoder=True)
    layers = _layers(table, text.num_hidden_layers)
    parsed = Eagle3Config(
        shape=shape,
        layers=layers,
        vocabulary=vocabulary,
        draft_vocabulary=table.take("draft_vocab_size", int, vocabulary),
        target_hidden_size=table.take("target_hidden_size", int, shape.hidden_size),
        num_layers=depth,
        norm_before_residual=table.take("norm_before_residual", bool, False),
        norm_before_fc=table.take("norm_before_fc", bool, False),
        fc_norm=table.take("fc_norm", bool, False),
        norm_output=table.take("norm_output", bool, False),
        mask_token=table.take("mask_token_id", int, least=0) if "mask_hidden" in weights else None,
        block=_block(table) if "mask_hidden" in weights else 0,
        window=windows[0],
        context=context_of(shape, target),
    )
    for each in (inner, table):
        each.drop(BOOKKEEPING | TRAINING)
        each.refuse_rest()
    require_same(subject, "hidden states of width", parsed.target_hidden_size, text.hidden_size)
    require_same(subject, "a vocabulary of", vocabulary, text.vocab_size)
    if parsed.mask_token is not None and parsed.mask_token >= vocabulary:
        raise table.wrong("mask_token_id", parsed.mask_token, f"an id below {vocabulary}")
    return parsed


def _block(table: HeadConfig) -> int:
    """How many tokens P-EAGLE drafts in a pass: what speculators proposes with it, which is 8 where it says nothing."""
    methods = table.mapping("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return HeadConfig(first, table.subject, "speculators_config.proposal_methods.").take("speculative_tokens", int, 8)


def _layers(table: HeadConfig, depth: int) -> tuple[int, ...]:
    """The layers whose input a head reads, of a verifier with ``depth`` layers.

    EAGLE and speculators count a layer's input. SpecForge and NVIDIA (``eagle_config``) and DeepSpec
    (``target_layer_ids``) count its output, which is the input of the next.
    """
    eagle = table.table("eagle_config")
    inputs, outputs = table.ids("eagle_aux_hidden_state_layer_ids"), table.ids("target_layer_ids")
    nested = eagle.ids("eagle_aux_hidden_state_layer_ids")
    for key, ordinary in _ORDINARY.items():
        eagle.demand(key, (ordinary,))
    # Of the drafts beyond `parallel_draft_step`, of which there are none.
    eagle.drop(["parallel_draft_heads_num_layers"])
    eagle.refuse_rest()
    given = [ids for ids in (inputs, *(tuple(i + 1 for i in ids) for ids in (outputs, nested) if ids)) if ids]
    if any(ids != given[0] for ids in given):
        raise ModelError(f"{table.subject}: its config.json names the verifier's layers twice, and differently.")
    layers = given[0] if given else (2, depth // 2, depth - 3)
    require_layers(table.subject, layers, depth)
    return layers


_ORDINARY = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
"""NVIDIA's switches, with the values that mean the network that EAGLE published."""
