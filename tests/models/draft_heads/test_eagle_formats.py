"""Published EAGLE files: every layout means the same network, and nothing in them is overlooked."""

from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close

from specctl.errors import ModelError
from specctl.models.draft_heads.chain_runner import ChainPasses, ChainRounds
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.onnx.export import CannotExport
from specctl.models.onnx_heads.engine import graphs_of
from specctl.models.running.slot import Slot
from tests.support.eagle_references import DATA, EAGLE1, EAGLE3, Reference, all_logits, reference

OPTIONAL = {"embed_tokens.weight", "t2d"}
"""Tensors whose absence has a meaning: the verifier's embeddings are used; the vocabulary is not checked twice."""


def stored(name: str) -> list[str]:
    with safe_open(DATA / name / "model.safetensors", framework="pt") as file:
        return sorted(set(file.keys()) - OPTIONAL)


def nested(data: Reference) -> dict[str, Any]:
    """The table of the layers' keys."""
    table: dict[str, Any] = data.config.get("transformer_layer_config", data.config)
    return table


def flat() -> Reference:
    """speculators' head as EAGLE lays it out: one table, one layer called midlayer."""
    data = reference("eagle3-speculators")
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in data.weights.items()}
    config = {**nested(data), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
    return Reference(config, weights, data.expected)


def test_two_layouts_of_one_head_give_equal_logits() -> None:
    one, other = reference("eagle3-speculators"), flat()
    assert_close(all_logits(one.build(), one), all_logits(other.build(), other), atol=1e-5, rtol=1e-5)


UNKNOWN = (
    "fc.bias",
    "fc_norm.0.weight",
    "input_norm.weight",
    "layers.0.self_attn.o_proj.bias",
    "layers.1.hidden_norm.weight",
    "medusa.weight",
    "midlayer.gate.weight",
)


def complaint(data: Reference) -> str:
    """What building a head says of its files; nothing where it is built."""
    try:
        data.build()
    except ModelError as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE1])
@pytest.mark.representatives("eagle3-safeailab", "eagle1-qwen2")
def test_every_missing_tensor_is_told_by_name(name: str) -> None:
    untold = []
    for tensor in stored(name):
        data = reference(name)
        del data.weights[tensor]
        if ("lacks d2t, " if tensor == "d2t" else f"lacks tensors: {tensor}.") not in complaint(data):
            untold.append(tensor)
    assert stored(name)
    assert not untold


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE1])
@pytest.mark.representatives("eagle3-deepspec", "eagle1-safeailab")
def test_every_unknown_tensor_is_told_by_name(name: str) -> None:
    unknown, untold = set(UNKNOWN) - set(stored(name)), []
    for tensor in unknown:
        data = reference(name)
        data.weights[tensor] = torch.zeros(32)
        if f"holds unknown tensors: {tensor}." not in complaint(data):
            untold.append(tensor)
    assert unknown
    assert not untold


