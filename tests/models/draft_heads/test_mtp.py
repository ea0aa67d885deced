"""The MTP head computes what the implementations that published it compute, over a cache that is written in place."""

import pytest
import torch
from mtp_targets import (
    FOLDER,
    IN_SHARDS,
    KINDS,
    WITH_SPECULATORS,
    Passes,
    alone,
    config_of,
    expected_of,
    head_of,
    shards_of,
    target_of,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.errors import ModelError
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.file_layout import read_head
from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant

CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.mark.parametrize("kind", IN_SHARDS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    expected, head = expected_of(kind), head_of(kind)
    ids, states = expected["ids"], expected["states"]
    places, read = len(states), Passes(head)
    found = read(ids[1:places], head.fuse({-1: states[:-1]}), 1)
    torch.testing.assert_close(found.logits, expected["logits"], **CLOSE)
    for step in range(3):
        found = read(ids[places + step, None], found.features[-1:], places + step)
        torch.testing.assert_close(found.logits, expected[f"step{step + 1}"], **CLOSE)


@pytest.mark.parametrize("layout", ["shards", "speculators"])
@pytest.mark.parametrize("kind", WITH_SPECULATORS)
def test_logits_are_those_of_speculators(kind: str, layout: str) -> None:
    expected = expected_of(kind)
    head = head_of(kind) if layout == "shards" else read_head("mtp", *alone(kind), target_of(kind))
    rows = head.fuse({-1: expected["states"]})
    for step in range(3):
        # Each step is trained over the whole text, with the rows of the step before for all of its places.
        logits = expected[f"step{step}"]
        count = len(logits)
        found = Passes(head)(expected["ids"][step + 1 : step + 1 + count], rows[:count], 1)
        torch.testing.assert_close(found.logits, logits, **CLOSE)
        rows = found.features


@pytest.mark.parametrize("kind", WITH_SPECULATORS)
def test_both_layouts_give_the_same_head(kind: str) -> None:
    first, second = head_of(kind).state_dict(), read_head("mtp", *alone(kind), target_of(kind)).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_equals_passes_of_one_token(kind: str) -> None:
    expected, head = expected_of(kind), head_of(kind)
    ids, rows = expected["ids"][1:9], expected["states"][:8]
    whole, read = Passes(head)(ids, rows, 1), Passes(head)
    for place in range(8):
        one = read(ids[place, None], rows[place, None], place + 1)
        torch.testing.assert_close(one.logits[0], whole.logits[place], **CLOSE)
        torch.testing.assert_close(one.features[0], whole.features[place], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_the_place_before_matters(kind: str) -> None:
    """Off by one changes the logits by far more than identity allows."""
    expected, head = expected_of(kind), head_of(kind)
    ids, states = expected["ids"][1:9], expected["states"]
    right, wrong = (Passes(head)(ids, states[first : first + 8], 1).logits for first in (0, 1))
    assert (right - wrong).abs().max() > 0.1


def test_hidden_states_first() -> None:
    """The other order of the two halves, with the halves of the projection exchanged, is the same head."""
    expected, head, target = expected_of("glm4_moe"), head_of("glm4_moe"), target_of("glm4_moe")
    ids, rows = expected["ids"][1:9], expected["states"][:8]
    target.config.mtp_hidden_states_first = True
    try:
        other = MtpHead(target, sparse=True)
    finally:
        del target.config.mtp_hidden_states_first
    weights = head.state_dict()
    embedding, state = weights["eh_proj.weight"].chunk(2, dim=1)
    other.load_state_dict({**weights, "eh_proj.weight": torch.cat([state, embedding], 1)})
    torch.testing.assert_close(Passes(other)(ids, rows, 1).logits, Passes(head)(ids, rows, 1).logits)


def test_what_belongs_to_the_target_is_no_part_of_the_head() -> None:
    target = target_of("qwen3_5_text")
    head, before = head_of("qwen3_5_text"), {name: weight.dtype for name, weight in target.named_parameters()}
    assert {name.split(".")[0] for name in head.state_dict()} == {"enorm", "hnorm", "eh_proj", "block", "norm"}
    head.to(torch.bfloat16)
    assert before == {name: weight.dtype for name, weight in target.named_parameters()}
    assert head.width == 16
    assert head.context == 64


def test_a_cast_leaves_the_routers_correction_alone() -> None:
    head = head_of("deepseek_v3").to(torch.bfloat16)
    assert head.block.mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}


def test_own_embeddings_and_output_layer() -> None:
    """A second copy of the target's is dropped; another one is used."""
    kind, weights = "glm4_moe", shards_of("glm4_moe")
    names = {part: f"model.layers.2.{part}.weight" for part in ("embed_tokens", "shared_head.head")}
    assert set(names.values()) <= set(weights)
    shared = head_of(kind)
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in shared.state_dict())
    weights[names["shared_head.head"]] = 2 * weights[names["shared_head.head"]]
    weights[names["embed_tokens"]] = weights[names["embed_tokens"]].roll(1, 0)
    own = read_head("mtp", config_of(FOLDER / kind), weights, target_of(kind))
    assert isinstance(own.lm_head, nn.Linear)
    expected = expected_of(kind)
    ids, rows = expected["ids"][1:9], expected["states"][:8]
    assert int(ids.max()) < 39
    first, second = Passes(shared)(ids, rows, 1), Passes(own)(ids + 1, rows, 1)
    torch.testing.assert_close(2 * first.logits, second.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("deepseek_v3", "glm4_moe")
def test_greedy_text_is_the_targets_own(kind: str) -> None:
    """Hybrids too, whose recurrent state cannot go back token by token."""
    model, prompt = target_of(kind), [5, 9, 2, 30, 33, 7, 12]
    target, drafter = (
        Slot(EagerPasses(model, 40)),
        ModelDrafter(Slot(ChainPasses(head_of(kind), 40)), Constant(draft_length=4)),
    )
    target.watch([-1])
    with torch.inference_mode():
        alone = [round_.emitted[0] for round_ in decode(Slot(EagerPasses(model, 40)), None, prompt, 24, Sampling())]
        prefill(target, drafter, prompt)
        rounds = list(decode(target, drafter, prompt, 24, Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == alone
    assert max(round_.drafted for round_ in rounds) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_keep_gives_the_last_tokens_alone(kind: str) -> None:
    expected, head = expected_of(kind), head_of(kind)
    ids, rows = expected["ids"][1:9], expected["states"][:8]
    whole, last = Passes(head)(ids, rows, 1), Passes(head)(ids, rows, 1, keep=2)
    for all_rows, last_rows in zip(whole, last, strict=True):
        torch.testing.assert_close(last_rows, all_rows[-2:])


def test_targets_whose_layers_cannot_draft_so_are_refused_by_name() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ModelError, match=r"mistral target .* sliding window"):
        MtpHead(MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)))
    with pytest.raises(ModelError, match=r"llama target .* ready-made mask"):
        MtpHead(LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="eager"))
