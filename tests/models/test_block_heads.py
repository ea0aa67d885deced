"""Block draft heads against what the published implementations compute, and their runner."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockRunner, GraphBlockRunner
from specctl.models.loading.block_formats import build_block, spread_layers, write_dflash

DATA = Path(__file__).parents[1] / "data" / "draft_heads"
VOCABULARY, DEPTH = 40, 8
FLAT = ("dflash", "dspark-vanilla", "dspark-gated", "dspark-rnn", "dspark-none")
NESTED = ("dflash-speculators", "dspark-speculators", "dspark-speculators-masked")
ANCHOR, LATER = 6, 9
"""Places of the newest token in the recorded passes."""

Tensors = dict[str, torch.Tensor]


def verifier(given: Tensors) -> PreTrainedModel:
    """A model with the recorded embeddings and output layer, where the head has none of its own."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_hidden_layers=DEPTH, intermediate_size=8, tie_word_embeddings=False, **sizes
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        if "embeddings" in given:
            model.get_input_embeddings().weight.copy_(given["embeddings"])
            if len(given["output"]) == VOCABULARY:
                model.get_output_embeddings().weight.copy_(given["output"])
    return model


def files(name: str) -> tuple[dict[str, Any], Tensors, Tensors]:
    """A recorded head's configuration, its weights, and what was recorded."""
    folder = DATA / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors"), load_file(folder / "expected.safetensors")


def recorded(name: str) -> tuple[BlockHead, Tensors]:
    config, weights, given = files(name)
    return build_block(config, weights, verifier(given)), given


def states(given: Tensors, start: int, end: int) -> dict[int, torch.Tensor]:
    return {layer: given[f"states.{layer}"][start:end] for layer in (2, 4, 6)}


def drafted(runner: BlockRunner, anchor: int, drawn: list[int]) -> torch.Tensor:
    """The logits ``(K, V)`` of a block in which these tokens are drawn; the last of them is not read."""
    rows = [runner.extend([token], keep=1).logits for token in [anchor, *drawn][: runner.longest]]
    return torch.cat(rows)


@pytest.mark.parametrize("name", FLAT)
def test_rows_are_those_of_the_published_implementation(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = BlockRunner(head, VOCABULARY, capacity=4)

    def check(part: str, anchor: int) -> None:
        runner.extend(ids[runner.length : anchor], keep=0)
        drawn = given[f"{part}.drawn"].tolist() if f"{part}.drawn" in given else [1, 2]
        torch.testing.assert_close(drafted(runner, ids[anchor], drawn), given[part], atol=1e-4, rtol=1e-4)

    check("alone", 0)
    runner.rollback(0)
    runner.witness(0, states(given, 0, ANCHOR))
    check("first", ANCHOR)
    runner.witness(ANCHOR, states(given, ANCHOR, LATER))
    runner.rollback(LATER)
    check("second", LATER)


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize(("part", "anchor"), [("first_block", 3), ("second_block", ANCHOR)])
def test_rows_are_those_of_speculators(name: str, part: str, anchor: int) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = BlockRunner(head, VOCABULARY)
    runner.witness(0, states(given, 0, anchor))
    runner.extend(ids[:anchor], keep=0)
    rows = drafted(runner, ids[anchor], ids[anchor + 1 :])
    expected = given[part][head.config.first_row :]
    if head.tokens is not None:
        outside = [token for token in range(VOCABULARY) if token not in head.tokens.tolist()]
        assert bool((rows[:, outside] == -torch.inf).all())
        rows = rows[:, head.tokens]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
