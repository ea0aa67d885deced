"""The published layouts of DFlash, DFlash2 and DSpark heads.

A flat config is Qwen3's with further keys at the top level or in ``dflash_config`` (z-lab, DeepSpec, SpecForge);
speculators' is nested. Flat files number layers by output, speculators by input. Tensor names are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockConfig, BlockHead, BlockSight, MarkovKind
from specctl.models.draft_heads.file_layout import (
    HeadConfig,
    HeadFile,
    Verifier,
    layer_shape,
    layer_windows,
    published_weights,
    transformer_table,
)

if TYPE_CHECKING:
    from specctl.models.draft_heads.kinds import Recipe
    from specctl.models.draft_heads.training import Blocks, Given, Lesson

FLAT = ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "Qwen3DSparkModel")
"""Architectures of flat files. Another one (DeepSpec's for Gemma 4) computes something else with the same tensors."""
TRAINING = frozenset(
    {
        *("num_anchors", "confidence_head_alpha", "speculators_config"),
        *("speculators_model_type", "speculators_version"),
    }
)
"""Keys about a block head's training and purpose, which are ignored."""

_CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}

NAMES = {"decoder.": "layers.", "confidence.": "confidence_head.proj."}
"""Prefixes of weight names in files that differ from the network's."""


def read(file: HeadFile) -> BlockHead:
    """A DFlash, DFlash2 or DSpark head; see `read_head`."""
    parsed, target = _parsed(file), file.target
    tokens = file.take_tokens(parsed.draft_vocabulary, parsed.vocabulary)
    # With a smaller vocabulary, the output layer cannot be the verifier's.
    own = "lm_head.weight" in file.weights or parsed.draft_vocabulary != parsed.vocabulary
    embeddings = None if "embed_tokens.weight" in file.weights else target.get_input_embeddings()
    output = None if own else target.get_output_embeddings()  # type: ignore[no-untyped-call]
    return file.filled(lambda: BlockHead(parsed, tokens, embeddings, output), NAMES)


