"""The package `speculators` reads what is written here, and computes the same.

It is no dependency of the tests: it pins an older transformers. It runs with this one all the same:
``pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings``, and the packages that these
ask for.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from made import DRAWN, answer, spread_head
from transformers import AutoModelForCausalLM

from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.training import Lesson, Teacher, drafted_blocks, drafted_steps
from tests.support.checkpoints import llama_config, save_model

pytest.importorskip("speculators", reason="speculators, which pins an older transformers, is not installed")


def written(kind: str, folder: Path, **changes: Any) -> tuple[Any, Lesson, Any]:
    """A head, a text, and the head as speculators reads it from its files."""
    config = llama_config(64, initializer_range=0.3, num_hidden_layers=8, max_position_embeddings=128)
    target = AutoModelForCausalLM.from_pretrained(save_model(folder / "target", config)).eval()
    head = spread_head(kind, target, tokens=DRAWN if kind == "eagle3" else None, **changes)
    write_head(folder / "head", head, Verifier.of(str(folder / "target"), target))
    name = {"eagle3": "Eagle3DraftModel", "dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]
    model = getattr(import_module(f"speculators.models.{kind}"), name)
    config = model.config_class.from_pretrained(folder / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = model.from_pretrained(folder / "head", config=config).eval()
    theirs.load_verifier_weights()
    text = answer(0, 4)
    return head, Teacher(target, head.layers).lesson(text.prompt, text.tokens), theirs


def test_an_eagle3_head(tmp_path: Path) -> None:
    head, lesson, theirs = written("eagle3", tmp_path)
    steps, found = 3, []
    theirs.lm_head.register_forward_hook(lambda _module, _given, output: found.append(output[0]))
    states = torch.cat([lesson.states[layer] for layer in head.layers], -1)[None, :-1]
    with torch.no_grad():
        theirs(states, lesson.ids[None, 1:], torch.zeros(1, len(lesson.ids) - 1).long(), ttt_steps=steps)
        ours = list(drafted_steps(head, lesson, steps))
    for step, logits in zip(ours, found, strict=True):
        # Their row i begins with the state of place i; ours behind token first - 1, read with the state before it.
        begin = lesson.first - 2
        torch.testing.assert_close(
            step.logits[:, DRAWN], logits[begin : begin + len(step.logits)], atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_head(kind: str, tmp_path: Path) -> None:
    head, lesson, theirs = written(kind, tmp_path)
    anchors = torch.arange(lesson.first - 1, len(lesson.ids) - head.block_size)
    states = torch.cat([lesson.states[layer] for layer in head.layers], -1)[None]
    counted = torch.zeros(1, len(lesson.ids), dtype=torch.long)
    counted[:, anchors] = 1
    with torch.no_grad():
        hidden, logits, _, _, places = theirs._backbone_forward(
            states,
            lesson.ids[None],
            counted,
            torch.zeros(1, len(lesson.ids), head.width),
            torch.zeros(1, len(lesson.ids), dtype=torch.long),
            max_anchors=len(anchors),
        )
        ours = drafted_blocks(head, lesson, anchors)
    shape = (len(anchors), head.block_size, -1)
    assert torch.equal(places.view(shape[:2])[:, 0], anchors)
    if kind == "dspark":
        before = lesson.ids[places.view(shape[:2])]
        embedded = theirs.markov_head.prev_embeddings(before)
        logits = logits.view(shape) + theirs.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden.view(shape), prev_emb=embedded
        )
        said = theirs.confidence_head(torch.cat([hidden.view(shape), embedded], -1))
        torch.testing.assert_close(ours.confidence, said.view(shape[:2]), atol=1e-3, rtol=1e-3)
    first = head.config.first_row
    torch.testing.assert_close(ours.logits, logits.view(shape)[:, first:], atol=1e-3, rtol=1e-3)
