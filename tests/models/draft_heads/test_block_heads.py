"""Block draft heads against what the published implementations compute, and their runner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from specctl.decoding.composition import build_drafter
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.decoding.warming import warm_up
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockPasses, BlockRounds, GraphBlockPasses
from specctl.models.draft_heads.dflash import spread_layers
from specctl.models.draft_heads.file_layout import Verifier, described, read_head, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.draft_heads.kinds import recognise
from specctl.models.loading.assembly import load_pair
from specctl.models.onnx.export import CannotExport
from specctl.models.onnx_heads.engine import graphs_of
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.profile.schema import Profile
from tests.support.toy_heads import random_block
from tests.support.toys import Replays

DATA = Path(__file__).parents[2] / "data" / "draft_heads"
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
    return read_head("dflash", config, weights, verifier(given)), given


def states(given: Tensors, start: int, end: int) -> dict[int, torch.Tensor]:
    return {layer: given[f"states.{layer}"][start:end] for layer in (2, 4, 6)}


def drafted(runner: Slot, anchor: int, drawn: list[int]) -> torch.Tensor:
    """The logits ``(K, V)`` of a block in which these tokens are drawn; the last of them is not read."""
    rows = [runner.extend([token], keep=1).logits for token in [anchor, *drawn][: runner.longest]]
    return torch.cat(rows)


@pytest.mark.parametrize("name", FLAT)
def test_rows_are_those_of_the_published_implementation(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = Slot(BlockPasses(head, VOCABULARY, capacity=4))

    def check(part: str, anchor: int) -> None:
        runner.extend(ids[runner.length : anchor], keep=0)
        drawn = given[f"{part}.drawn"].tolist() if f"{part}.drawn" in given else [1, 2]
        torch.testing.assert_close(drafted(runner, ids[anchor], drawn), given[part], atol=1e-4, rtol=1e-4)

    check("alone", 0)
    runner.rollback(0)
    runner.observe_states(0, states(given, 0, ANCHOR))
    check("first", ANCHOR)
    runner.observe_states(ANCHOR, states(given, ANCHOR, LATER))
    runner.rollback(LATER)
    check("second", LATER)


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize(("part", "anchor"), [("first_block", 3), ("second_block", ANCHOR)])
def test_rows_are_those_of_speculators(name: str, part: str, anchor: int) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = Slot(BlockPasses(head, VOCABULARY))
    runner.observe_states(0, states(given, 0, anchor))
    runner.extend(ids[:anchor], keep=0)
    rows = drafted(runner, ids[anchor], ids[anchor + 1 :])
    expected = given[part][head.config.first_row :]
    if head.tokens is not None:
        outside = [token for token in range(VOCABULARY) if token not in head.tokens.tolist()]
        assert bool((rows[:, outside] == -torch.inf).all())
        rows = rows[:, head.tokens]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dspark-vanilla", "dspark-gated", "dspark-rnn"])
def test_the_predicted_acceptance_is_that_of_the_published_implementation(name: str) -> None:
    head, given = recorded(name)
    ids, drawn = given["ids"].tolist(), given["first.drawn"].tolist()
    runner = Slot(BlockPasses(head, VOCABULARY))
    runner.observe_states(0, states(given, 0, ANCHOR))
    runner.extend(ids[:ANCHOR], keep=0)
    found = []
    for fed, drawn_next in zip([ids[ANCHOR], *drawn], drawn, strict=False):
        runner.extend([fed], keep=1)
        found.append(float(runner.foresee(torch.tensor(drawn_next))))
    expected = given["first.confidence"].tolist()
    # The prediction for a block's first token is known before any is drawn; behind the last, none can follow.
    assert found == pytest.approx([*expected[1:], 0.0], abs=1e-5)


@pytest.mark.parametrize("name", ["dspark-speculators", "dspark-speculators-masked"])
def test_the_predicted_acceptance_is_that_of_speculators(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = Slot(BlockPasses(head, VOCABULARY))
    runner.observe_states(0, states(given, 0, ANCHOR))
    runner.extend(ids[:ANCHOR], keep=0)
    found = []
    for place in range(ANCHOR, ANCHOR + head.longest - 1):
        runner.extend([ids[place]], keep=1)
        found.append(float(runner.foresee(given["ids"][place + 1])))
    expected = given["second_block.confidence"][head.config.first_row + 1 :].tolist()
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["dflash-windows", "dflash2"])
def test_windows_and_dflash2_draft_as_z_lab_does(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    runner = Slot(BlockPasses(head, VOCABULARY, capacity=4))

    def check(part: str, anchor: int) -> None:
        runner.extend(ids[runner.length : anchor], keep=0)
        drawn = given[f"{part}.drawn"].tolist() if head.kind == "dflash2" else [1, 2]
        rows = drafted(runner, ids[anchor], drawn)
        torch.testing.assert_close(rows.softmax(-1), given[f"{part}.laws"], atol=1e-5, rtol=1e-4)
        assert head.kind == "dflash" or rows.isfinite().sum(-1).tolist() == [5, 5, 5]

    check("alone", 0)
    runner.rollback(0)
    runner.observe_states(0, states(given, 0, ANCHOR))
    check("first", ANCHOR)
    runner.observe_states(ANCHOR, states(given, ANCHOR, LATER))
    runner.rollback(LATER)
    check("second", LATER)


@pytest.mark.parametrize("name", ["dflash-windows-speculators", "dflash2-speculators"])
def test_windows_and_dflash2_draft_as_speculators_does(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    for part, anchor in (("first_block", 3), ("second_block", ANCHOR)):
        rows = drafted(ready(head, given, anchor), ids[anchor], ids[anchor + 1 :])
        torch.testing.assert_close(rows.softmax(-1), given[f"{part}.laws"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["dflash-windows", "dflash2", "dflash2-speculators"])
def test_rounds_side_by_side_see_what_a_round_alone_sees(name: str) -> None:
    head, given = recorded(name)
    ids = given["ids"].tolist()
    rounds = BlockRounds(head, VOCABULARY, ids)
    rounds.observe_states(states(given, 0, LATER))
    anchors = range(ANCHOR, LATER + 1)
    with torch.inference_mode():
        found = [rounds.first([anchor + 1 for anchor in anchors]).logits]
        found += [rounds.further(range(len(anchors)), [token] * len(anchors)).logits for token in (1, 2)]
    for index, anchor in enumerate(anchors):
        alone = drafted(ready(head, given, anchor), ids[anchor], [1, 2])
        torch.testing.assert_close(torch.stack([rows[index] for rows in found]), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dflash-windows", "dflash2-speculators"])
def test_heads_with_windows_or_convolutions_are_not_exported(name: str) -> None:
    with pytest.raises(CannotExport, match="windows or convolutions"):
        graphs_of(recorded(name)[0])


def test_a_dflash2_head_is_written_as_it_is_read() -> None:
    _, weights, given = files("dflash2-speculators")
    head = random_block(
        layers=(2, 4, 6),
        vocabulary=VOCABULARY,
        markov="selector",
        shape=LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8, qk_norm=True),
    )
    config, tensors = described(head, Verifier("some/model", ("Qwen3ForCausalLM",)))
    assert tensors.keys() - weights.keys() == {"embed_tokens.weight", "lm_head.weight"}, "of a head that borrows none"
    assert recognise(config, ()) == recognise({}, tensors) == "dflash2"
    again = read_head("dflash2", config, dict(tensors), verifier(given))
    assert isinstance(again, BlockHead)
    assert (again.kind, replace(again.config, context=0)) == (
        "dflash2",
        replace(head.config, raw_embeddings=None, context=0),
    )
    with pytest.raises(ValueError, match="windows"):
        described(recorded("dflash-windows")[0], Verifier("some/model"))


def ready(head: BlockHead, given: Tensors, anchor: int = ANCHOR) -> Slot:
    runner = Slot(BlockPasses(head, VOCABULARY))
    runner.observe_states(0, states(given, 0, anchor))
    runner.extend(given["ids"].tolist()[:anchor], keep=0)
    return runner


@pytest.mark.parametrize("name", FLAT)
def test_a_drawn_token_changes_no_row_of_the_pass(name: str) -> None:
    head, given = recorded(name)
    anchor = given["ids"].tolist()[ANCHOR]
    one, other = (drafted(ready(head, given), anchor, [drawn, 7, 7]) for drawn in (3, 21))
    torch.testing.assert_close(one[0], other[0])
    later = slice(2, None)  # the second row reads the token itself, through the sequential head
    if head.config.markov == "rnn":
        assert not torch.allclose(one[later], other[later]), "a recurrent head remembers every token"
    else:
        torch.testing.assert_close(one[later], other[later])
    assert torch.allclose(one[1], other[1]) == (head.config.markov is None)


def test_places_without_a_state_are_missing_and_the_others_keep_their_positions() -> None:
    head, given = recorded("dflash")
    ids = given["ids"].tolist()
    runner = ready(head, given)
    # The verifier has not read the last two places: the anchor is the last of three new tokens.
    late = runner.extend(ids[ANCHOR : LATER + 1], keep=1).logits
    assert runner.length == LATER + 1
    runner.rollback(LATER)
    assert runner.length == runner.observed == ANCHOR
    runner.observe_states(ANCHOR, states(given, ANCHOR, LATER))
    runner.rollback(LATER)
    whole = runner.extend([ids[LATER]], keep=1).logits
    torch.testing.assert_close(whole, given["second"][:1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(late, whole, atol=1e-3)
    near = ready(head, given).extend([ids[LATER]], keep=1).logits
    assert not torch.allclose(late, near, atol=1e-3), "the distance to the places before does not matter"


def test_states_given_in_pieces_or_twice_are_the_same_as_at_once() -> None:
    head, given = recorded("dspark-rnn")
    runner = Slot(BlockPasses(head, VOCABULARY, capacity=2))
    for start, end in ((0, 1), (0, 4), (2, 3), (3, ANCHOR)):
        runner.observe_states(start, states(given, start, end))
    runner.extend(given["ids"].tolist()[:ANCHOR], keep=0)
    rows = drafted(runner, given["ids"].tolist()[ANCHOR], given["first.drawn"].tolist())
    torch.testing.assert_close(rows, given["first"], atol=1e-4, rtol=1e-4)


def test_a_long_prompt_is_read_in_pieces() -> None:
    head, _ = recorded("dspark-vanilla")
    long = {layer: torch.randn(1100, 16, generator=torch.Generator().manual_seed(layer)) for layer in (2, 4, 6)}
    rows = []
    for step in (1100, 50):
        runner = Slot(BlockPasses(head, VOCABULARY, capacity=8))
        for start in range(0, 1100, step):
            runner.observe_states(start, {layer: part[start : start + step] for layer, part in long.items()})
        runner.extend([1] * 1100, keep=0)
        rows.append(drafted(runner, 5, [6, 7, 8]))
    torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-4)


def test_a_block_has_an_end() -> None:
    head, given = recorded("dflash")
    runner = ready(head, given)
    assert runner.reads_states
    assert runner.widest_sample
    drafted(runner, 4, [1, 2])
    with pytest.raises(ValueError, match="drafts 3 tokens"):
        runner.extend([3], keep=1)
    runner.rollback(ANCHOR)
    with pytest.raises(ValueError, match="newest token only"):
        runner.extend([4, 5], keep=2)
    with pytest.raises(IndexError):
        runner.watch([0])


def test_a_head_that_was_trained_here_is_written_as_speculators_writes_it(tmp_path: Path) -> None:
    head, given = recorded("dflash")
    written = tmp_path / "written"
    write_head(written, head, Verifier("some/model", ("Qwen3ForCausalLM",)))
    config, weights = json.loads((written / "config.json").read_text("utf-8")), load_file(written / "model.safetensors")
    published, tensors, _ = files("dflash-speculators")
    assert weights.keys() == tensors.keys()
    assert config.keys() <= published.keys()
    inner = published["transformer_layer_config"].keys()
    assert config["transformer_layer_config"].keys() <= inner
    again = read_head("dflash", config, weights, verifier(given))
    assert again.config == head.config
    rows = drafted(ready(again, given), given["ids"].tolist()[ANCHOR], [1, 2])
    torch.testing.assert_close(rows, given["first"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "DFlashDraftModel"])
def test_specforge_puts_the_keys_of_dspark_into_a_table(architecture: str) -> None:
    config, weights, given = files("dspark-vanilla")
    keys = ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    moved = {key: config.pop(key) for key in (*keys, "confidence_head_with_markov")}
    config |= {"architectures": [architecture], "dflash_config": {**moved, "projector_type": "dspark"}}
    assert recognise(config, ()) == "dspark"
    given["embeddings"], given["output"] = weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")
    head = read_head("dflash", config, weights, verifier(given))
    rows = drafted(ready(head, given), given["ids"].tolist()[ANCHOR], given["first.drawn"].tolist())
    torch.testing.assert_close(rows, given["first"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*FLAT, *NESTED, "dflash2", "dflash2-speculators"])
def test_kinds_are_recognised(name: str) -> None:
    config, weights, _ = files(name)
    kind = (
        "dflash2"
        if name.startswith("dflash2")
        else "dflash"
        if name in {"dflash", "dflash-speculators", "dspark-none"}
        else "dspark"
    )
    assert recognise(config, ()) == kind
    assert recognise({}, weights) == kind


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 7], "mask_token_id": 39}}, "output of the last"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 9], "mask_token_id": 39}}, "none is layer 10"),
        ("dflash", {"dflash_config": {"mask_token_id": 39, "window": 3}}, "window = 3"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 40}}, "ends at 39"),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "no mask_token_id"),
        ("dflash", {"block_size": 1}, "at least 2"),
        ("dflash", {"num_target_layers": 9}, "num_target_layers .* is 9, not 8"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window is set"),
        ("dflash", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("dflash", {"layer_types": ["full_attention"]}, "of 2 layers"),
        ("dflash", {"layer_types": None, "use_sliding_window": True}, "use_sliding_window .* is True"),
        ("dflash2", {"vocab_size": 50}, "vocabulary of 50; the verifier has 40"),
        ("dflash2-speculators", {"selector_top_k": 41}, "selector_top_k .* is 41, not at most 40"),
        ("dflash2-speculators", {"conv_group_size": 5}, "conv_group_size .* is 5, not a divisor of 16"),
        ("dflash2-speculators", {"draft_vocab_size": 24}, "draft_vocab_size .* is 24"),
        ("dflash", {"vocab_size": 50}, "vocabulary of 50; the verifier has 40"),
        ("dflash", {"hidden_size": 24}, "width 24; the verifier has 16"),
        ("dspark-rnn", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ("dspark-rnn", {"markov_head_type": "transformer"}, "markov_head_type .* 'transformer'"),
        ("dspark-rnn", {"dflash_config": {"block_size": 5}}, r"dflash_config.block_size .* is 5, not the 4 outside"),
        ("dspark-none", {"enable_confidence_head": True, "confidence_head_with_markov": True}, "no sequential head"),
        ("dspark-speculators", {"sample_from_anchor": False}, "recurrent sequential head"),
        ("dspark-speculators", {"aux_hidden_state_layer_ids": None}, "does not name"),
        ("dspark-speculators", {"target_hidden_size": 32}, "target_hidden_size"),
        ("dspark-speculators", {"norm_before_fc": True}, "norm_before_fc = True"),
    ],
)
def test_what_specctl_does_not_run_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    config, weights, given = files(name)
    with pytest.raises(ModelError, match=message):
        read_head("dflash", config | changes, weights, verifier(given))


def test_every_tensor_is_needed_and_no_other_is_known() -> None:
    config, weights, given = files("dspark-speculators")
    target = verifier(given)
    assert read_head("dflash", config, weights | {"verifier_norm.weight": torch.ones(16)}, target)
    with pytest.raises(ModelError, match=r"unknown tensors: layers.0.self_attn.g_proj.weight"):
        read_head("dflash", config, weights | {"layers.0.self_attn.g_proj.weight": torch.ones(1)}, target)
    for missing in ("hidden_norm.weight", "markov_head.joint_proj.bias", "lm_head.weight", "d2t"):
        with pytest.raises(ModelError, match=f"lacks .*{missing}"):
            read_head("dflash", config, {name: part for name, part in weights.items() if name != missing}, target)


def test_layers_that_a_file_does_not_name_are_spread_as_z_lab_does() -> None:
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(28, 1) == (14,)
    config, weights, given = files("dflash")
    config["dflash_config"] = {"mask_token_id": 39}
    weights["fc.weight"] = weights["fc.weight"][:, :32].contiguous()  # two layers, as the head has
    assert read_head("dflash", config, weights, verifier(given)).layers == (2, 6)


def test_passes_are_captured_once_and_say_the_same() -> None:
    head, given = recorded("dspark-gated")
    capture = Replays()
    runner, plain = Slot(GraphBlockPasses(head, VOCABULARY, capture)), Slot(BlockPasses(head, VOCABULARY))
    ids = given["ids"].tolist()
    reader = TokenSampler(Sampling(), frozenset(DISTRIBUTION_SIGNALS), foresees=True)
    counts = []
    for start, end in ((0, 3), (3, ANCHOR), (ANCHOR, LATER)):
        for one in (runner, plain):
            one.observe_states(start, states(given, start, end))
            one.rollback(end)
        token = ids[end]
        for _ in range(head.longest):
            (found, _), (expected, _) = (one.sample([token], reader, None) for one in (runner, plain))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            token = int(found[0])
        counts.append(capture.captured)
    assert counts[0] < counts[1] == counts[2], "the first pass makes the buffers; later ones are captured once"


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.representatives("dspark")
def test_a_profile_names_a_block_head(kind: str, tmp_path: Path) -> None:
    shape = LayerShape(hidden_size=192, intermediate_size=48, heads=2, kv_heads=1, head_dim=16, qk_norm=True)
    head = random_block(layers=(2, 6, 9), vocabulary=4096, shape=shape, spread=0.2)
    write_head(tmp_path, head, Verifier("embedded:target"))
    if kind == "dspark":
        # As DeepSpec publishes them: the newest token's own row predicts too.
        path = tmp_path / "config.json"
        config = json.loads(path.read_text("utf-8"))
        more = {"speculators_model_type": "dspark", "sample_from_anchor": True, "markov_rank": 4}
        path.write_text(json.dumps(config | more | {"confidence_head_with_markov": False}), "utf-8")
        weights = load_file(tmp_path / "model.safetensors")
        weights |= {"markov_head.markov_w1.weight": torch.randn(4096, 4), "confidence_head.proj.bias": torch.ones(1)}
        weights |= {"markov_head.markov_w2.weight": torch.randn(4096, 4)}
        save_file(weights | {"confidence_head.proj.weight": torch.randn(1, 192)}, tmp_path / "model.safetensors")
    policy = {"name": "confidence"} if kind == "dspark" else {"name": "constant", "draft_length": 3}
    settings = Profile.model_validate(
        {"target": {"model": "embedded:target"}, "draft": {"model": str(tmp_path), "policy": policy}}
    )
    pair = load_pair(settings)
    assert isinstance(pair.drafts[0].passes, BlockPasses)
    assert settings.draft is not None
    table = settings.sampling.model_copy(update={"max_new_tokens": 24})
    warm_up(pair, table)
    prompt = pair.tokenizer.encode("Once upon a time")
    drafter = build_drafter(pair, settings.draft.setting)
    tokens = Session(pair, drafter).generate(prompt, table).tokens
    assert tokens == Session(pair, None).generate(prompt, table).tokens
    report = diagnose(settings)
    assert report.ready
    assert report.models[1].draft_head == kind
