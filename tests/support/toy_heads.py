"""Random draft heads for tests, over a `TableRunner` or a random model."""

from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.models.draft_heads.block import BlockConfig, BlockHead, SequentialKind
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.glide import GlideConfig, GlideHead, VerifierKeys, top_layers
from specctl.models.draft_heads.head_layers import LayerShape
from tests.support.toys import VOCABULARY, seeded

SHAPE = LayerShape(hidden_size=8, intermediate_size=12, heads=2, kv_heads=1, head_dim=4)


def random_eagle3(
    *,
    layers: tuple[int, ...] = (0,),
    states: int = VOCABULARY,
    vocabulary: int = VOCABULARY,
    tokens: list[int] | None = None,
    shape: LayerShape = SHAPE,
    seed: int = 0,
    spread: float = 1.0,
) -> Eagle3Head:
    """An EAGLE-3 head whose every weight is drawn from a normal distribution of this spread.

    Args:
        layers: that it reads.
        states: width of the verifier's states.
        vocabulary: the verifier's.
        tokens: the ids that it can draft; None for all.
        shape: of its layer.
        seed: of the weights.
        spread: their standard deviation.
    """
    drafts = vocabulary if tokens is None else len(tokens)
    config = Eagle3Config(shape, layers, vocabulary, drafts, states)
    head = Eagle3Head(config, None if tokens is None else torch.tensor(tokens))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(spread * torch.randn(weight.shape, generator=seeded(seed)))
            seed += 1
    return head.eval()


def random_block(
    *,
    block_size: int = 4,
    layers: tuple[int, ...] = (0,),
    vocabulary: int = VOCABULARY,
    tokens: list[int] | None = None,
    markov: SequentialKind | None = None,
    shape: LayerShape = SHAPE,
    seed: int = 0,
    spread: float = 1.0,
) -> BlockHead:
    """A DFlash head, or with ``markov`` a DSpark head that predicts acceptance or a DFlash2 head, with random weights.

    Args:
        block_size: places of its pass.
        layers: that it reads, of states as wide as its own.
        vocabulary: the verifier's.
        tokens: the ids that it can draft; None for all.
        markov: its sequential head.
        shape: of its layers.
        seed: of the weights.
        spread: their standard deviation.
    """
    dspark = markov not in (None, "selector")
    config = BlockConfig(
        shape=shape,
        layers=layers,
        vocabulary=vocabulary,
        draft_vocabulary=vocabulary if tokens is None else len(tokens),
        num_layers=2,
        block_size=block_size,
        mask_token=vocabulary - 1,
        from_anchor=dspark,
        markov=markov,
        markov_rank=0 if markov is None else 3,
        candidates=vocabulary - 1 if markov == "selector" else 0,
        taps=2 if markov == "selector" else 0,
        group=shape.hidden_size // 2,
        confidence=dspark,
        confidence_reads_token=dspark,
    )
    head = BlockHead(config, None if tokens is None else torch.tensor(tokens))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(spread * torch.randn(weight.shape, generator=seeded(seed)))
            seed += 1
    return head.eval()


@cache
def key_maker(states: int) -> PreTrainedModel:
    """A random model of two layers whose states are so wide: it makes keys and values of a `TableRunner`'s states."""
    config = LlamaConfig(
        hidden_size=states,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=2,
        vocab_size=8,
    )
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.normal_()
                layer.self_attn.v_proj.weight.normal_()
    return model


def random_glide(
    target: PreTrainedModel | None = None,
    *,
    vocabulary: int = VOCABULARY,
    depth: int = 1,
    shape: LayerShape = SHAPE,
    seed: int = 0,
    spread: float = 1.0,
) -> GlideHead:
    """A GliDe head with random weights, over states as wide as the vocabulary if it has no target.

    Args:
        target: whose last layers it reads; None for `key_maker`.
        vocabulary: the verifier's.
        depth: its layers.
        shape: of these.
        seed: of the weights.
        spread: their standard deviation.
    """
    target = target or key_maker(vocabulary)
    keys = VerifierKeys(target, top_layers(target.config.num_hidden_layers, depth))
    head = GlideHead(GlideConfig(shape, vocabulary, depth), keys)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(spread * torch.randn(weight.shape, generator=seeded(seed)))
            seed += 1
    return head.eval()