def test_copies_of_the_verifiers_weights_and_rotary_buffers_are_no_part_of_a_head() -> None:
    data = flat()
    data.weights |= {
        "verifier_lm_head.weight": torch.zeros(40, 32),
        "verifier_norm.weight": torch.zeros(32),
        "midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    assert_close(all_logits(data.build(), data), all_logits(flat().build(), data), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*EAGLE3, *EAGLE1])
@pytest.mark.parametrize("inside", [False, True])
def test_an_unknown_key_is_refused_by_name(name: str, inside: bool) -> None:
    data = reference(name)
    (nested(data) if inside else data.config)["residual_multiplier"] = 0.5
    path = "transformer_layer_config." if inside and nested(data) is not data.config else ""
    with pytest.raises(ModelError, match=rf"{path}residual_multiplier = 0\.5"):
        data.build()


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_output"])
def test_a_switch_changes_the_logits(key: str) -> None:
    data = flat()
    before = all_logits(data.build(), data)
    data.config[key] = True
    after = all_logits(data.build(), data)
    assert float((after - before)[2].nan_to_num().abs().max()) > 0.1


@pytest.mark.parametrize(("key", "tensor"), [("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")])
def test_a_norm_that_is_asked_for_has_to_be_there(key: str, tensor: str) -> None:
    data = flat()
    data.config[key] = True
    with pytest.raises(ModelError, match=f"lacks tensors: .*{tensor}"):
        data.build()


def test_queries_and_keys_are_normed_where_a_flat_file_has_their_norms() -> None:
    data = flat()
    data.weights |= {f"midlayer.self_attn.{name}_norm.weight": torch.rand(8) + 0.5 for name in "qk"}
    assert float((all_logits(data.build(), data) - all_logits(flat().build(), data)).nan_to_num().abs().max()) > 0.1


INPUTS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        pytest.param({INPUTS: [1, 3, 6]}, (1, 3, 6), id="EAGLE, speculators and vLLM: the input of a layer"),
        pytest.param({"eagle_config": {INPUTS: [1, 3, 4]}}, (2, 4, 5), id="SpecForge, NVIDIA: the output of a layer"),
        pytest.param({"target_layer_ids": [0, 2, 6]}, (1, 3, 7), id="DeepSpec: the output of a layer"),
        pytest.param({}, (2, 4, 5), id="EAGLE's own ids where there are none"),
        pytest.param({"eagle_config": {INPUTS: []}}, (2, 4, 5), id="NVIDIA writes an empty list for them"),
        pytest.param({INPUTS: None}, (2, 4, 5), id="speculators writes null"),
        pytest.param({INPUTS: [2, 4, 5], "eagle_config": {INPUTS: [1, 3, 4]}}, (2, 4, 5), id="twice the same"),
    ],
)
def test_conventions_of_layers_become_one(keys: dict[str, Any], layers: tuple[int, ...]) -> None:
    data = flat()
    data.config = {key: value for key, value in data.config.items() if key != INPUTS} | keys
    assert data.build().layers == layers


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({INPUTS: [2, 4, 8]}, "none is layer 8"),
        ({"target_layer_ids": [1, 3, 7]}, "none is layer 8"),
        ({INPUTS: [-1, 4, 5]}, "none is layer -1"),
        ({INPUTS: [2, 4, 5], "target_layer_ids": [2, 4, 5]}, "twice, with different values"),
        ({INPUTS: [2, 4]}, r"fc\.weight has shape \(32, 96\); its config.json asks for \(32, 64\)"),
        ({INPUTS: "2,4,5"}, f"{INPUTS} in its config.json is '2,4,5', not a list of whole numbers"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm .* is True, not False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state .* is False, not True"),
        ({"eagle_config": {"gates": 3}}, r"eagle_config\.gates = 3"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size .* is '32', not a whole number above 0"),
        ({"num_attention_heads": True}, "num_attention_heads .* not a whole number"),
        ({"num_key_value_heads": 3}, "not a divisor of the 4 query heads"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"norm_output": 1}, "norm_output .* is 1, not true or false"),
        ({"rope_parameters": {"rope_type": "default", "spin": 2}}, "spin"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1]}, "rope_parameters .* not a table"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": 100}, "needs a vocabulary of 100; the verifier has 96"),
        ({"target_hidden_size": 48}, "needs hidden states of width 48; the verifier has 32"),
    ],
)
def test_what_a_configuration_may_not_say(keys: dict[str, Any], message: str) -> None:
    data = flat()
    data.config |= keys
    with pytest.raises(ModelError, match=message) as error:
        data.build()
    assert str(error.value).startswith("The draft head 'x'")


def test_old_and_new_keys_of_scaled_positions_mean_the_same() -> None:
    new, old = flat(), flat()
    scaling = dict(old.config.pop("rope_parameters"))
    scaling["type"] = scaling.pop("rope_type")
    old.config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert_close(all_logits(new.build(), new), all_logits(old.build(), old), atol=1e-5, rtol=1e-5)


def test_sections_of_positions_are_the_same_in_text() -> None:
    plain, sections = flat(), flat()
    plain.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    del sections.config["rope_parameters"]
    sections.config |= {"rope_theta": 10000, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    assert_close(all_logits(plain.build(), plain), all_logits(sections.build(), sections), atol=1e-5, rtol=1e-5)


def test_qwen3_layers_must_say_how_fast_positions_turn() -> None:
    data = reference("eagle3-deepspec")
    del data.config["rope_parameters"]
    with pytest.raises(ModelError, match="no rope_theta"):
        data.build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["d2t"].__setitem__(3, w["d2t"][3] - 9), "does not give rising ids"),
        (lambda w: w["d2t"].__setitem__(-1, 96), "does not give rising ids from 0 to 95"),
        (lambda w: w["d2t"].__setitem__(0, -1), "does not give rising ids"),
        (lambda w: w.update(d2t=w["d2t"] + torch.arange(40)), "does not give rising ids"),
        (lambda w: w.update(d2t=w["d2t"][:-1]), r"shape \(39,\)"),
        (lambda w: w.update(d2t=w["d2t"].float()), "whole numbers"),
        (lambda w: w.update(t2d=~w["t2d"]), "t2d does not mark the 40 tokens"),
        (lambda w: w.update(t2d=w["t2d"][:-1]), "t2d does not mark"),
        (lambda w: w["t2d"].fill_(True), "t2d does not mark"),
        (lambda w: w.pop("d2t"), "lacks d2t, without which its 40 draft tokens have no ids in the vocabulary of 96"),
        (lambda w: w["fc.weight"].__setitem__((0, 0), torch.nan), "fc.weight holds NaN"),
        (lambda w: w.update({"norm.weight": torch.ones(32).long()}), "norm.weight is of dtype torch.int64"),
        (lambda w: w.update({"norm.weight": torch.ones(31)}), r"norm.weight has shape \(31,\)"),
    ],
)
def test_tensors_that_contradict_are_refused(change: Any, message: str) -> None:
    data = flat()
    change(data.weights)
    with pytest.raises(ModelError, match=message):
        data.build()


