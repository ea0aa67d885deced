"""What is written for each engine, what its rule costs, and what is chosen."""

import json
import shlex
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml

from specctl.calibration.compared_settings import grid
from specctl.calibration.search import search, with_batches
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.export import engines
from specctl.export.engines import (
    ENGINES,
    LONGEST,
    Engine,
    Pairing,
    engine_of,
    lengths_of,
    other_version,
    rule_space,
    words_of,
)
from specctl.export.exports import Exports, GivenCosts, export_document, export_tables, export_warnings, text_of
from specctl.export.search import Exported, Reading, reading_of, score_in, search_rule, traces_as, with_further_passes
from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet
from tests.support.made_traces import flat_costs, trace, traces

NAMES = Pairing("org/big", "small models/d")
SAMPLED = replace(NAMES, temperature=0.7)
K5 = Setting.of({"name": "constant", "draft_length": 5})
STOPPED = Setting.of(
    {"name": "max-confidence", "adapt": False, "keep_trigger": False, "threshold": 0.45, "max_draft": 8}
)


def flags(engine: str, setting: Setting, pair: Pairing = NAMES) -> dict[str, str]:
    """The options of a command line."""
    words = shlex.split(ENGINES[engine].write(pair, setting).text)
    first = next(index for index, word in enumerate(words) if word.startswith("--"))
    return dict(zip(words[first::2], words[first + 1 :: 2], strict=True))


