"""Draft heads of every kind, small enough that onnxruntime's graphs of them are made in seconds."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.eagle1 import Eagle1Config, Eagle1Head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from tests.support.onnx_models import graphs
from tests.support.toy_heads import random_block, random_eagle3, random_glide
from tests.support.toys import seeded

VOCABULARY = 64
EVERY_OTHER = list(range(0, VOCABULARY, 2))
SHAPE = LayerShape(hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, head_dim=16)
NORMED = replace(SHAPE, qk_norm=True)
LAYERS = (0, 1)


@cache
def verifier() -> PreTrainedModel:
    """A random Llama of three layers, that onnxruntime runs, too."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(num_hidden_layers=3, vocab_size=VOCABULARY, head_dim=16, max_position_embeddings=1024, **sizes)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.3)
    return model


def _drawn(head: ChainHead, spread: float = 0.3) -> ChainHead:
    seed = 0
    for weight in head.requires_grad_(False).parameters():
        weight.normal_(std=spread, generator=seeded(seed := seed + 1))
    return head.eval()


HEADS: dict[str, Callable[[], ChainHead | BlockHead]] = {
    "eagle3": lambda: random_eagle3(
        layers=LAYERS, states=32, vocabulary=VOCABULARY, tokens=EVERY_OTHER, shape=SHAPE, spread=0.3
    ),
    "eagle1": lambda: _drawn(
        Eagle1Head(Eagle1Config(SHAPE, VOCABULARY, num_layers=2), verifier().lm_head, verifier().model.embed_tokens),
        spread=0.1,  # with 0.3, its own states amplify a unit in the last place to 1e-3
    ),
    "mtp": lambda: _drawn(MtpHead(verifier())),
    "glide": lambda: random_glide(verifier(), vocabulary=VOCABULARY, depth=2, shape=SHAPE, spread=0.3),
    "dflash": lambda: random_block(layers=LAYERS, vocabulary=VOCABULARY, tokens=EVERY_OTHER, shape=SHAPE, spread=0.3),
    "dspark": lambda: random_block(
        layers=LAYERS, vocabulary=VOCABULARY, markov="vanilla", tokens=EVERY_OTHER, shape=NORMED, spread=0.3
    ),
    "gated": lambda: random_block(layers=LAYERS, vocabulary=VOCABULARY, markov="gated", shape=SHAPE, spread=0.3),
    "rnn": lambda: random_block(layers=LAYERS, vocabulary=VOCABULARY, markov="rnn", shape=SHAPE, spread=0.3),
}
"""By kind; DSpark's three sequential heads by theirs."""
KINDS = [pytest.param(kind, marks=pytest.mark.exhaustive) if kind in ("gated", "rnn") else kind for kind in HEADS]
"""Kinds as cases of tests: one of DSpark's heads stands for the other two."""


def torch_runner(head: ChainHead | BlockHead, vocabulary: int = VOCABULARY) -> Slot:
    return Slot(BlockPasses(head, vocabulary)) if isinstance(head, BlockHead) else Slot(ChainPasses(head, vocabulary))


def onnx_head(head: ChainHead | BlockHead, vocabulary: int = VOCABULARY, **settings: object) -> Slot | None:
    """A new runner of the graphs of a head, made once for each; None where the head cannot have one."""
    from specctl.models.onnx_heads.engine import build_onnx_head

    head.requires_grad_(False)
    asked = EngineSettings(**{"engine": "onnx", **settings})
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(graphs().parents[1])}), torch.inference_mode(False):
        return build_onnx_head(head, vocabulary, "it", asked, lambda: torch_runner(head, vocabulary), 1)


def sure_head(head: ChainHead | BlockHead, vocabulary: int = VOCABULARY) -> Slot:
    """As `onnx_head`, for a head that must have one."""

    def refuse(line: str) -> None:
        raise AssertionError(line)

    runner = onnx_head(head, vocabulary, notice=refuse)
    assert runner is not None
    return runner