def describe(head: BlockHead, _: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A DFlash, DFlash2 or DSpark head in speculators' layout; see `HeadKind`.

    Raises:
        ValueError: the head's layers are not Qwen3's, or need keys that only flat files have.
    """
    config, shape = head.config, head.config.shape
    if not shape.qk_norm or shape.mlp_bias or shape.qkv_bias != shape.output_bias:
        raise ValueError("speculators' block heads have Qwen3's layers: normed queries and keys, no other biases")
    if config.sights or config.logit_scale != 1 or config.logit_cap or config.raw_embeddings not in (None, 1.0):
        raise ValueError("writing windows, or scaled embeddings and logits, is not supported")
    table = transformer_table(shape, config.vocabulary, config.num_layers)
    del table["mlp_bias"]  # Qwen3's configuration has no key for biases of its gated network
    described = {
        "architectures": [_CLASSES[head.kind]],
        "transformer_layer_config": {**table, "layer_types": ["full_attention"] * config.num_layers},
        "draft_vocab_size": config.draft_vocabulary,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.layers),
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
    }
    if head.kind == "dflash2":
        described |= {
            "conv_kernel_size": config.taps,
            "conv_group_size": config.group,
            "selector_rank": config.markov_rank,
            "selector_top_k": config.candidates,
        }
    if head.kind == "dspark":
        described |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov or "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_reads_token,
        }
    return described, published_weights(head, NAMES)


def _parsed(file: HeadFile) -> BlockConfig:
    """The network that a config.json describes, checked against the verifier."""
    config, subject, depth = file.config, file.subject, file.text.num_hidden_layers
    values = _together(config, subject)
    nested = "transformer_layer_config" in config
    table = HeadConfig(values, subject)
    inner = table.table("transformer_layer_config") if nested else table
    vocabulary, count = inner.take("vocab_size", int), inner.take("num_hidden_layers", int)
    windows = layer_windows(inner, count)
    shape = layer_shape(inner, qk_norm=True)
    if nested:
        kind = str(values.get("speculators_model_type"))
        chain, second = kind == "dspark", kind == "dflash2"
        layers = table.ids("aux_hidden_state_layer_ids") or ()
        from_anchor = table.take("sample_from_anchor", bool, chain)
    else:
        second = tuple(values.get("architectures") or ()) == ("DFlash2DraftModel",)
        chain = from_anchor = _is_dspark(table, values)
        table.demand("num_target_layers", (depth,))
        outputs = table.ids("target_layer_ids") or spread_layers(depth, count)
        layers = tuple(layer + 1 for layer in outputs)
    # Only speculators' files omit these; its classes' defaults then apply.
    rank = table.take("markov_rank", int, 256) if (nested and chain) or values.get("markov_rank") else 0
    confidence = table.take("enable_confidence_head", bool, nested and chain)
    parsed = BlockConfig(
        shape=shape,
        layers=layers,
        vocabulary=vocabulary,
        draft_vocabulary=table.take("draft_vocab_size", int, vocabulary),
        num_layers=count,
        block_size=table.take("block_size", int),
        mask_token=table.take("mask_token_id", int, least=0),
        from_anchor=from_anchor,
        markov=_markov(table, rank),
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_token=table.take("confidence_head_with_markov", bool, nested) and confidence,
        context=file.context(shape),
        sights=_sights(table, windows, nested=nested, second=second),
        raw_embeddings=table.take("input_embedding_scale", float, 1.0) if second and not nested else None,
        logit_scale=1.0 if nested else table.take("output_multiplier", float, 1.0),
        logit_cap=0.0 if nested else table.take("final_logit_softcapping", float, 0.0),
    )
    if second:
        parsed = _second(table, parsed)
    table.demand("target_hidden_size", (shape.hidden_size,))
    for each in (inner, table):
        each.end(TRAINING)
    _check(parsed, file)
    return parsed


def _sights(table: HeadConfig, windows: Sequence[int], *, nested: bool, second: bool) -> tuple[BlockSight, ...]:
    """Each layer's attention limits, from either layout; empty if there are none."""
    if nested:  # speculators' layers without a window attend to the whole block
        causal = not table.take("sliding_window_non_causal", bool, second)
        found = tuple(BlockSight(window, causal and window > 0, from_anchor=window > 0) for window in windows)
    else:
        said = table.take("is_causal", bool, False) if table.has("is_causal") else None
        found = tuple(BlockSight(window, window > 0 if said is None else said) for window in windows)
    return found if any(sight != BlockSight() for sight in found) else ()


def _second(table: HeadConfig, config: BlockConfig) -> BlockConfig:
    """Add DFlash2's settings to the network. Only speculators' files omit the keys; these defaults then apply."""
    found = replace(
        config,
        markov="selector",
        taps=table.take("conv_kernel_size", int, 2),
        group=table.take("conv_group_size", int, 16),
        markov_rank=table.take("selector_rank", int, 256),
        candidates=table.take("selector_top_k", int, 16),
    )
    for key, value, most in (
        ("conv_kernel_size", found.taps, found.block_size),
        ("selector_top_k", found.candidates, found.vocabulary),
    ):
        if value > most:
            raise table.wrong(key, value, f"at most {most}")
    if found.shape.hidden_size % found.group:
        raise table.wrong("conv_group_size", found.group, f"a divisor of {found.shape.hidden_size}")
    if found.draft_vocabulary != found.vocabulary:
        raise table.wrong("draft_vocab_size", found.draft_vocabulary, f"the verifier's {found.vocabulary}")
    return found


def spread_layers(depth: int, count: int) -> tuple[int, ...]:
    """The layers whose output DFlash reads if a flat file names none: evenly spaced from 1 to ``depth - 3``."""
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))