def test_command_lines_hold_the_setting_and_the_pair() -> None:
    assert flags("sglang", K5) == {
        "--model-path": "org/big",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "small models/d",
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    assert flags("llama.cpp", STOPPED) == {
        "--model": "big.gguf",
        "--spec-type": "draft-simple",
        "--spec-draft-model": "d.gguf",
        "--spec-draft-n-max": "8",
        "--spec-draft-n-min": "0",
        "--spec-draft-p-min": "0.45",
    }
    assert flags("llama.cpp", K5)["--spec-draft-p-min"] == "0"
    assert flags("mlx-lm", K5) == {
        "--model": "org/big",
        "--draft-model": "small models/d",
        "--num-draft-tokens": "5",
    }


@pytest.mark.parametrize(
    ("pair", "further"),
    [
        (NAMES, {}),
        (SAMPLED, {"draft_sample_method": "probabilistic"}),
        (
            replace(SAMPLED, blocks=True),
            {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        ),
    ],
    ids=["greedy", "sampled", "as blocks"],
)
def test_vllm_keeps_the_drafts_probabilities_when_sampling(pair: Pairing, further: dict[str, str]) -> None:
    words = shlex.split(ENGINES["vllm"].write(pair, K5).text)
    assert words[:4] == ["vllm", "serve", "org/big", "--speculative-config"]
    config = {"method": "draft_model", "model": "small models/d", "num_speculative_tokens": 5}
    assert json.loads(words[4]) == config | further


def test_the_plugin_for_vllm_is_handed_a_policy_table() -> None:
    setting = Setting.of({"name": "svip", "threshold": 0.55, "max_draft": 6})
    variable, *words = shlex.split(ENGINES["vllm-plugin"].write(SAMPLED, setting).text)
    assert variable == "VLLM_USE_V2_MODEL_RUNNER=0"
    assert words[:3] == ["vllm", "serve", "org/big"]
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 6
    assert "--no-async-scheduling" in words
    assert words[words.index("--worker-cls") + 1] == "specctl_vllm.worker.Worker"
    table = json.loads(words[words.index("--additional-config") + 1])
    assert table == {"specctl": {"name": "svip", "threshold": 0.55, "max_draft": 6}}
    plain = ENGINES["vllm-plugin"].write(NAMES, K5)
    assert plain.text == ENGINES["vllm"].write(NAMES, K5).text
    assert "needs no plugin" in plain.notes[0]


def test_a_file_for_tensorrt_llm_is_yaml() -> None:
    config = {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": "small models/d"}
    assert yaml.safe_load(ENGINES["tensorrt-llm"].write(NAMES, K5).text) == {"speculative_config": config}


def test_transformers_is_told_how_lengths_move() -> None:
    for carried, schedule in ((False, "heuristic_transient"), (True, "heuristic")):
        setting = Setting.of({"name": "heuristic", "draft_length": 3, "carry_over": carried})
        assert json.loads(ENGINES["transformers"].write(NAMES, setting).text) == {
            "num_assistant_tokens": 3,
            "num_assistant_tokens_schedule": schedule,
            "assistant_confidence_threshold": 0.0,
        }


def test_exllamav3_gets_arguments_that_python_reads() -> None:
    text = ENGINES["exllamav3"].write(NAMES, K5).text
    assert eval(text, {"Generator": lambda *_, **given: given}) == {
        "num_draft_tokens": 5,
        "dynamic_draft_tokens": False,
    }


def test_a_threshold_for_openvino_comes_with_log_probabilities() -> None:
    write = ENGINES["openvino"].write
    assert json.loads(write(NAMES, K5).text) == {"num_assistant_tokens": 5}
    assert json.loads(write(NAMES, STOPPED).text) == {
        "assistant_confidence_threshold": 0.45,
        "logprobs": 1,
    }


@pytest.mark.skipif(find_spec("openvino_genai") is None, reason="openvino-genai is not installed")
@pytest.mark.parametrize("setting", [K5, STOPPED], ids=["length", "threshold"])
def test_openvino_accepts_what_is_written(setting: Setting) -> None:
    import openvino_genai

    keys = json.loads(ENGINES["openvino"].write(NAMES, setting).text)
    config = openvino_genai.GenerationConfig(max_new_tokens=8, **keys)
    config.validate()
    assert {key: pytest.approx(getattr(config, key)) for key in keys} == keys


# What a setting costs


def test_passes_are_priced_as_an_engine_makes_them() -> None:
    """Sure and right for three tokens, then unsure and wrong, over and over; rounds of at most five tokens."""
    made = traces(6, 1)
    made.traces = [trace("p0", [True, True, True, False] * 3)]
    costs = flat_costs(1, 10)

    def ms(engine: str, setting: Setting) -> float:
        found = score_in(ENGINES[engine], setting, made, ["p0"], costs)
        assert found is not None
        return float(found.ms[0])

    # Three rounds; the last has room for three tokens only.
    assert ms("vllm", K5) == 3 * 10 + 5 + 5 + 3
    assert ms("exllamav3", K5) == ms("vllm", K5) + 3
    assert ms("llama.cpp", K5) == ms("vllm", K5) + 3
    # Three tokens a round and, but for the last round, the one that is dropped.
    assert ms("llama.cpp", STOPPED) == 3 * 10 + 3 * 3 + 2 + 3
    assert ms("vllm", NONE) == ms("llama.cpp", NONE) == 12 * 10


def test_engines_that_do_not_look_for_the_end_draft_on() -> None:
    made = traces(6, 1)
    made.traces = [trace("p0", [True] * 12)]
    made = replace(made, header=replace(made.header, eos=[102]))  # the third token, so that drafts stop there
    costs = flat_costs(1, 10)
    stops, goes_on = (score_in(ENGINES[name], K5, made, ["p0"], costs) for name in ("transformers", "vllm"))
    assert stops is not None
    assert goes_on is not None
    assert goes_on.ms[0] - stops.ms[0] == 2
    assert goes_on.drafted[0] == stops.drafted[0]


def test_what_was_not_recorded_is_not_scored() -> None:
    made = traces(6, 1)
    made.traces = [trace("p0", [False] + [True] * 99)]
    long = Setting.of({"name": "constant", "draft_length": 59})
    assert score_in(ENGINES["vllm"], long, made, ["p0"], CostTable.flat(1, 10, 100)) is None
    assert (
        score_in(
            ENGINES["vllm"], Setting.of({"name": "constant", "draft_length": 9}), made, ["p0"], CostTable.flat(1, 10, 8)
        )
        is None
    )


def test_given_costs_price_wider_passes() -> None:
    clock = GivenCosts(1.5, 12, 0.25, 9).table().clock(())
    assert clock(100, 4, 0) == pytest.approx((0.006, 0.013))
    assert clock(100, 1, 0) == pytest.approx((0.0015, 0.01225))


def test_a_pass_without_a_draft_has_a_price_of_its_own() -> None:
    assert GivenCosts(1.5, 12, 0.25, 9).table().clock(())(100, 0, 0) == pytest.approx((0, 0.009))
    assert "9 ms without a draft" in str(GivenCosts(1.5, 12, 0.25, 9))
    assert "without" not in str(GivenCosts(1.5, 12, 0.25, 12))


# What is searched and chosen


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.representatives("transformers", "vllm", "openvino")
def test_the_rule_is_searched_whole(engine: Engine) -> None:
    space = rule_space(engine, engine.confidence, 40)
    assert len(set(space)) == len(space)
    assert [one for one in space if one.policy == "constant"] == [
        Setting.of({"name": "constant", "draft_length": length})
        for length in range(1, min(LONGEST, engine.longest or LONGEST) + 1)
    ]
    assert {one.policy for one in space} == {"constant", *(kind.policy for kind in engine.kinds if not kind.for_heads)}
    assert all(one.all_values.get("keep_trigger", True) == engine.keeps_trigger for one in space if one.signals)
    assert len({words_of(one) for one in space}) == len(space)
    assert rule_space(engine, None, 7)[6].all_values == {"draft_length": 7}


def exported(name: str, made: TraceSet, costs: CostTable) -> Exported:
    parts = [f"p{n}" for n in range(0, 12, 2)], [f"p{n}" for n in range(1, 12, 2)]
    engine = ENGINES[name]
    return search_rule(engine, Reading(confidence=engine.confidence), made, parts, costs, NAMES)


@pytest.fixture(scope="module")
def searched() -> Exports:
    made, costs = traces(6), flat_costs(1, 10)
    found = search(made, grid("svip", "paper", {"entropy"}), None, costs)
    names = ("transformers", "vllm", "sglang", "tensorrt-llm")
    return Exports([exported(name, made, costs) for name in names], found.winner, None, 6, held_out=True)


@pytest.mark.slow
def test_a_threshold_wins_where_the_draft_knows_when_it_is_wrong(searched: Exports) -> None:
    transformers, vllm, *_ = searched.found
    assert transformers.best.setting.policy == "max-confidence"
    assert json.loads(transformers.written.text)["assistant_confidence_threshold"] > 0
    assert transformers.found.score.tokens_per_second > vllm.found.score.tokens_per_second
    speeds = [point.constant.tokens_per_second for point in vllm.curve]
    assert len(speeds) == LONGEST
    assert vllm.best.tokens_per_second == max(speeds)
    assert f'"num_speculative_tokens": {1 + speeds.index(max(speeds))}}}' in vllm.written.text


def test_tables_and_document_tell_the_same(searched: Exports) -> None:
    summary, *curves = export_tables(searched)
    assert [row[0] for row in summary.rows] == ["transformers", "vllm", "sglang", "tensorrt-llm", "specctl"]
    titles = ["transformers: tokens/s by K", "vllm: tokens/s by K", "sglang, tensorrt-llm: tokens/s by K"]
    assert [curve.title for curve in curves] == titles
    document = export_document(searched)
    for row, one in zip(summary.rows, document, strict=False):
        assert row[2] == f"{one['tokens_per_second']:.1f}"
    for curve, one in zip(curves, document, strict=False):
        assert [row[2] for row in curve.rows] == [f"{point['tokens_per_second']:.1f}" for point in one["curve"]]
    assert document[0]["curve"][3]["with_threshold"]["threshold"] > 0
    assert document[1]["curve"][3]["with_threshold"] is None
    assert json.loads(json.dumps(document)) == document


def test_version_source_and_date_stand_next_to_the_text(searched: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    one = searched.found[1]
    first = text_of(one).splitlines()[0]
    assert (
        first == f"# vllm {one.engine.version} ({one.engine.released}), by vllm/config/speculative.py, read 2026-11-24"
    )
    monkeypatch.setattr(engines, "version", lambda _: "99.1")
    assert other_version(one.engine) == "99.1"
    assert other_version(ENGINES["llama.cpp"]) is None
    said = export_warnings(searched)
    assert "give --costs" in said[0]
    assert any("vllm 99.1 is installed here" in line for line in said)
    monkeypatch.setattr(engines, "version", lambda _: one.engine.version)
    assert other_version(one.engine) is None
    assert export_warnings(replace(searched, costs=GivenCosts(1, 2, 0, 2)))[0].startswith(("transformers", "sglang"))


def test_where_drafting_does_not_pay_it_says_so() -> None:
    one = exported("vllm", traces(6), flat_costs(20, 10))
    assert not one.pays
    assert one.found.score.setting == NONE
    assert "run it without a draft" in text_of(one)
    assert one.best.setting.drafts


def test_the_best_length_follows_the_ratio_of_costs() -> None:
    lengths = [exported("vllm", traces(9), flat_costs(draft, 10)).best.setting for draft in (0.1, 1, 4)]
    found = [one.all_values["draft_length"] for one in lengths]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


# What cannot be exported


@pytest.mark.parametrize(
    ("name", "message"), [("ollama", "cannot run a target with a draft"), ("vlm", "did you mean 'vllm'")]
)
def test_engines_that_are_none(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(name)


def test_how_engines_sample() -> None:
    assert reading_of(ENGINES["openvino"], Sampling()).acceptance is None
    with pytest.raises(UsageError, match="openvino keeps a draft token by the draft's probability"):
        reading_of(ENGINES["openvino"], Sampling(0.7))
    block = Sampling(0.7, verification="block")
    assert reading_of(ENGINES["vllm"], block) == Reading("ratio", blocks=True)
    assert reading_of(ENGINES["transformers"], block) == Reading("ratio")
    assert reading_of(ENGINES["transformers"], Sampling(1.0)) == Reading("ratio", confidence="chosen")
    assert reading_of(ENGINES["llama.cpp"], Sampling(0.7)) == Reading("likeliest", confidence="top ten")
    assert reading_of(ENGINES["mlx-lm"], Sampling(0.7)) == Reading("matched")
    one = search_rule(
        ENGINES["transformers"],
        Reading("ratio"),
        traces(6),
        (["p0"], ["p1"]),
        flat_costs(1, 10),
        SAMPLED,
    )
    assert "no threshold was tried" in one.left_out[0]


def test_nothing_is_read_again_without_need() -> None:
    def no_pair() -> object:
        raise AssertionError("the models are not needed")

    made = traces(6)
    same = traces_as(Reading(confidence="chosen"), made, None, no_pair)  # type: ignore[arg-type]
    assert same is made


BY_SIZE = with_batches(K5, {4: Setting.of({"name": "constant", "draft_length": 2}), 16: NONE})


def test_lengths_by_number_of_texts_are_written_where_an_engine_takes_them() -> None:
    assert lengths_of(BY_SIZE) == [(1, 3, 5), (4, 15, 2), (16, None, 0)]
    config = json.loads(flags("vllm", BY_SIZE)["--speculative-config"])
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 3, 5], [4, 15, 2], [16, 16, 0]]
    written = ENGINES["tensorrt-llm"].write(NAMES, BY_SIZE)
    found = yaml.safe_load(written.text)["speculative_config"]
    assert (found["max_draft_len"], found["draft_len_schedule"]) == (5, {3: 5, 15: 2})
    assert any("EAGLE heads alone" in note for note in ENGINES["sglang"].write(NAMES, BY_SIZE).notes)
    assert "num_speculative_tokens_per_batch_size" not in json.loads(flags("vllm", K5)["--speculative-config"])


@pytest.mark.parametrize(
    ("sizes", "schedule", "notes"),
    [
        ({4: 2, 16: 0}, {3: 5, 15: 2}, ["With more than 15 requests at once it does not draft."]),
        (
            {4: 0, 8: 2},
            {3: 5, 7: 0, 8: 2},
            ["With more than 8 requests at once it does not draft: that was not priced."],
        ),
        (
            {4: 7, 8: 0},
            {3: 5, 7: 5},
            [
                "With 4 requests at once K = 7 is the fastest, but none may be longer than the first.",
                "With more than 7 requests at once it does not draft.",
            ],
        ),
    ],
)
def test_tensorrt_llm_has_every_length_or_says_what_it_lacks(sizes, schedule, notes) -> None:
    found = {rows: Setting.of({"name": "constant", "draft_length": k}) if k else NONE for rows, k in sizes.items()}
    written = ENGINES["tensorrt-llm"].write(NAMES, with_batches(K5, found))
    config = yaml.safe_load(written.text)["speculative_config"]
    assert (config["max_draft_len"], config["draft_len_schedule"]) == (5, schedule)
    assert list(written.notes) == notes


def test_lengths_are_searched_for_each_number_of_texts() -> None:
    some, dear = traces(6), flat_costs(2.0, 30.0, per_token=40.0)
    costs = replace(flat_costs(1, 10), batches={4: dear})
    found = {}
    for name in ("vllm", "sglang"):
        engine = replace(ENGINES[name], further_passes=0, kinds=())
        prompts = some.prompts[:4], some.prompts[4:8]
        found[name] = search_rule(engine, Reading(), some, prompts, costs, NAMES, sizes=[4])
        assert [one.found.score.setting for one in found[name].batches] == [NONE]
    assert "per_batch_size" in found["vllm"].written.text
    assert any("the fastest are none for 4" in note for note in found["sglang"].written.notes)


@pytest.mark.slow
def test_a_schedule_goes_on_up_to_the_last_number_priced() -> None:
    some, dear = traces(6), flat_costs(1.0, 10.0, per_token=2.0)
    costs, prompts = replace(flat_costs(1, 10), batches={4: dear, 8: dear}), (some.prompts[:4], some.prompts[4:8])
    engine = ENGINES["tensorrt-llm"]
    found = search_rule(engine, Reading(), some, prompts, costs, NAMES, sizes=[4, 8])
    assert [one.found.score.setting.all_values["draft_length"] for one in found.batches] == [4, 4]
    assert "draft_len_schedule: {3: 7, 7: 4, 8: 4}" in found.written.text


def test_passes_that_draft_nothing_are_in_the_price_of_a_verification() -> None:
    costs = replace(flat_costs(1.5, 10), batches={4: flat_costs(2.0, 30.0)})
    priced = with_further_passes(ENGINES["llama.cpp"], costs)
    assert priced.verify_ms[0].tolist() == [10, 11.5, 11.5]
    assert priced.batches[4].verify_ms[0].tolist() == [30, 32, 32]
    assert with_further_passes(ENGINES["vllm"], costs) is costs


def test_onnxruntime_genai_is_handed_lengths_that_it_takes() -> None:
    engine = ENGINES["onnxruntime-genai"]
    space = rule_space(engine, None, 40)
    assert [one.all_values["draft_length"] for one in space if one.policy == "constant"] == [*range(1, 17)]
    options = {
        K5: "max_draft_tokens=5, min_adaptive_k=0, cooldown=False",
        Setting.of({"name": "probed-length", "least": 2}): "max_draft_tokens=2, min_adaptive_k=2, cooldown=False",
        Setting.of(
            {"name": "probed-length", "least": 3, "max_draft": 3, "cooldown": True}
        ): "max_draft_tokens=3, min_adaptive_k=0, cooldown=True",
    }
    for setting, text in options.items():
        assert engine.write(NAMES, setting).text == f"params.set_speculative_options({text})"


def test_exllamav3_is_handed_a_confidence() -> None:
    setting = Setting.of({"name": "calibrated-confidence", "confidence": 0.6, "max_draft": 8})
    text = ENGINES["exllamav3"].write(NAMES, setting).text
    assert text == "Generator(..., num_draft_tokens=8, dynamic_draft_tokens=True, draft_confidence=0.6)"


@pytest.mark.slow
def test_adaptive_verification_is_switched_on_where_it_wins() -> None:
    setting = Setting.of({"name": "vllm-adaptive", "max_draft": 7})
    config = json.loads(flags("vllm", setting)["--speculative-config"])
    assert config["enable_adaptive_verification"] is True
    assert config["num_speculative_tokens"] == 7
    made = traces(6)
    # Texts of which all or nothing is accepted: what was estimated of a draft holds of the next.
    made.traces = [trace(f"p{n}", [n % 4 < 2] * 60) for n in range(12)]
    dear, cheap = flat_costs(0.1, 10, per_token=3), flat_costs(0.1, 10)
    assert "enable_adaptive_verification" in exported("vllm", made, dear).written.text
    found = exported("vllm", made, cheap)
    assert "enable_adaptive_verification" not in found.written.text
    assert any("verified adaptively: " in note for note in found.written.notes)


@pytest.mark.slow
def test_a_threshold_whose_time_is_not_known_is_told_of_and_not_written() -> None:
    made, costs = traces(6), flat_costs(1, 10)
    known, unknown = exported("llama.cpp", made, costs), exported("openvino", made, costs)
    assert known.best.setting.policy == "max-confidence"
    assert unknown.best.setting.policy == "constant"
    assert any("any K: " in note for note in unknown.written.notes)
    assert any("log-probabilities" in note for note in unknown.written.notes)


def test_adaptive_verification_is_replayed_with_all_passes_of_the_draft() -> None:
    made = traces(6)
    made.traces = [trace("p0", [False] * 40)]
    setting = Setting.of({"name": "vllm-adaptive", "max_draft": 3})
    found = score_in(ENGINES["vllm"], setting, made, ["p0"], flat_costs(1, 10, per_token=8))
    assert found is not None
    # The first draft is verified whole, those behind it not at all: unsure tokens are not worth 8 ms.
    assert found.drafted[0] == 3
    assert found.ms[0] == 40 * 10 + 3 * 8 + 37 * 3 + 2 + 1


def test_sglang_gets_its_adaptive_file_for_heads_alone() -> None:
    engine, head = ENGINES["sglang"], replace(NAMES, head="eagle3")
    stepped = Setting.of({"name": "stepped-length", "lengths": (1, 3, 5), "first": 3})
    written = engine.write(head, stepped)
    assert json.loads(written.text) == {"1": {"candidate_steps": [1, 3, 5]}}
    for word in ("EAGLE3", "--speculative-num-steps 3", "--speculative-adaptive ", "adaptive.json"):
        assert word in f"{written.place} "
    by_size = json.loads(engine.write(head, BY_SIZE).text)
    assert by_size == {"1": {"candidate_steps": [5]}, "4": {"candidate_steps": [2]}, "16": {"candidate_steps": [0]}}
    assert "adaptive" not in engine.write(head, K5).text
    kinds = [{one.policy for one in rule_space(engine, None, 9, kind)} for kind in (None, "eagle3")]
    assert kinds == [{"constant"}, {"constant", "stepped-length"}]