def test_a_whole_vocabulary_needs_no_map() -> None:
    data = reference("eagle3-deepspec")
    assert data.build().tokens is None
    data.weights |= {"d2t": torch.zeros(96).long(), "t2d": torch.ones(96).bool()}
    assert data.build().tokens is None


def test_a_head_keeps_the_dtype_of_its_file() -> None:
    data = flat()
    data.weights = {
        name: weight.bfloat16() if weight.is_floating_point() else weight for name, weight in data.weights.items()
    }
    head = data.build()
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert isinstance(head, Eagle3Head)
    assert head.tokens is not None
    assert head.tokens.dtype == torch.int64
    assert head.rotary.frequencies.dtype == torch.float32


@pytest.mark.parametrize("name", ["eagle3-safeailab", "eagle1-safeailab"])
def test_embeddings_are_the_files_own_or_the_verifiers(name: str) -> None:
    data = reference(name)
    before = all_logits(data.build(), data)
    if name.startswith("eagle3"):
        data.expected["embed"] = data.weights.pop("embed_tokens.weight")
    else:
        data.weights["embed_tokens.weight"] = data.expected.pop("embed")
    assert_close(all_logits(data.build(), data), before, atol=1e-5, rtol=1e-5)


def test_embeddings_of_another_width_are_refused() -> None:
    data = flat()
    del data.weights["embed_tokens.weight"]
    data.config["target_hidden_size"] = 48
    with pytest.raises(ModelError, match="token embeddings of width 32; the verifier has 48"):
        data.build(data.verifier(hidden_size=48))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 48}, "needs hidden states of width 32; the verifier has 48"),
        ({"vocab_size": 100}, "needs a vocabulary of 96; the verifier has 100"),
    ],
)
@pytest.mark.parametrize("name", ["eagle3-speculators", "eagle1-qwen2"])
def test_a_head_for_another_verifier_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    data = reference(name)
    verifier = Reference(data.config, data.weights, {}).verifier(**settings)
    with pytest.raises(ModelError, match=message):
        data.build(verifier)


def test_a_verifier_of_too_few_layers_is_refused() -> None:
    data = reference("eagle3-deepspec")
    with pytest.raises(ModelError, match="the verifier has 7 layers, 0 to 6, and none is layer 7"):
        data.build(data.verifier(num_hidden_layers=7))


def test_a_text_may_be_longer_than_those_of_training() -> None:
    data = reference("eagle3-safeailab")
    assert data.config["max_position_embeddings"] == 256
    assert data.build(data.verifier(max_position_embeddings=4096)).context == 4096
    assert data.build(data.verifier(max_position_embeddings=64)).context == 256


@pytest.mark.parametrize("pieces", [(9,), (3, 1, 5)], ids=str)
def test_a_window_and_longrope_are_speculators_own(pieces: tuple[int, ...]) -> None:
    """Of the first token of a round; in training later ones see what it sees, here theirs moves on with them."""
    data = reference("eagle3-speculators-windowed")
    head = data.build()
    assert isinstance(head, Eagle3Head)
    assert head.window == 4
    runner, ids = Slot(ChainPasses(head, 96)), data.ids.tolist()
    assert runner.no_trees is not None
    runner.observe_states(0, data.states)
    found, done = [], 0
    text = [1, *ids]
    runner.extend(text[:1], keep=0)
    for count in pieces:
        found.append(runner.extend(text[1 + done : 1 + done + count], keep=count).logits)
        done += count
    assert head.tokens is not None
    assert_close(torch.cat(found)[:, head.tokens], data.expected["logits.0"], atol=1e-4, rtol=1e-4)


def test_rounds_side_by_side_have_the_window_of_each() -> None:
    data = reference("eagle3-speculators-windowed")
    head, text = data.build(), [1, *data.ids.tolist()[:9]]
    rounds = ChainRounds(head, 96, text)
    rounds.observe_states(data.states)
    lengths = [6, 7, 8]
    with torch.inference_mode():
        together = [rounds.first(lengths).logits]
        together += [rounds.further(range(3), [token] * 3).logits for token in (5, 6, 7, 8, 9)]
    for index, length in enumerate(lengths):
        runner = Slot(ChainPasses(head, 96))
        runner.observe_states(0, {layer: rows[: length - 1] for layer, rows in data.states.items()})
        rows = [runner.extend(text[:length], keep=1), *(runner.extend([token], keep=1) for token in (5, 6, 7, 8, 9))]
        alone = torch.cat([row.logits for row in rows])
        assert_close(torch.stack([part[index] for part in together]), alone, atol=1e-4, rtol=1e-4)


def test_layers_with_different_windows_are_refused() -> None:
    data = reference("eagle3-speculators-windowed")
    table = nested(data)
    table |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    assert "different windows" in complaint(data)
    with pytest.raises(CannotExport, match="windows"):
        graphs_of(reference("eagle3-speculators-windowed").build())
