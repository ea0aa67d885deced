"""New draft heads for a target, with random weights."""

import random
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockConfig, BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle1 import Eagle1Config, Eagle1Head
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.glide import GlideConfig, GlideHead, top_layers
from specctl.models.draft_heads.head_layers import FIXED_FREQUENCIES, LayerShape
from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.draft_heads.verifier_keys import VerifierKeys
from specctl.models.head_files.block_formats import spread_layers
from specctl.models.head_files.draft_head import HeadKind
from specctl.models.running.context import context_length
from specctl.training.drafts.recipes import Recipe

STD = 0.02
"""Of new weights."""
SOURCES = 5
"""Layers that a block head reads."""


def new_head(
    recipe: Recipe, target: PreTrainedModel, tokens: torch.Tensor | None, mask_token: int, seed: int
) -> ChainHead | BlockHead:
    """A head to train, in float32 on the device of the target's embeddings; the same seed gives the same weights.

    What it shares with the target are copies in float32, neither trained nor written.

    Args:
        recipe: its kind and size.
        target: the model that it is to draft for.
        tokens: ids ``(D,)`` of its draft vocabulary, rising; None for all.
        mask_token: stands for what a block head is to draft.
        seed: of the weights.

    Raises:
        ModelError: the target has no output layer that can be copied, or no layer that an MTP head could be.
    """
    embeddings, output = _shared(target)
    shape, depth = _shape(target), target.config.get_text_config(decoder=True).num_hidden_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"draft head/{seed}/{recipe.kind}").getrandbits(63))
        if recipe.kind is HeadKind.MTP:
            head: ChainHead | BlockHead = _mtp(target, embeddings, output)
        elif recipe.kind is HeadKind.GLIDE:
            head = _glide(recipe, shape, depth, target, embeddings.num_embeddings)
        else:
            head = _untrained(recipe, shape, depth, tokens, mask_token, embeddings, output)
        for module in head.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    if isinstance(head, Eagle3Head):
        weight = output.weight.detach().cpu()
        head.lm_head.weight.data.copy_(weight if tokens is None else weight[tokens])
    if isinstance(head, GlideHead):
        head.embed_tokens.weight.data.copy_(embeddings.weight)
        head.lm_head.weight.data.copy_(output.weight)
    if isinstance(head, BlockHead) and head.config.markov is not None:
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head.to(embeddings.weight.device)


def source_layers(recipe: Recipe, depth: int) -> tuple[int, ...]:
    """The layers of a target with ``depth`` of them that a head reads.

    EAGLE-3's early, middle and late layer; for blocks `SOURCES` layers spread evenly. Fewer where the target is small.
    """
    if recipe.kind in (HeadKind.EAGLE1, HeadKind.MTP):
        return (-1,)
    if recipe.kind is HeadKind.GLIDE:
        return tuple(top_layers(depth, recipe.depth))
    if recipe.kind is HeadKind.EAGLE3:
        wanted = {2, depth // 2, depth - 3}
    else:
        wanted = {layer + 1 for layer in spread_layers(max(depth, 4), SOURCES)}
    return tuple(sorted({min(max(layer, 0), depth - 1) for layer in wanted}))


def _untrained(
    recipe: Recipe,
    shape: LayerShape,
    depth: int,
    tokens: torch.Tensor | None,
    mask_token: int,
    embeddings: nn.Embedding,
    output: nn.Linear,
) -> ChainHead | BlockHead:
    layers, vocabulary = source_layers(recipe, depth), embeddings.num_embeddings
    if recipe.kind is HeadKind.EAGLE1:
        eagle1 = Eagle1Config(shape, vocabulary, recipe.depth, context=shape.max_positions)
        return Eagle1Head(eagle1, output, embeddings)
    if recipe.kind is HeadKind.EAGLE3:
        eagle3 = Eagle3Config(
            shape,
            layers,
            vocabulary,
            draft_vocabulary=vocabulary if tokens is None else len(tokens),
            target_hidden_size=shape.hidden_size,
            num_layers=recipe.depth,
            norm_before_residual=True,
            context=shape.max_positions,
        )
        return Eagle3Head(eagle3, tokens, embeddings)
    chained = recipe.kind is HeadKind.DSPARK
    block = BlockConfig(
        replace(shape, qk_norm=True),
        layers,
        vocabulary,
        draft_vocabulary=vocabulary,
        num_layers=recipe.depth,
        block_size=recipe.steps + (0 if chained else 1),
        mask_token=mask_token,
        from_anchor=chained,
        markov="vanilla" if chained else None,
        markov_rank=recipe.markov_rank if chained else 0,
        confidence=chained,
        confidence_reads_token=chained,
        context=shape.max_positions,
    )
    return BlockHead(block, None, embeddings, output)


def _mtp(target: PreTrainedModel, embeddings: nn.Embedding, output: nn.Linear) -> MtpHead:
    head = MtpHead(target).float()
    head.share(embeddings, output)
    return head


def _glide(recipe: Recipe, shape: LayerShape, depth: int, target: PreTrainedModel, vocabulary: int) -> GlideHead:
    if recipe.depth > depth:
        raise ModelError(
            f"A GliDe head of {recipe.depth} layers reads as many of the target, which has {depth}.",
            f"Let --depth be at most {depth}.",
        )
    config = GlideConfig(shape, vocabulary, recipe.depth, recipe.steps, shape.max_positions)
    return GlideHead(config, VerifierKeys(target, source_layers(recipe, depth)))


def _shared(target: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Frozen copies in float32 of a target's embeddings and output layer."""
    embedding = _weight(target.get_input_embeddings())
    unembedding: nn.Module | None = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = _weight(unembedding)
    if embedding is None or weight is None:
        raise ModelError(
            f"{target.config.name_or_path!r} has no embeddings or output layer in a floating-point format, which a "
            "draft head needs.",
            "Load it without quantisation.",
        )
    weight = weight.float()
    output = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(weight, requires_grad=False)
    bias = getattr(unembedding, "bias", None)
    if bias is not None:
        output.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    embeddings = nn.Embedding(embedding.shape[0], embedding.shape[1], device="meta")
    embeddings.weight = nn.Parameter(embedding.float(), requires_grad=False)
    return embeddings, output


def _weight(module: nn.Module | None) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def _shape(target: PreTrainedModel) -> LayerShape:
    """Layers like the target's, where its configuration has Llama's words for them."""
    config = target.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some have one for each kind of layer
    if rope.get("rope_type", "default") not in FIXED_FREQUENCIES or "rope_theta" not in rope:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)}
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}  # whole heads are turned
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope=rope,
        max_positions=context_length(target) or 2048,
    )
