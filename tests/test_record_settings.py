import pytest

from specctl.profile.schema import SamplingTable
from specctl.record_settings import FOREIGN, NAMES, ignored_setting, own_settings


def test_every_name_sets_a_key_of_the_sampling_table():
    assert set(NAMES.values()) == set(SamplingTable.model_fields) - {"verification"}
    assert not set(NAMES) & set(FOREIGN)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("temperatures", "temperature"),
        ("top-p", "top_p"),
        ("topP", "top_p"),
        ("topk", "top_k"),
        ("maxTokens", "max_tokens"),
        ("max_new_token", "max_new_tokens"),
        ("max-completion-tokens", "max_completion_tokens"),
        ("Stop", "stop"),
    ],
)
def test_a_misspelled_setting_is_named(key, near):
    assert ignored_setting(key, 0.5) == f"`{key}` has no effect; did you mean `{near}`?"


@pytest.mark.parametrize("key", ["length_penalty", "n", "stop_token_ids", "tools"])
def test_settings_of_other_programs_are_known(key):
    assert ignored_setting(key, 2) == f"`{key}` is not a setting of specctl and has no effect"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("presence_penalty", 0.0),
        ("tools", []),
        ("repetition_penalty", 1.0),
        ("length_penalty", 1.0),
        ("ignore_eos", False),
        ("min_tokens", 0),
        ("stop_token_ids", []),
        ("temprature", None),
    ],
)
def test_a_setting_that_asks_for_nothing_needs_no_words(key, value):
    assert ignored_setting(key, value) is None


@pytest.mark.parametrize(
    "key",
    [
        "id",
        "category",
        "model",
        "steps",
        "stops",
        "speed",
        "topic",
        "step",
        "tokens",
        "reference",
        "answer",
        "test",
        "metrics",
        "source",
        "url",
        "method",
        "user",
        "score",
        "temperature",
        "entry_point",
        "canonical_solution",
    ],
)
def test_other_fields_are_carried_through_without_a_word(key):
    assert ignored_setting(key, "x") is None


@pytest.mark.parametrize(
    ("data", "most"),
    [
        ({"logprobs": 2}, 2),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": True}, 0),
        ({"logprobs": False, "top_logprobs": 3}, None),
        ({"sampling": {"logprobs": 1}}, 1),
        ({"logprobs": True, "sampling": {"top_logprobs": 5}}, 5),
    ],
)
def test_log_probabilities_are_asked_for_as_texts_and_as_chats_do(data, most):
    assert own_settings(data).get("logprobs", (None, None))[1] == most


@pytest.mark.parametrize(
    ("key", "value"), [("n", True), ("n", 0), ("ignore_eos", 0), ("temprature", 0), ("echo", True)]
)
def test_a_value_that_only_looks_like_nothing_is_told(key, value):
    assert ignored_setting(key, value) is not None


def test_other_programs_switch_top_k_off_by_minus_one():
    assert own_settings({"top_k": -1, "sampling": {}}) == {"top_k": ("top_k", 0)}
    assert own_settings({"top_k": -2})["top_k"] == ("top_k", -2)


def test_a_schema_that_is_none_of_json_belongs_to_the_data():
    assert own_settings({"schema": "CREATE TABLE t (a int)"}) == {}
    assert own_settings({"schema": {"type": "null"}}) == {"json_schema": ("schema", {"type": "null"})}


@pytest.mark.parametrize("data", [{"stop": ""}, {"guided_regex": ""}, {"stop": None, "top_p": None}])
def test_what_is_empty_sets_nothing(data):
    assert own_settings(data) == {}
    assert "stop" in own_settings({"stop": [""]})  # an error, as it is in OpenAI's interface