def _together(config: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """A file's top-level keys and, in flat files, those of ``dflash_config``; both may hold the same key."""
    table = HeadConfig(config, subject)
    further = table.mapping("dflash_config")
    values = {key: value for key, value in config.items() if key != "dflash_config" and value is not None}
    for key, value in further.items():
        if values.setdefault(key, value) != value:
            raise table.wrong(f"dflash_config.{key}", value, f"the {values[key]!r} outside")
    if values.get("markov_rank") == 0:
        del values["markov_rank"]  # no sequential head
    return values


def _is_dspark(table: HeadConfig, values: Mapping[str, Any]) -> bool:
    """Whether a flat file is DSpark's or DeepSpec's DFlash, where the newest token's own row predicts too."""
    names = table.texts("architectures")
    if not names or set(names) - set(FLAT):
        raise table.wrong("architectures", list(names), f"one of {', '.join(FLAT)}")
    table.demand("attention_mode", ("gqa",))
    table.demand("projector_type", ("dflash", "dspark"))
    if names[0] == "DFlash2DraftModel":
        return False
    return names[0] != FLAT[0] or values.get("projector_type") == "dspark" or "markov_rank" in values


def _markov(table: HeadConfig, rank: int) -> MarkovKind | None:
    kind = table.take("markov_head_type", str, "vanilla")
    if kind not in get_args(MarkovKind):
        raise table.wrong("markov_head_type", kind, f"one of {', '.join(get_args(MarkovKind))}")
    return cast(MarkovKind, kind) if rank else None


def _check(config: BlockConfig, file: HeadFile) -> None:
    """Reject a configuration that contradicts itself or the verifier."""
    subject, depth, vocabulary = file.subject, file.text.num_hidden_layers, config.vocabulary
    if not config.layers:
        raise ModelError(f"{subject}: its config.json does not name the verifier's layers that it reads.")
    if depth in config.layers:
        # Implementations differ: they take this state before or after the final norm.
        raise ModelError(f"{subject} reads the output of the last of the verifier's {depth} layers, which is rejected.")
    file.require_layers(config.layers)
    file.require_fit(config.shape.hidden_size, vocabulary)
    if config.mask_token >= vocabulary:
        raise ModelError(f"{subject}: mask_token_id is {config.mask_token}; the vocabulary ends at {vocabulary - 1}.")
    if config.block_size < 2:
        raise ModelError(f"{subject}: block_size is {config.block_size}; a block has at least 2 places.")
    if config.markov == "rnn" and not config.from_anchor:
        raise ModelError(
            f"{subject} has a recurrent sequential head (markov_head_type = 'rnn') and sample_from_anchor = false, "
            "which specctl does not run: it is undefined where the recurrence begins."
        )
    if config.confidence_reads_token and config.markov is None:
        raise ModelError(f"{subject}: confidence_head_with_markov is true, but it has no sequential head.")


SOURCES = 5  # The number of layers that a new head reads
TOKEN_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
"""DSpark's weights of cross-entropy, total variation and predicted acceptance (arXiv 2607.05147)."""


def new(recipe: "Recipe", given: "Given") -> BlockHead:
    """A head to train; see `HeadKind`. DSpark's sequential head starts with a bias of zero."""
    from specctl.models.draft_heads.training import drawn

    layers = given.existing(layer + 1 for layer in spread_layers(max(given.depth, 4), SOURCES))
    config = BlockConfig(
        replace(given.shape, qk_norm=True),
        layers,
        given.vocabulary,
        draft_vocabulary=given.vocabulary,
        num_layers=recipe.depth,
        block_size=recipe.steps + 1,  # a place for the newest token, then one for each token to draft
        mask_token=given.mask_token,
        context=given.shape.max_positions,
    )
    if recipe.kind == "dspark":
        config = replace(
            config,
            block_size=recipe.steps,
            from_anchor=True,
            markov="vanilla",
            markov_rank=recipe.markov_rank,
            confidence=True,
            confidence_reads_token=True,
        )
    head = drawn(BlockHead(config, None, given.embeddings, given.output))
    if recipe.kind == "dspark":
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head


def loss(head: BlockHead, lesson: "Lesson", recipe: "Recipe", generator: torch.Generator) -> torch.Tensor:
    """The loss of blocks at random positions of an answer; see `HeadKind`."""
    from specctl.models.draft_heads.training import drafted_blocks

    count = min(recipe.anchors, lesson.length - 1)
    chosen = torch.randperm(lesson.length - 1, generator=generator)[:count].sort().values
    blocks = drafted_blocks(head, lesson, chosen.to(lesson.ids.device) + lesson.first - 1)
    of = dspark_loss if recipe.kind == "dspark" else dflash_loss
    return of(blocks, lesson, recipe.gamma) * lesson.length


def dflash_loss(blocks: "Blocks", lesson: "Lesson", gamma: float) -> torch.Tensor:
    """A weighted mean over the drafted tokens: cross-entropy with the target's distribution (speculators)."""
    from specctl.models.draft_heads.training import law_loss

    weights = _token_weights(blocks, gamma)
    target = lesson.logits[blocks.answer_rows.clamp(max=lesson.length - 1)]  # (R, K, V)
    return (law_loss(blocks.logits, target) * weights).sum() / weights.sum()


def dspark_loss(blocks: "Blocks", lesson: "Lesson", gamma: float) -> torch.Tensor:
    """A weighted mean over the drafted tokens.

    Cross-entropy with the text's tokens, the total variation between both distributions, and the cross-entropy of the
    predicted acceptance with 1 minus that distance, which is the probability that the token is accepted.
    """
    weights = _token_weights(blocks, gamma)
    wanted = blocks.answer_rows.clamp(max=lesson.length - 1)  # (R, K)
    label, target = lesson.ids[lesson.first :][wanted], lesson.logits[wanted]
    token = cross_entropy(blocks.logits.flatten(0, 1), label.flatten(), reduction="none").view_as(weights)
    distance = 0.5 * (blocks.logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    found = TOKEN_WEIGHT * token + 2 * DISTANCE_WEIGHT * distance  # DeepSpec's code uses the sum of differences
    if blocks.confidence is not None:
        accepted = 1 - distance.detach()
        off = binary_cross_entropy_with_logits(blocks.confidence, accepted, reduction="none")
        found = found + CONFIDENCE_WEIGHT * off
    return (found * weights).sum() / weights.sum()


def _token_weights(blocks: "Blocks", gamma: float) -> torch.Tensor:
    """``(R, K)``: exp(-(k - 1) / gamma) for the k-th drafted token, 0 after the end of the answer."""
    later = torch.arange(blocks.within.shape[1], device=blocks.within.device)
    return torch.exp(-later / gamma) * blocks.within
